"""Sorts figures into starts of an engine and their workers.

One text may hold several starts, instances and ranks, with or without prefixes. A figure belongs to
the start whose process printed it; without a prefix to the newest start. A new start begins after a
line that starts an engine, after a heading, when a process prints a line of a stage that it has
passed, or when it prints another value for a figure that has one value per start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from vllm_memprof.engines.base import same_lines
from vllm_memprof.engines.line_format import (
    CAPTURE,
    ENGINE,
    GRANT,
    INIT,
    LOAD,
    OOM,
    PLAN,
    READY,
    LogLines,
)
from vllm_memprof.logs.config import OWN_WORDS, WITHIN_CORE, Config, ConfigLine, ConfigReader
from vllm_memprof.logs.figures import Figure, ParsedLine, Prefix
from vllm_memprof.logs.formats import OF_ENGINES
from vllm_memprof.logs.notes import LogNotes
from vllm_memprof.logs.npu_smi import NpuSmi
from vllm_memprof.logs.tracebacks import Traceback, Tracebacks
from vllm_memprof.record.failures import PROFILE
from vllm_memprof.record.loader import PrintedSleep

#: Figures that a process may print many times with other values: the largest or latest counts.
_LARGEST = frozenset({"serving_reserved_bytes", "serving_allocated_bytes"})
_LATEST = frozenset({"sleep_freed_bytes", "sleep_in_use_bytes", "sleep_communicator_bytes"}).union(
    *(log.latest for log in OF_ENGINES)
)
_LEAST = frozenset[str]().union(*(log.least for log in OF_ENGINES))
#: Figures on which two lines of one start may differ.
_LOOSE = frozenset(
    {
        "graph_bytes",
        "graph_estimate_bytes",
        "graph_difference_bytes",
        "peak_activation_bytes",
        "non_torch_increase_bytes",
        "printed_peak_activation_bytes",
        "encoder_budget_tokens",
        "encoder_profile_items",
        "gpu_memory_utilization",
        "block_size",
    }
)
#: Figure of the model that serves -> of a draft model that the same worker loads after it.
OF_DRAFT = {"weights_bytes": "draft_weights_bytes"}
BROKEN = (
    "Engine core initialization failed",
    "WorkerProc hit an exception",
    "EngineCore failed to start",
    *(words for log in OF_ENGINES for words in log.broken),
)
UP = ("startup complete", "Starting vLLM API server on http", *(log.ready for log in OF_ENGINES))
#: In what a server prints that ends as it was told to.
DOWN = ("Shutting down", "shutdown complete", "Finished server process")
#: Starts that still take figures from their processes; older ones are closed.
OPEN_STARTS = 8
#: Starts that are kept of one log; the rest is counted.
MAX_STARTS = 500
#: Figures that a worker prints each time it sleeps, in their order in one line.
_SLEPT = ("sleep_freed_bytes", "sleep_in_use_bytes")
#: Sleeps that are kept of one worker, the first ones.
MAX_SLEEPS = 4096
#: Workers that are kept of one start.
MAX_WORKERS = 4096
_ENGINES = {name: OWN_WORDS[name] for name in ("vllm", *(log.engine for log in OF_ENGINES))}

_DIMENSION = re.compile(r"(?<![A-Z])(DP|PP|PCP|TP|EP|RANK)(\d+)")
_LOADS = re.compile(r"Starting to load model (?P<model>\S+?)(?:\.\.\.|\s|$)")
_RANK_LINE = re.compile(
    r"rank (?P<rank>\d+) in world size (?P<world>\d+) is assigned as DP rank (?P<dp>\d+),"
    r" PP rank (?P<pp>\d+),(?: PCP rank (?P<pcp>\d+),)? TP rank (?P<tp>\d+)"
)


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

    def contradicts(self, figure: Figure) -> bool:
        """Return True for another value of a known figure, further off than rounding explains."""
        known = self.figures.get(figure.name)
        if known is None or figure.name in _LARGEST | _LATEST | _LEAST:
            return False
        return not agree(known, figure)

    def restarts_with(self, figure: Figure) -> bool:
        """Return True for a line of a stage that this worker has passed: another start."""
        stage = figure.format.stage
        if stage is not None and stage > INIT and "startup_refused" in self.figures:
            return True
        if stage is None or stage > GRANT or stage >= self.stage:
            return False
        if stage == GRANT and self.stage == CAPTURE and not self._has(GRANT):
            return False  # graphs may be captured before the KV cache is sized
        # every start prints these once, before the KV cache is granted
        once = stage == LOAD or (
            figure.format.equation in ("E0", "E0a") and figure.name == "device_total_bytes"
        )
        return figure.name not in self.figures or (once and self.stage >= GRANT)

    def _has(self, stage: int) -> bool:
        return any(figure.format.stage == stage for figure in self.figures.values())

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
            better = figure.half_unit_bytes < known.half_unit_bytes and agree(known, figure)
        else:
            better = len(figure.text) > len(known.text) and agree(known, figure)
        if better:
            self.figures[figure.name] = figure
        self.first_line = min(self.first_line or figure.line, figure.line)
        self.last_line = max(self.last_line, figure.line)
        if figure.format.stage is not None:
            self.stage = max(self.stage, figure.format.stage)


def agree(one: Figure, other: Figure) -> bool:
    """Return True where two printed figures can be the same number."""
    if one.name.endswith("_bytes"):
        return abs(one.value - other.value) <= one.half_unit_bytes + other.half_unit_bytes + 1
    digits = min(len(figure.text.partition(".")[2]) for figure in (one, other))
    return abs(one.value - other.value) <= (0.5 * 10.0**-digits if digits else 0) + 1e-9


@dataclass
class EngineStart:
    """One start of an engine."""

    config: Config
    members: dict[str, Prefix] = field(default_factory=dict)  # by label
    workers: dict[str, Worker] = field(default_factory=dict)  # by key
    #: Figures of the KV cache that an engine core printed, by data-parallel rank.
    kv_plans: dict[int | None, dict[str, Figure]] = field(default_factory=dict)
    engines: set[str] = field(default_factory=set)  # named by lines that one engine alone prints
    equations: dict[str, int] = field(default_factory=dict)  # equation -> line that shows its form
    first_line: int = 0
    last_line: int = 0
    inferred: bool = False  # no line names its beginning: figures alone tell it apart
    repeats: bool = False  # it holds nothing but figures of the start before it
    finished: bool = False  # the server reported that it is up
    broken: bool = False  # an engine process reported that it failed
    #: Of the section that it stands in, where its command stands above that section.
    heading: str | None = None

    @property
    def log(self) -> LogLines | None:
        """Its engine's own lines; None of an engine that has no others than vLLM."""
        given = "" if self.config.given is None else self.config.given.engine
        named = self.engines or {given}
        return next((log for log in OF_ENGINES if log.engine in named), None)

    @property
    def drafts(self) -> bool:
        """Whether a second model is loaded beside the one that serves."""
        given = self.config.given
        said = self.log is not None and given is not None and given.draft_model
        return said or bool(self.config.draft_model)

    def engine_of(self, figure: Figure) -> str | None:
        """Return the engine that a line names; torch's messages name the chip."""
        chip = figure.format.stage == OOM and self.log is not None
        return None if chip else figure.format.engine

    def several_values(self, figure: Figure) -> bool:
        """Return True for a figure that one start of this engine may print with two values."""
        per_model = self.drafts and self.log is not None and figure.name in self.log.once_per_model
        return per_model or any(figure.name in log.contradiction_is_unknown for log in OF_ENGINES)

    def rejects(self, figures: list[Figure]) -> bool:
        """Return True for a line that the engine of this start does not print."""
        for figure in figures:
            engine, equation = self.engine_of(figure), figure.format.equation
            if engine is not None and self.engines and engine not in self.engines:
                return True
            if equation is not None and not all(
                same_lines(equation, other) for other in self.equations
            ):
                return True
        return False


