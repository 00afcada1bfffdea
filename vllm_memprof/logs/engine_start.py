"""One start of an engine and its workers, as far as a log tells of them.

``logs.starts`` sorts figures into them; what follows from the figures of a start stands here.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from math import ceil

from vllm_memprof.engines import VLLM
from vllm_memprof.engines.base import same_lines
from vllm_memprof.engines.line_format import (
    ASCEND,
    CAPTURE,
    CUDA,
    GRANT,
    INIT,
    LOAD,
    OOM,
    PLAN,
    READY,
    LogLines,
    PrintedRank,
)
from vllm_memprof.logs.config import Config
from vllm_memprof.logs.figures import Figure, Prefix
from vllm_memprof.logs.formats import LOGS, log_of, words
from vllm_memprof.logs.notes import LogNotes
from vllm_memprof.logs.tracebacks import Traceback
from vllm_memprof.record.failures import PROFILE
from vllm_memprof.record.loader import PrintedSleep
from vllm_memprof.text import text
from vllm_memprof.units import only_known, smallest

#: Of a figure that a process may print many times with other values, the one that counts.
_LARGEST, _LATEST, _LEAST = words("largest"), words("latest"), words("least")
_LOOSE, _SEVERAL = words("loose"), words("contradiction_is_unknown")
#: Figure that a person noted beside the log, by npu-smi -> what it is.
_NOTED = {"before": "before the start", "after": "after it", "process": "by the process"}
#: A figure of a start that failed -> why.
_REFUSED = {figure: why for log in LOGS.values() for figure, why in log.refused.items()}


@dataclass
class LoggedOom:
    """The first failed allocation of a worker; the later ones are counted."""

    traceback: Traceback  # its phase may be that of the lines before it
    notes: LogNotes  # what the log has noted before it
    stage: int  # the last whose lines came before it; -1 for none
    failures: int = 1


@dataclass
class Worker:
    """One worker, as far as the log tells workers apart."""

    key: str
    label: str | None = None  # TP0, PP1_TP3, DP1; None where nothing names it
    pid: int | None = None
    dims: dict[str, int] = field(default_factory=dict)  # dp, pp, pcp, tp, ep, rank
    device: str | None = None  # as OOM and start-up messages name it
    figures: dict[str, Figure] = field(default_factory=dict)
    stage: int = -1
    oom: LoggedOom | None = None
    first_line: int = 0
    last_line: int = 0
    in_core: bool = False  # the engine core prints its lines: it is inside the core
    unknown: set[str] = field(default_factory=set)  # figures printed with several values
    sleeps: list[PrintedSleep] = field(default_factory=list)

    @property
    def noted(self) -> str | None:
        """What a person noted beside the log, by npu-smi."""
        mib = {
            each: f"{int(figure.value) >> 20:,}"
            for each in (*_NOTED, "total")
            if (figure := self.figures.get(f"npu_smi_{each}_bytes")) is not None
        }
        used = [f"{mib[each]} {said}" for each, said in _NOTED.items() if each in mib]
        total = f"; the card has {mib['total']}" if "total" in mib else ""
        return f"npu-smi: used, MiB: {', '.join(used)}{total}" if used else None

    def contradicts(self, figure: Figure) -> bool:
        """Return True for another value of a known figure, further off than rounding explains."""
        known = self.figures.get(figure.name)
        changes = figure.name in (*_LARGEST, *_LATEST, *_LEAST)
        return known is not None and not changes and not known.agrees(figure)

    def breaks(self, figure: Figure) -> bool:
        """Return True for a contradiction that means another worker or start."""
        if figure.name in _LOOSE or not self.contradicts(figure):
            return False
        reduced = self.figures.get("kv_cache_reduced_bytes")
        if reduced is None or figure.name != "kv_cache_bytes" or figure.format.stage != READY:
            return True
        return not reduced.agrees(figure)

    def restarts_with(self, figure: Figure) -> bool:
        """Return True for a line of a stage that this worker has passed: another start."""
        stage = figure.format.stage
        if stage is not None and stage > INIT and "startup_refused" in self.figures:
            return True
        if stage is None or stage > GRANT or stage >= self.stage:
            return False
        granted = any(known.format.stage == GRANT for known in self.figures.values())
        if stage == GRANT and self.stage == CAPTURE and not granted:
            return False  # graphs may be captured before the KV cache is sized
        # every start prints these once, before the KV cache is granted
        once = stage == LOAD or (
            figure.format.equation in ("E0", "E0a") and figure.name == "device_total_bytes"
        )
        return figure.name not in self.figures or (once and self.stage >= GRANT)

    def has_all(self, figures: Iterable[Figure]) -> bool:
        """Return whether it has printed these figures, with these values."""
        values = {name: known.value for name, known in self.figures.items()}
        return all(values.get(figure.name) == figure.value for figure in figures)

    def add(self, figure: Figure) -> None:
        """Keep a figure: the first one printed, or the more exact one of two that agree."""
        known = self.figures.get(figure.name)
        if known is None or figure.name in _LATEST:
            better = True
        elif figure.name in _LARGEST:
            better = figure.value > known.value
        elif figure.name in _LEAST:
            better = figure.value < known.value
        elif figure.name.endswith("_bytes"):
            better = figure.half_unit_bytes < known.half_unit_bytes and known.agrees(figure)
        else:
            better = len(figure.text) > len(known.text) and known.agrees(figure)
        if better:
            self.figures[figure.name] = figure
        self.first_line = min(self.first_line or figure.line, figure.line)
        self.last_line = max(self.last_line, figure.line)
        if figure.format.stage is not None:
            self.stage = max(self.stage, figure.format.stage)

    def printed_rank(self, config: Config) -> PrintedRank:
        """Return the figures it printed, with those that follow from them and from the set-up."""
        found = {name: each for name, each in self.figures.items() if name not in self.unknown}
        total, requested = found.get("device_total_bytes"), found.get("requested_bytes")
        asked = found.get("gpu_memory_utilization")
        equivalent = found.get("equivalent_utilization")
        if total and asked and equivalent and asked.line == equivalent.line:
            # the engine prints the utilization, and it less the graph estimate / the total of the
            # device, to four digits each.
            # (vllm/v1/worker/gpu_worker.py::Worker.determine_available_memory, 0.18 to 0.33)
            # A size of an older release means that a paste holds several starts
            share = asked.value - equivalent.value
            half = ceil(total.value * 1e-4 + share * total.half_unit_bytes)
            if total.format.equation not in ("E0", "E0a"):
                estimate = replace(total, value=round(share * total.value), half_unit_bytes=half)
                found.setdefault("graph_estimate_bytes", estimate)
        free, used = (found.get(f"oom_{name}_bytes") for name in ("unallocated", "allocated"))
        if free and used:
            half = free.half_unit_bytes + used.half_unit_bytes
            reserved = replace(used, value=int(free.value + used.value), half_unit_bytes=half)
            found.setdefault("oom_reserved_bytes", reserved)
        if "startup_plan_bytes" in found:  # to the byte; the line that follows rounds it
            found["kv_cache_memory_bytes_arg"] = found["startup_plan_bytes"]
        figures: dict[str, int | float | None] = {name: each.value for name, each in found.items()}
        ratio = config.gpu_memory_utilization
        if ratio is not None and 0 < ratio <= 1:
            # one of another start does not fit the device and the request printed
            off, slack = 0.0, 0.0
            if total and requested:
                off = abs(total.value * ratio - requested.value)
                slack = total.half_unit_bytes * ratio + requested.half_unit_bytes + 2
            if off <= slack:
                figures.setdefault("gpu_memory_utilization", ratio)
        if config.kv_cache_memory_bytes is not None:
            figures.setdefault("kv_cache_memory_bytes_arg", config.kv_cache_memory_bytes)
        half_units = {name: half for name, each in found.items() if (half := each.half_unit_bytes)}
        return PrintedRank(figures, half_units)


@dataclass
class EngineStart:
    """One start of an engine; it waits until it has a figure."""

    config: Config
    members: dict[str, Prefix] = field(default_factory=dict)  # by label
    _alike: tuple[int, bool] = (0, False)  # so many members, whether they are ``anonymous``
    kinds: set[str] = field(default_factory=set)  # of the lines that have set it up
    workers: dict[str, Worker] = field(default_factory=dict)  # by key
    #: Figures of the KV cache that an engine core printed, by data-parallel rank.
    kv_plans: dict[int | None, dict[str, Figure]] = field(default_factory=dict)
    engines: set[str] = field(default_factory=set)  # named by lines that one engine alone prints
    equations: dict[str, int] = field(default_factory=dict)  # equation -> line that shows its form
    first_line: int = 0
    last_line: int = 0
    inferred: bool = False  # no line names its beginning: figures alone tell it apart
    finished: bool = False  # the server reported that it is up
    broken: bool = False  # an engine process reported that it failed
    #: Of the section that it stands in, where its command stands above that section.
    heading: str | None = None

    @property
    def log(self) -> LogLines:
        """The lines of its engine, vLLM's where none is known."""
        given = "" if self.config.given is None else self.config.given.engine
        return log_of(next(iter(self.engines), given))

    @property
    def printed(self) -> list[Figure]:
        """The figures of all its workers."""
        return [figure for worker in self.workers.values() for figure in worker.figures.values()]

    @property
    def drafts(self) -> bool:
        """Whether a second model is loaded beside the one that serves."""
        given = self.config.given
        return bool(self.config.draft_model) or (given is not None and given.draft_model)

    def engine_of(self, figure: Figure) -> str | None:
        """Return the engine that a line names; torch's messages name the chip."""
        chip = figure.format.stage == OOM and self.log is not LOGS[VLLM.name]
        return None if chip else figure.format.engine

    def several_values(self, figure: Figure) -> bool:
        """Return True for a figure that one start of this engine may print with two values."""
        per_model = self.drafts and figure.name in self.log.once_per_model
        return per_model or figure.name in _SEVERAL

    def of_two_models(self, worker: Worker, figures: list[Figure]) -> list[Figure]:
        """Return a worker's figures, those of a draft model by their names; note that there is one.

        Of two models that a worker loads the smaller is the draft model.
        """
        if self.drafts:
            named = []
            for figure in figures:
                name, target = self.log.draft.get(figure.name), worker.figures.get(figure.name)
                loads = worker.stage == figure.format.stage == LOAD
                smaller = target is not None and target.value > figure.value
                if name and loads and smaller and worker.contradicts(figure):
                    figure = replace(figure, name=name)
                named.append(figure)
            return named
        begin, end = self.log.free_around_load
        after = worker.figures.get(end)
        if after is not None and worker.stage == LOAD:
            # it loads a model while one that it has loaded takes its memory
            free = [figure for figure in figures if figure.name == begin]
            halves = [after.half_unit_bytes + figure.half_unit_bytes for figure in free]
            if any(one.value <= after.value + half for one, half in zip(free, halves, strict=True)):
                self.config = replace(self.config, draft_model=True)
        return figures

    def oom_of(self, worker: Worker, traceback: Traceback, notes: LogNotes) -> LoggedOom:
        """Return the first failed allocation of a worker; after the start-up it is of a request."""
        planned, up = PLAN if self.kv_plans else -1, READY if self.finished else -1
        served = self.finished or notes.at_request is not None
        if served or any(each.moment != PROFILE for each in notes.readings):
            traceback.phase = traceback.phase or "request"
        return LoggedOom(traceback, notes, max(worker.stage, planned, up))

    def rejects(self, figures: list[Figure]) -> bool:
        """Return True for a line that the engine of this start does not print."""
        engines = {self.engine_of(figure) for figure in figures} - {None}
        forms = {figure.format.equation for figure in figures} - {None}
        return bool(self.engines and engines - self.engines) or not all(
            same_lines(form, other) for form in forms if form for other in self.equations
        )

    def has(self, prefix: Prefix | None) -> bool:
        """Return whether a process is one of its own."""
        return prefix is not None and self.members.get(prefix.label) == prefix

    def shares(self, older: EngineStart) -> bool:
        """Return whether both have a process of the same name and id."""
        return any(older.members.get(name) == one for name, one in self.members.items())

    def distance(self, prefix: Prefix | None) -> int | None:
        """Return how far below a process the closest one of this start is; None: there is none.

        Instances may start side by side: the closest earlier process tells them apart.
        """
        if prefix is None or prefix.pid is None or prefix.ip is not None:
            return None
        pids = only_known(other.pid for other in self.members.values())
        return smallest(prefix.pid - pid for pid in pids if pid <= prefix.pid)

    @property
    def anonymous(self) -> bool:
        """Whether process ids were made alike, as people do before they share a log."""
        members, alike = self._alike
        if members != len(self.members):  # for each line of hundreds of workers
            pids = [
                (one.pid, one.ip)
                for one in self.members.values()
                if not one.is_worker or one.short is not None
            ]
            alike = len(pids) > len(set(pids))
            self._alike = len(self.members), alike
        return alike

    def takes_core(self, prefix: Prefix | None) -> bool:
        """Return True for a further data-parallel engine core of a start that has one."""
        if prefix is None or prefix.label in self.members or prefix.replica is None:
            return False
        return any(member.replica is not None for member in self.members.values())

    @property
    def unnamed(self) -> list[Worker]:
        """The workers that nothing names."""
        return [worker for worker in self.workers.values() if worker.label is None]

    def unnamed_peer(self, worker: Worker, figures: list[Figure]) -> Worker | None:
        """Return the next of several ranks without labels, while some ranks were not seen."""
        if worker.label is not None or worker.key.startswith("device"):
            return None
        for other in self.unnamed:
            if not any(other.contradicts(one) or other.restarts_with(one) for one in figures):
                return other
        if len(self.unnamed) >= self.config.world_size or any(map(worker.restarts_with, figures)):
            return None
        peer = Worker(f"#{len(self.unnamed) + 1}")
        self.workers[peer.key] = peer
        return peer

    def describe(self, worker: Worker) -> str:
        """Return what is known of a worker without a label: its device, or its place."""
        failed = worker.oom is not None or "startup_refused" in worker.figures
        if worker.device is not None and (failed or len(self.workers) > 1):
            return worker.device if ":" in worker.device else f"device {worker.device}"
        unnamed = self.unnamed
        size = max(self.config.world_size, len(unnamed))
        if size > 1:
            place = unnamed.index(worker) + 1 if worker in unnamed else 1
            return text("worker {place} of {size}", place=place, size=size)
        return "the worker" if len(self.workers) <= 1 else "lines without a rank"

    @property
    def notes(self) -> list[str]:
        """What a reader has to know of it: its place, its ranks, what stands beside the log."""
        notes = list[str]()
        if self.heading is not None:
            notes.append(
                text(
                    'it stands under "{heading}"; the command is the last one above that heading',
                    heading=self.heading,
                )
            )
        if self.config.world_size > 1 and self.unnamed:
            notes.append(
                text(
                    "the log does not name ranks: workers are numbered in the order of their lines"
                )
            )
        notes += filter(None, (worker.noted for worker in self.workers.values()))
        if self.log.notes is not None:
            unknown = {name for worker in self.workers.values() for name in worker.unknown}
            notes += self.log.notes(self.drafts, unknown)
        return notes

    def forms_of(self, engine: str | None) -> list[str]:
        """Return the equations that its lines are of."""
        names = {figure.name for figure in self.printed}
        if self.equations or engine is None or "non_kv_cache_bytes" not in names:
            return list(self.equations)
        # the summary of memory_profiling belongs to one of these
        return ["E4" if engine == ASCEND else "E6" if "consumed_bytes" in names else "E5"]

    @property
    def kv_figures(self) -> dict[int | None, dict[str, Figure]]:
        """The figures of the KV cache by data-parallel rank.

        Where no line says how many tokens are served, those of the ranks' pools: the ranks of a
        start have as many each; where one has others, none counts.
        """
        if self.kv_plans:
            return self.kv_plans
        name = self.log.pool_tokens or ""
        found: dict[int | None, list[Figure]] = {}
        spoilt: set[int | None] = set()
        for worker in self.workers.values():
            if name in worker.figures:
                found.setdefault(worker.dims.get("dp"), []).append(worker.figures[name])
            if name in worker.unknown:
                spoilt.add(worker.dims.get("dp"))
        return {
            dp: {"tokens": pools[0]}
            for dp, pools in found.items()
            if dp not in spoilt and len({pool.value for pool in pools}) == 1
        }

    def engine_named(self, spoken: Set[str]) -> tuple[str | None, str | None, list[str]]:
        """Return (engine, its version, notes on how the version is known).

        Messages of torch, torch_npu and the runtime name the platform, not the engine: without a
        line of vLLM's own it is that of ``spoken``, or not known.
        """
        config = self.config
        if self.log is not LOGS[VLLM.name]:
            return self.log.engine, None, []
        if VLLM.name not in spoken and all(figure.format.stage == OOM for figure in self.printed):
            return next(iter(sorted(spoken)), None), None, []
        named = config.engine or config.around
        if ASCEND in self.engines or (named == ASCEND and CUDA not in self.engines):
            if config.ascend_version is not None or config.vllm_version is None:
                return ASCEND, config.ascend_version, []
            release = config.vllm_version.partition("+")[0].partition(".dev")[0]
            note = f"the version of vllm-ascend is taken to be that of vLLM, {release}"
            return ASCEND, release, [note]
        if CUDA in self.engines or named == CUDA:
            return CUDA, config.vllm_version, []
        return None, None, []

    @property
    def outcome(self) -> tuple[str, str | None]:
        """Return (status of the run, reason where it failed)."""
        names = {figure.name for figure in self.printed}
        if any(name.startswith("oom_") for name in names):
            return "oom", None
        for figure, why in _REFUSED.items():
            if figure in names:
                return "failed", why
        granted = [figure.value for figure in self.printed if figure.name == "kv_cache_bytes"]
        if min(granted, default=1) <= 0:
            return "failed", f"the KV cache is {'negative' if min(granted) < 0 else 0}"
        if self.broken and not self.finished:
            return "failed", "an engine process failed"
        return "ok" if self.finished or self.kv_plans or granted else "truncated", None