@dataclass
class _Pending:
    """The set-up of a start without figures so far."""

    config: Config
    members: dict[str, Prefix] = field(default_factory=dict)  # by label
    kinds: set[str] = field(default_factory=set)  # of the lines that said it

    def distance(self, prefix: Prefix | None) -> int | None:
        """Return how far below a process the closest one of this start is; None: there is none."""
        if prefix is None or prefix.pid is None or prefix.ip is not None:
            return None
        pids = (other.pid for other in self.members.values() if other.pid is not None)
        return min((prefix.pid - pid for pid in pids if pid <= prefix.pid), default=None)


class StartSorter:
    """Takes parsed lines in order; ``starts`` is the result."""

    def __init__(self) -> None:
        self.starts: list[EngineStart] = []
        self.left_out = 0  # starts beyond MAX_STARTS
        self.lines = 0
        self.spoken: set[str] = set()  # engines that have a line of their own
        self.newest_first = False  # the lines were turned round before they were read
        self.smi = NpuSmi()
        self.notes = LogNotes()
        self._reader = ConfigReader()
        self.exports = self._reader.exports
        self._pending: _Pending | None = None  # the newest
        self._beside: list[_Pending] = []  # of other processes, that start at the same time
        self._section = False  # a heading came: the next figure begins a start of the same set-up
        self._ranks_by_pid: dict[tuple[int, str | None], tuple[str, dict[str, int]]] = {}
        self._document = Config()  # of the whole log, as far as nothing else is said
        self._loading = ""  # the model whose weights are being loaded
        self._tracebacks = Tracebacks()

    @property
    def config(self) -> Config:
        """Return what is known of a start without figures."""
        return self._pending.config if self._pending is not None else self._document

    def sort(self, lines: Iterable[ParsedLine]) -> StartSorter:
        """Read all lines of a log."""
        for line in lines:
            self.read(line)
        for previous, start in zip(self.starts, self.starts[1:], strict=False):
            start.repeats = _repeats(start, previous)
        if self._pending is not None and len(self.starts) == 1:
            only = self.starts[0]  # its command may stand below its log
            if not only.config.command:
                only.config = self._pending.config.merged(only.config)
        return self

    def read(self, line: ParsedLine) -> None:
        """Read one line."""
        self.lines += 1
        found = self._reader.read(line.text)
        if found is not None:
            self._configure(found, line.prefix)
        if "is assigned as" in line.text:
            self._assign_rank(line)
        if "Starting to load" in line.text and (match := _LOADS.search(line.text)):
            self._begin_to_load(match["model"])
        self._tracebacks.read(line)
        if self.starts and not line.figures:
            up = any(text in line.text for text in UP)
            broken = any(text in line.text for text in BROKEN)
            if up or broken:
                start = self._speaking(line.prefix)
                start.finished, start.broken = start.finished or up, start.broken or broken
        if "vllm" not in self.spoken:  # it is in most lines; another counts where it is in none
            self.spoken.update(name for name, own in _ENGINES.items() if own.search(line.text))
        self.smi.read(line.text)
        self.notes.read(line.text)
        if line.figures:
            self._add_figures(line)

    def _speaking(self, prefix: Prefix | None) -> EngineStart:
        """Return the start whose process this is; the newest where none is known to be."""
        own = (
            start
            for start in reversed(self.starts[-OPEN_STARTS:])
            if prefix is not None and start.members.get(prefix.label) == prefix
        )
        return next(own, self.starts[-1])

    # --- set-up

    def _configure(self, found: ConfigLine, prefix: Prefix | None) -> None:
        config = found.config
        if config.engine:
            self._document = self._document.merged(
                Config(engine=config.engine, ascend_version=config.ascend_version)
            )
        newest = self.starts[-1] if self.starts else None
        if found.kind == "trace":
            if self._pending is not None:
                self._pending.config = self._pending.config.merged(config)
            elif newest is not None:
                newest.config = newest.config.merged(config)
            else:
                self._document = self._document.merged(config)
            return
        if found.kind == "heading":
            self._section = True
            self._document = self._document.merged(config)
            if self._pending is not None:
                self._pending.config = self._pending.config.merged(config)
            return
        is_further_core = (
            newest is not None
            and self._pending is None
            and found.kind == "init"
            and _is_sibling(prefix, newest.members)
        )
        if newest is not None and is_further_core:
            newest.config = newest.config.merged(config)
            return
        pending = self._pending_of(prefix)
        if pending is None or (
            found.kind in pending.kinds and not _is_sibling(prefix, pending.members)
        ):
            # what the same process has said before is over
            beside = [*self._beside, *filter(None, [self._pending])] if prefix else []
            beside = [each for each in beside if prefix not in each.members.values()]
            self._beside = beside[-OPEN_STARTS:]
            pending = self._pending = _Pending(
                Config(around=self._document.engine, ascend_version=self._document.ascend_version)
            )
            self._document = Config(engine=self._document.engine)
        pending.config = pending.config.merged(config)
        pending.kinds.add(found.kind)
        if prefix is not None:
            pending.members[prefix.label] = prefix

    def _pending_of(self, prefix: Prefix | None) -> _Pending | None:
        """Return the start without figures to which a process belongs; the newest where in doubt.

        Instances may start side by side: the closest earlier process tells them apart.
        """
        near = [
            (distance, -order, each)
            for order, each in enumerate((*self._beside, *filter(None, [self._pending])))
            if (distance := each.distance(prefix)) is not None
        ]
        return min(near, key=lambda each: each[:2])[2] if near else self._pending

    def _assign_rank(self, line: ParsedLine) -> None:
        """Read the line in which a worker names its place; keep it by process id."""
        match = _RANK_LINE.search(line.text)
        if match is None or line.prefix is None or line.prefix.pid is None:
            return
        config = self.starts[-1].config if self.starts else Config()
        if (pending := self._pending_of(line.prefix)) is not None:
            config = pending.config
        dims = {name: int(match[name]) for name in ("dp", *WITHIN_CORE) if match[name] is not None}
        sizes = {name: config.parallel_size(name) or (2 if name == "tp" else 1) for name in dims}
        label = "_".join(f"{name.upper()}{dims[name]}" for name in dims if sizes[name] > 1)
        if len(self._ranks_by_pid) >= MAX_WORKERS:
            self._ranks_by_pid.clear()
        known = label, {**dims, "rank": int(match["rank"])}
        self._ranks_by_pid[(line.prefix.pid, line.prefix.ip)] = known

    def _begin_to_load(self, model: str) -> None:
        """Note a draft model: a worker that has loaded a model goes on with another one."""
        newest = self.starts[-1] if self.starts and self._pending is None else None
        if (
            newest is not None
            and not self._section
            and model != self._loading
            and all(worker.stage == LOAD for worker in newest.workers.values())
        ):
            newest.config = replace(newest.config, draft_model=True)
        self._loading = model

    # --- figures

    def _add_figures(self, line: ParsedLine) -> None:
        prefix, figures = line.prefix, list(line.figures)
        start = self._serving(figures) or self._start_of(prefix)
        names_worker = prefix is not None and _is_worker(prefix.label) and _short(prefix.label)
        if start.rejects(figures) or (
            names_worker and any(worker.in_core for worker in start.workers.values())
        ):
            start = self._restart(start)
        engine_figures = [figure for figure in figures if figure.format.scope == ENGINE]
        rank_figures = [figure for figure in figures if figure.format.scope != ENGINE]
        if engine_figures:
            start = self._add_kv_plan(start, prefix, engine_figures)
        if rank_figures:
            start = self._add_to_worker(start, prefix, rank_figures)
        start.first_line = start.first_line or line.line
        start.last_line = line.line
        for figure in figures:
            if engine := start.engine_of(figure):
                start.engines.add(engine)
            if figure.format.equation:
                start.equations.setdefault(figure.format.equation, line.line)
        if prefix is not None:
            start.members.setdefault(prefix.label, prefix)

    def _serving(self, figures: list[Figure]) -> EngineStart | None:
        """Return the start that serves, for a line that its engine alone prints while it does.

        Such a line begins no start, also below a heading, as a driver puts it between requests.
        """
        newest = self.starts[-1] if self.starts and self._pending is None else None
        log = None if newest is None else newest.log
        serves = log is not None and all(
            figure.format.engine == log.engine and figure.format.stage is None for figure in figures
        )
        return newest if serves else None

    def _start_of(self, prefix: Prefix | None) -> EngineStart:
        """Return the start to which the process of a prefix belongs, if need be a new one."""
        candidates = self.starts[-OPEN_STARTS:]
        pending = self._pending_of(prefix)
        if prefix is not None and prefix.pid is not None:
            began_again = set() if pending is None else set(pending.members.items())
            for start in reversed(candidates):
                if began_again & start.members.items():
                    break  # the same process ids, as in a container: this start is over
                if start.members.get(prefix.label) == prefix and not _anonymous_pids(start.members):
                    return start
                began_again |= start.members.items()
        if self._section or not self.starts:
            return self._new_start(pending)
        near = None if prefix is None or pending is None else pending.distance(prefix)
        if pending is not None and near is None:
            return self._new_start(pending)
        newest = self.starts[-1]
        if prefix is None or prefix.pid is None or _is_generic(prefix.label):
            return newest if pending is None else self._new_start(pending)
        if newest.members.get(prefix.label) == prefix and pending is None:
            return newest
        # instances may start side by side: choose that with the closest earlier process
        nearest, nearest_pid = None, -1 if near is None else prefix.pid - near
        for start in candidates:
            if prefix.label in start.members or _anonymous_pids(start.members):
                continue
            pids = [other.pid for other in start.members.values() if other.pid is not None]
            below = max((pid for pid in pids if pid < prefix.pid), default=-1)
            if below > nearest_pid:
                nearest, nearest_pid = start, below
        if nearest is not None:
            return nearest
        if pending is not None:
            return self._new_start(pending)
        return newest if prefix.label not in newest.members else self._new_start()

    def _new_start(self, pending: _Pending | None = None) -> EngineStart:
        """Begin a start, with the set-up that is pending for it; else with the previous one's."""
        if pending is not None:
            base = replace(
                self._document, around=self._document.engine, engine=None, ascend_version=None
            )
            start = EngineStart(base.merged(pending.config), dict(pending.members))
        else:
            previous = self.starts[-1].config if self.starts else Config()
            start = EngineStart(previous.merged(self._document))
            if self._section and start.config.command:
                start.heading = start.config.heading
        if pending is self._pending:
            self._pending = None
        self._beside = [each for each in self._beside if each is not pending]
        self._section = False
        if len(self.starts) >= MAX_STARTS:
            self.left_out += 1
            self.starts.pop()
        self.starts.append(start)
        return start

    def _restart(self, start: EngineStart) -> EngineStart:
        """Return a new start, with the set-up of the previous one where no line gave another."""
        configured = self._pending is not None or self._section
        new = self._new_start(self._pending)
        if not configured:
            new.config, new.heading = start.config, start.heading
            new.inferred = True
        return new

    def _add_kv_plan(
        self, start: EngineStart, prefix: Prefix | None, figures: list[Figure]
    ) -> EngineStart:
        """Add the engine core's figures; of several workers the least counts."""
        dp = None if prefix is None else _dims(prefix.label).get("dp")
        plan = start.kv_plans.setdefault(dp, {})
        clash = any(one.name in plan and not agree(plan[one.name], one) for one in figures)
        if clash and start.config.world_size <= 1:
            start = self._restart(start)
            plan = start.kv_plans.setdefault(dp, {})
        for figure in figures:
            known = plan.get(figure.name)
            least = figure.name in ("tokens", "max_concurrency", "blocks", "fitting_blocks")
            if known is None or (least and figure.value < known.value):
                plan[figure.name] = figure
        return start

    def _add_to_worker(
        self, start: EngineStart, prefix: Prefix | None, figures: list[Figure]
    ) -> EngineStart:
        """Add a worker's figures; return their start, which is a new one where they contradict."""
        is_oom = any(figure.format.stage == OOM for figure in figures)
        device = next((figure.device for figure in figures if figure.device is not None), None)
        if is_oom and any(
            all(
                (known := worker.figures.get(figure.name)) is not None
                and known.value == figure.value
                for figure in figures
            )
            for worker in start.workers.values()
        ):
            return start  # executors print a worker's error again
        worker = self._worker(start, prefix, device if is_oom else None)
        worker.device = worker.device or device
        if is_oom:
            # the first OOM is the cause; later ones are counted only
            if worker.oom is None:
                worker.oom = self._oom(start, worker, prefix)
            elif any(figure.name == "oom_requested_bytes" for figure in figures):
                worker.oom.failures += 1
            if worker.oom.failures > 1 or any(worker.contradicts(figure) for figure in figures):
                return start
        if start.log is None and start.drafts:
            figures = [_of_draft(worker, figure) for figure in figures]
        elif start.log is not None and _is_still_loaded(start.log, worker, figures):
            start.config = replace(start.config, draft_model=True)
        apart = [figure for figure in figures if start.several_values(figure)]
        for figure in apart:
            if worker.contradicts(figure):
                worker.unknown.add(figure.name)
        single = [figure for figure in figures if figure not in apart]
        again = [*single, *(figure for figure in apart if not start.drafts)]
        if any(map(worker.restarts_with, again)) or any(_breaks(worker, one) for one in single):
            other = self._unnamed_peer(start, worker, figures)
            if other is None:
                start = self._restart(start)
                other = self._worker(start, prefix, None)
            worker = other
            worker.device = worker.device or device
        if prefix is not None and "EngineCore" in prefix.label:
            stages = {figure.format.stage for figure in figures}
            worker.in_core = worker.in_core or bool(stages - {None, PLAN, OOM})
        for figure in figures:
            worker.add(figure)
        slept = [int(figure.value) for figure in figures if figure.name in _SLEPT]
        if slept and len(worker.sleeps) < MAX_SLEEPS:
            worker.sleeps.append(PrintedSleep(figures[0].line, *slept))
        return start

    def _oom(self, start: EngineStart, worker: Worker, prefix: Prefix | None) -> LoggedOom:
        """Return what is known before an OOM: after the start-up it is one of a request."""
        stages = worker.stage, PLAN if start.kv_plans else -1, READY if start.finished else -1
        found, notes, self.notes = self._tracebacks.take(prefix), self.notes, LogNotes()
        served = start.finished or notes.at_request is not None
        if served or any(each.moment != PROFILE for each in notes.readings):
            found.phase = found.phase or "request"
        return LoggedOom(found, notes, max(stages))

    def _worker(self, start: EngineStart, prefix: Prefix | None, oom_device: str | None) -> Worker:
        key, label, dims = self._identify(start, prefix)
        if oom_device is not None and label is None:
            first = start.workers.get(key)
            if first is not None and first.device not in (None, oom_device):
                key = f"device {oom_device}"  # OOM messages of several devices: several workers
        if key not in start.workers:
            pid = prefix.pid if prefix is not None and _is_worker(prefix.label) else None
            pid = None if _anonymous_pids(start.members) else pid
            worker = Worker(key, label, pid, dims)
            if len(start.workers) >= MAX_WORKERS:
                return worker  # read, and not kept
            start.workers[key] = worker
        return start.workers[key]

    def _identify(
        self, start: EngineStart, prefix: Prefix | None
    ) -> tuple[str, str | None, dict[str, int]]:
        """Return (key, label, ranks) of the worker that a prefix names; the key "" for none."""
        if prefix is None:
            return "", None, {}
        dims = _dims(prefix.label)
        if not _is_worker(prefix.label):
            if "dp" in dims and "EngineCore" in prefix.label:
                # with one worker per engine core, the core prints the worker's lines
                return f"DP{dims['dp']}", f"DP{dims['dp']}", dims
            return "", None, {}
        short = _short(prefix.label)
        if prefix.pid is not None and (prefix.pid, prefix.ip) in self._ranks_by_pid:
            assigned, known = self._ranks_by_pid[(prefix.pid, prefix.ip)]
            label = short or assigned or None
            return label or f"pid {prefix.pid}", label, {**known, **dims}
        if prefix.label.startswith("rank_"):
            # torch names a worker by its rank, vLLM by its place
            for worker in start.workers.values():
                rank = worker.dims.get("rank")
                if rank is None and not {"dp", "pp", "pcp"} & worker.dims.keys():
                    rank = worker.dims.get("tp")
                if rank == dims["rank"]:
                    return worker.key, worker.label, worker.dims
        if short is None:
            short = f"pid {prefix.pid}" if prefix.ip is None else f"{prefix.ip} pid {prefix.pid}"
        return short, short, dims

    @staticmethod
    def _unnamed_peer(start: EngineStart, worker: Worker, figures: list[Figure]) -> Worker | None:
        """Return the next of several ranks without labels, while some ranks were not seen."""
        if worker.label is not None or worker.key.startswith("device"):
            return None
        unnamed = [other for other in start.workers.values() if other.label is None]
        for other in unnamed:
            if not any(other.contradicts(one) or other.restarts_with(one) for one in figures):
                return other
        if len(unnamed) >= start.config.world_size or any(map(worker.restarts_with, figures)):
            return None
        peer = Worker(f"#{len(unnamed) + 1}")
        start.workers[peer.key] = peer
        return peer


def _repeats(start: EngineStart, previous: EngineStart) -> bool:
    """Return True where a start holds nothing but some of the figures of the one before it.

    Workers of V0 print the first lines of their budget one after the other, and excerpts repeat
    lines.
    """
    workers = list(start.workers.values())
    if not start.inferred or start.kv_plans or len(workers) != 1:
        return False
    (worker,) = workers
    return worker.label is None and any(
        len(worker.figures) < len(other.figures)
        and all(
            (known := other.figures.get(name)) is not None and known.value == figure.value
            for name, figure in worker.figures.items()
        )
        for other in previous.workers.values()
    )


def _breaks(worker: Worker, figure: Figure) -> bool:
    """Return True for a contradiction that means another worker or start."""
    if figure.name in _LOOSE or not worker.contradicts(figure):
        return False
    reduced = worker.figures.get("kv_cache_reduced_bytes")
    if reduced is None or figure.name != "kv_cache_bytes" or figure.format.stage != READY:
        return True
    return not agree(replace(reduced, name=figure.name), figure)


def _of_draft(worker: Worker, figure: Figure) -> Figure:
    """Return a figure under the name of the draft model's, where a larger model is loaded."""
    name, target = OF_DRAFT.get(figure.name), worker.figures.get(figure.name)
    if name is None or target is None or not worker.stage == figure.format.stage == LOAD:
        return figure
    larger = target.value > figure.value and worker.contradicts(figure)
    return replace(figure, name=name) if larger else figure


def _is_still_loaded(log: LogLines, worker: Worker, figures: list[Figure]) -> bool:
    """Return True where a worker loads a model while one that it has loaded takes its memory."""
    begin, end = log.free_around_load
    after = worker.figures.get(end)
    return worker.stage == LOAD and any(
        figure.name == begin
        and after is not None
        and figure.value <= after.value + after.half_unit_bytes + figure.half_unit_bytes
        for figure in figures
    )


def _dims(label: str) -> dict[str, int]:
    return {name.lower(): int(number) for name, number in _DIMENSION.findall(label)}


def _short(label: str) -> str | None:
    """Return TP0 of Worker_TP0, "rank 3" of [rank3]; None for a name that many processes share."""
    parts = [f"{name}{number}" for name, number in _DIMENSION.findall(label) if name != "RANK"]
    if parts:
        return "_".join(part for part in parts if not part.startswith("EP") or len(parts) == 1)
    rank = _dims(label).get("rank")
    return None if rank is None else f"rank {rank}"


def _is_worker(label: str) -> bool:
    return "orker" in label or label.startswith("rank_")


def _is_generic(label: str) -> bool:
    """Return True for a name that every worker of a start has."""
    return _is_worker(label) and _short(label) is None


def _is_sibling(prefix: Prefix | None, members: dict[str, Prefix]) -> bool:
    """Return True for a further data-parallel engine core of a start that has one."""
    if prefix is None or "EngineCore" not in prefix.label or "dp" not in _dims(prefix.label):
        return False
    return prefix.label not in members and any(
        "EngineCore" in other and "dp" in _dims(other) for other in members
    )


def _anonymous_pids(members: dict[str, Prefix]) -> bool:
    """Return True where process ids were made alike, as people do before they share a log."""
    pids = [(one.pid, one.ip) for label, one in members.items() if not _is_generic(label)]
    return len(pids) > len(set(pids))
