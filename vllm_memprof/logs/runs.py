"""Facts are sorted into runs and ranks: one paste may hold several starts, instances and ranks, labelled or not.

A fact belongs to the run that knows the process which printed it. Unlabelled facts belong to the newest run. A new run
begins after a line that starts an engine, after a heading, when a process prints a line of a stage that it has passed,
or when it prints another value for a figure that has one value per start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_memprof.logs.config import Config, ConfigReader, Marker
from vllm_memprof.logs.formats import ENGINE, GRANT, INIT, LOAD, OOM, PLAN, READY, RUN
from vllm_memprof.logs.npu_smi import NpuSmi
from vllm_memprof.logs.parse import Fact, Read, Speaker

#: Figures that a process may print again and again with other values: which one counts.
_LARGEST = frozenset({"serving_reserved_bytes", "serving_allocated_bytes"})
_LATEST = frozenset({"sleep_freed_bytes", "sleep_in_use_bytes", "sleep_communicator_bytes"})
#: Figures whose second value does not mean a second start: two lines of one start may differ on them.
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
_BROKEN = (
    "Engine core initialization failed",
    "WorkerProc hit an exception",
    "EngineCore failed to start",
)
#: Runs that still take facts from their processes; older ones are closed.
OPEN_RUNS = 8
#: More starts than this in one log: the rest is counted, not kept.
MAX_RUNS = 500
#: More workers than this in one start: the rest is not kept.
MAX_PROCESSES = 4096

_DIMENSION = re.compile(r"(?<![A-Z])(DP|PP|PCP|TP|EP|RANK)(\d+)")
#: Dimensions of a worker's place, the outermost first, and the keys of their sizes; without dp: within an engine core.
WITHIN_CORE = {
    "pp": "pipeline_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "tp": "tensor_parallel_size",
}
_PLACE = {"dp": "data_parallel_size", **WITHIN_CORE}
_RANK_LINE = re.compile(
    r"rank (?P<rank>\d+) in world size (?P<world>\d+) is assigned as DP rank (?P<dp>\d+), PP rank (?P<pp>\d+),"
    r"(?: PCP rank (?P<pcp>\d+),)? TP rank (?P<tp>\d+)"
)


@dataclass
class Process:
    """One worker, as far as the log tells workers apart."""

    key: str
    label: str | None = None  # TP0, PP1_TP3, DP1; None where nothing names it
    pid: int | None = None
    dims: dict[str, int] = field(default_factory=dict)  # dp, pp, tp, ep, rank
    device: str | None = None  # as OOM and start-up messages name it
    figures: dict[str, Fact] = field(default_factory=dict)
    stage: int = -1
    ooms: int = 0
    in_first_oom: bool = False  # the message of the first OOM may go on
    in_core: bool = False  # its lines are the engine core's: there is one worker, inside the core

    def contradicts(self, fact: Fact) -> bool:
        """Whether the process has printed another value for this before, further off than rounding explains."""
        have = self.figures.get(fact.name)
        if have is None or fact.name in _LARGEST or fact.name in _LATEST:
            return False
        return not agree(have, fact)

    def restarts_with(self, fact: Fact) -> bool:
        """Whether this line comes too early for where the process is: it must be another start."""
        stage = fact.format.stage
        if stage is not None and stage > INIT and "startup_refused" in self.figures:
            return True
        if stage is None or stage > GRANT or stage >= self.stage:
            return False
        return fact.name not in self.figures or (_opens_start(fact) and self.stage >= GRANT)

    def add(self, fact: Fact) -> None:
        have = self.figures.get(fact.name)
        if have is None or _replaces(have, fact):
            self.figures[fact.name] = fact
        if fact.format.stage is not None:
            self.stage = max(self.stage, fact.format.stage)


def _opens_start(fact: Fact) -> bool:
    """Whether every start prints this once, before anything is granted."""
    return fact.format.stage == LOAD or (
        fact.format.form == "E0" and fact.name == "device_total_bytes"
    )


def agree(one: Fact, other: Fact) -> bool:
    """Whether two printed figures can be the same number."""
    if one.name.endswith("_bytes"):
        return abs(one.value - other.value) <= one.half_unit_bytes + other.half_unit_bytes + 1
    digits = min(len(fact.text.partition(".")[2]) for fact in (one, other))
    return abs(one.value - other.value) <= (0.5 * 10.0**-digits if digits else 0) + 1e-9


def _replaces(have: Fact, fact: Fact) -> bool:
    if fact.name in _LATEST:
        return True
    if fact.name in _LARGEST:
        return fact.value > have.value
    if not agree(have, fact):
        return False  # the first one counts
    if fact.name.endswith("_bytes"):
        return fact.half_unit_bytes < have.half_unit_bytes
    return len(fact.text) > len(have.text)


@dataclass
class RunFacts:
    """One start of an engine."""

    config: Config
    members: dict[str, Speaker] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    plans: dict[int | None, dict[str, Fact]] = field(default_factory=dict)  # by data-parallel rank
    engines: set[str] = field(default_factory=set)  # named by lines that one engine alone prints
    forms: dict[str, int] = field(default_factory=dict)  # equation -> line that shows its form
    first_line: int = 0
    last_line: int = 0
    finished: bool = False  # the server said that it was up
    broken: bool = False  # an engine process said that it failed
    notes: list[str] = field(default_factory=list)

    @property
    def world(self) -> int:
        size = 1
        for name in WITHIN_CORE.values():
            size *= int(self.config.get(name) or 1)
        return size

    def is_of_another(self, facts: list[Fact]) -> bool:
        """Whether a line is one that the engine of this run does not print."""
        for fact in facts:
            by, form = fact.format.by, fact.format.form
            if by is not None and self.engines and by not in self.engines:
                return True
            if (
                form is not None
                and self.forms
                and form not in self.forms
                and {form, *self.forms} != {"E4", "E4p"}
            ):
                return True
        return False


class Sorter:
    """Takes what ``parse`` reads, in order; ``runs`` is the result."""

    def __init__(self) -> None:
        self.runs: list[RunFacts] = []
        self.left_out = 0  # starts beyond MAX_RUNS
        self.lines = 0  # that were handed on
        self.smi = NpuSmi()
        self._reader = ConfigReader()
        self.exports = self._reader.exports
        self._pending: Config | None = None  # of a start whose first figure has not come yet
        self._pending_members: dict[str, Speaker] = {}
        self._pending_kinds: set[str] = set()
        self._section = (
            False  # a heading came: the next figure begins another run with the same set-up
        )
        self._ranks_by_pid: dict[tuple[int, str | None], tuple[str, dict[str, int]]] = {}
        self._document = Config()  # what holds for the whole log as far as nothing else is said

    def take(self, reads: Iterable[Read]) -> Sorter:
        for read in reads:
            self.read(read)
        self._adopt_late_config()
        return self

    def read(self, read: Read) -> None:
        self.lines += 1
        marker = self._reader.read(read.text)
        if marker is not None:
            self._mark(marker, read.speaker)
        if "is assigned as" in read.text:
            self._assign(read)
        if self.runs and not read.facts:
            run = self.runs[-1]
            run.finished = run.finished or "startup complete" in read.text
            run.broken = run.broken or any(text in read.text for text in _BROKEN)
        self.smi.read(read.text)
        if read.facts:
            self._file(read)

    # --- set-up ---------------------------------------------------------------------------------------------------

    def _mark(self, marker: Marker, speaker: Speaker | None) -> None:
        config = marker.config
        if config.engine:
            self._document = self._document.merged(
                Config(engine=config.engine, ascend_version=config.ascend_version)
            )
        newest = self.runs[-1] if self.runs else None
        if marker.kind == "trace":
            if newest is not None and self._pending is None:
                newest.config = newest.config.merged(config)
            elif self._pending is not None:
                self._pending = self._pending.merged(config)
            else:
                self._document = self._document.merged(config)
            return
        if marker.kind == "heading":
            self._section = True
            self._document = self._document.merged(config)
            if self._pending is not None:
                self._pending = self._pending.merged(config)
            return
        if self._belongs(marker, speaker, newest):
            assert newest is not None
            newest.config = newest.config.merged(config)
            return
        if self._pending is None or (
            marker.kind in self._pending_kinds and not _sibling(speaker, self._pending_members)
        ):
            self._pending = Config(
                around=self._document.engine, ascend_version=self._document.ascend_version
            )
            self._pending_members, self._pending_kinds = {}, set()
            self._document = Config(engine=self._document.engine)
        self._pending = self._pending.merged(config)
        self._pending_kinds.add(marker.kind)
        if speaker is not None:
            self._pending_members[speaker.label] = speaker

    def _belongs(self, marker: Marker, speaker: Speaker | None, newest: RunFacts | None) -> bool:
        """Whether a start-up line is of the newest run: another data-parallel engine core of it."""
        if newest is None or self._pending is not None or speaker is None or marker.kind != "init":
            return False
        return speaker.label not in newest.members and _sibling(speaker, newest.members)

    def _adopt_late_config(self) -> None:
        """A single run whose command stands below its log."""
        if self._pending is not None and len(self.runs) == 1 and not self.runs[0].config.command:
            self.runs[0].config = self._pending.merged(self.runs[0].config)

    def _assign(self, read: Read) -> None:
        match = _RANK_LINE.search(read.text)
        if match is None or read.speaker is None or read.speaker.pid is None:
            return
        dims = {name: int(match[name]) for name in _PLACE if match[name] is not None}
        config = (
            self._pending
            if self._pending is not None
            else self.runs[-1].config
            if self.runs
            else Config()
        )
        label = "_".join(f"{name.upper()}{dims[name]}" for name in dims if _size(config, name) > 1)
        if len(self._ranks_by_pid) >= MAX_PROCESSES:
            self._ranks_by_pid.clear()
        self._ranks_by_pid[(read.speaker.pid, read.speaker.ip)] = (
            label,
            {**dims, "rank": int(match["rank"])},
        )

    # --- figures --------------------------------------------------------------------------------------------------

    def _file(self, read: Read) -> None:
        run = self._run_for(read)
        facts = [fact for fact in read.facts if fact.format.scope != RUN]
        if not facts:
            return
        if run.is_of_another(facts) or (
            _named_worker(read.speaker) and any(p.in_core for p in run.processes.values())
        ):
            run = self._restart(run)
        engine_facts = [fact for fact in facts if fact.format.scope == ENGINE]
        rank_facts = [fact for fact in facts if fact.format.scope != ENGINE]
        if engine_facts:
            run = self._plan(run, read, engine_facts)
        if rank_facts:
            run = self._measure(run, read, rank_facts)
        run.first_line = run.first_line or read.line
        run.last_line = read.line
        for fact in facts:
            if fact.format.by:
                run.engines.add(fact.format.by)
            if fact.format.form:
                run.forms.setdefault(fact.format.form, read.line)
        if read.speaker is not None:
            run.members.setdefault(read.speaker.label, read.speaker)

    def _run_for(self, read: Read) -> RunFacts:
        speaker = read.speaker
        if speaker is not None and speaker.pid is not None:
            began_again = set(self._pending_members.items()) if self._pending is not None else set()
            for run in reversed(self.runs[-OPEN_RUNS:]):
                if began_again & run.members.items():
                    break  # under the same process ids, as in a container: this start and those before it are over
                if run.members.get(speaker.label) == speaker and not _anonymous_pids(run.members):
                    return run
                began_again |= run.members.items()
        if not self.runs or self._pending is not None or self._section:
            return self._new_run()
        newest = self.runs[-1]
        if speaker is None or speaker.pid is None or _generic(speaker.label):
            return newest
        if newest.members.get(speaker.label) == speaker:
            return newest
        return self._nearest(speaker) or (
            newest if speaker.label not in newest.members else self._new_run()
        )

    def _nearest(self, speaker: Speaker) -> RunFacts | None:
        """Of the instances that start side by side, the one whose processes were made just before this one."""
        assert speaker.pid is not None
        best, best_pid = None, -1
        for run in self.runs[-OPEN_RUNS:]:
            if speaker.label in run.members or _anonymous_pids(run.members):
                continue
            below = [
                other.pid
                for other in run.members.values()
                if other.pid is not None and other.pid < speaker.pid
            ]
            if below and max(below) > best_pid:
                best, best_pid = run, max(below)
        return best

    def _new_run(self) -> RunFacts:
        if self._pending is not None:
            config = self._document_defaults().merged(self._pending)
        else:
            previous = self.runs[-1].config if self.runs else Config()
            config = previous.merged(self._document)
        run = RunFacts(config, dict(self._pending_members))
        self._pending, self._pending_members, self._pending_kinds = None, {}, set()
        self._section = False
        if len(self.runs) >= MAX_RUNS:
            self.left_out += 1
            self.runs.pop()
        self.runs.append(run)
        return run

    def _document_defaults(self) -> Config:
        return Config(
            around=self._document.engine,
            values=self._document.values,
            heading=self._document.heading,
        )

    def _plan(self, run: RunFacts, read: Read, facts: list[Fact]) -> RunFacts:
        """The engine core's figures. Where several workers were planned for, the least counts: that is what serves."""
        dp = _dims(read.speaker.label).get("dp") if read.speaker is not None else None
        plan = run.plans.setdefault(dp, {})
        clash = any(fact.name in plan and not agree(plan[fact.name], fact) for fact in facts)
        if clash and run.world <= 1:
            run = self._restart(run)
            plan = run.plans.setdefault(dp, {})
        for fact in facts:
            have = plan.get(fact.name)
            least = fact.name in ("tokens", "max_concurrency", "blocks", "fitting_blocks")
            if have is None or (least and fact.value < have.value):
                plan[fact.name] = fact
        return run

    def _restart(self, run: RunFacts) -> RunFacts:
        """Another start, with the set-up of the one before where no line said another."""
        fresh = self._pending is not None or self._section
        new = self._new_run()
        if not fresh:
            new.config = run.config
        return new

    def _measure(self, run: RunFacts, read: Read, facts: list[Fact]) -> RunFacts:
        """A worker's figures."""
        is_oom = any(fact.format.stage == OOM for fact in facts)
        device = next((fact.device for fact in facts if fact.device is not None), None)
        if is_oom and self._repeated_oom(run, facts):
            return run
        process = self._process(run, read.speaker, device if is_oom else None)
        process.device = process.device or device
        if is_oom and not self._first_oom(process, facts):
            return run
        if any(process.restarts_with(fact) for fact in facts) or any(
            process.contradicts(fact) and self._breaks(process, fact) for fact in facts
        ):
            other = self._unnamed_peer(run, process, facts)
            if other is None:
                run = self._restart(run)
                other = self._process(run, read.speaker, None)
            process = other
            process.device = process.device or device
        if read.speaker is not None and "EngineCore" in read.speaker.label:
            process.in_core = process.in_core or any(
                fact.format.stage not in (None, PLAN, OOM) for fact in facts
            )
        for fact in facts:
            process.add(fact)
        return run

    @staticmethod
    def _first_oom(process: Process, facts: list[Fact]) -> bool:
        """Whether figures of an OOM are of the first one, the cause; what fails after it is counted only."""
        if any(fact.name == "oom_requested_bytes" for fact in facts) or not process.ooms:
            process.ooms += 1
            process.in_first_oom = process.ooms == 1
        return process.in_first_oom and not any(process.contradicts(fact) for fact in facts)

    @staticmethod
    def _breaks(process: Process, fact: Fact) -> bool:
        if fact.name in _LOOSE:
            return False
        reduced = process.figures.get("kv_cache_reduced_bytes")
        in_use = fact.name == "kv_cache_bytes" and fact.format.stage == READY
        return not (in_use and reduced is not None and agree(_named(reduced, fact.name), fact))

    @staticmethod
    def _repeated_oom(run: RunFacts, facts: list[Fact]) -> bool:
        """Executors print a worker's error again: the same figures are the same failure."""
        return any(
            all(
                (have := process.figures.get(fact.name)) is not None and have.value == fact.value
                for fact in facts
            )
            for process in run.processes.values()
        )

    def _process(self, run: RunFacts, speaker: Speaker | None, oom_device: str | None) -> Process:
        key, label, dims = self._identify(run, speaker)
        if oom_device is not None and label is None:
            key = self._oom_key(run, key, oom_device)
        if key not in run.processes:
            pid = speaker.pid if speaker is not None and _is_worker(speaker.label) else None
            process = Process(key, label, None if _anonymous_pids(run.members) else pid, dims)
            if len(run.processes) >= MAX_PROCESSES:
                return process  # read, and not kept
            run.processes[key] = process
        return run.processes[key]

    def _identify(
        self, run: RunFacts, speaker: Speaker | None
    ) -> tuple[str, str | None, dict[str, int]]:
        """(key, label, ranks) of the worker that a line's prefix names; the key "" where it names none."""
        if speaker is None:
            return "", None, {}
        dims = _dims(speaker.label)
        if not _is_worker(speaker.label):
            # with one worker per engine core, the core prints the worker's lines
            return (
                (f"DP{dims['dp']}", f"DP{dims['dp']}", dims)
                if "dp" in dims and "EngineCore" in speaker.label
                else ("", None, {})
            )
        if speaker.pid is not None and (speaker.pid, speaker.ip) in self._ranks_by_pid:
            label, known = self._ranks_by_pid[(speaker.pid, speaker.ip)]
            own = _short(speaker.label)
            return (own or label or f"pid {speaker.pid}"), own or label or None, {**known, **dims}
        short = _short(speaker.label)
        if speaker.label.startswith("rank_"):
            for (
                process
            ) in run.processes.values():  # torch names a worker by its rank, vLLM by its place
                if (
                    process.dims
                    and process.dims.get("rank", _only_tp(process.dims)) == dims["rank"]
                ):
                    return process.key, process.label, process.dims
        if short:
            return short, short, dims
        where = f"pid {speaker.pid}" if speaker.ip is None else f"{speaker.ip} pid {speaker.pid}"
        return where, where, dims

    @staticmethod
    def _oom_key(run: RunFacts, key: str, device: str) -> str:
        """Unlabelled OOM messages of several devices are of several processes."""
        first = run.processes.get(key)
        if first is None or first.device in (None, device):
            return key
        return f"device {device}"

    @staticmethod
    def _unnamed_peer(run: RunFacts, process: Process, facts: list[Fact]) -> Process | None:
        """Several ranks without labels: the next one, as long as the run has more ranks than were seen."""
        if process.label is not None or process.key.startswith("device"):
            return None
        unnamed = [other for other in run.processes.values() if other.label is None]
        for other in unnamed:
            if not any(other.contradicts(fact) or other.restarts_with(fact) for fact in facts):
                return other
        if len(unnamed) >= run.world or any(process.restarts_with(fact) for fact in facts):
            return None
        peer = Process(f"#{len(unnamed) + 1}")
        run.processes[peer.key] = peer
        return peer


def _named(fact: Fact, name: str) -> Fact:
    return Fact(
        name,
        fact.value,
        fact.half_unit_bytes,
        fact.text,
        fact.line,
        fact.speaker,
        fact.device,
        fact.format,
    )


def _dims(label: str) -> dict[str, int]:
    return {name.lower(): int(number) for name, number in _DIMENSION.findall(label)}


def _only_tp(dims: dict[str, int]) -> int | None:
    return dims["tp"] if "tp" in dims and not {"dp", "pp", "pcp"} & dims.keys() else None


def _size(config: Config, name: str) -> int:
    return int(config.get(_PLACE[name]) or (2 if name == "tp" else 1))


def _short(label: str) -> str | None:
    """TP0 of Worker_TP0, "rank 3" of [rank3]; None for a name that many processes share."""
    parts = [f"{name}{number}" for name, number in _DIMENSION.findall(label) if name != "RANK"]
    if parts:
        return "_".join(part for part in parts if not part.startswith("EP") or len(parts) == 1)
    rank = _dims(label).get("rank")
    return None if rank is None else f"rank {rank}"


def _is_worker(label: str) -> bool:
    return "orker" in label or label.startswith("rank_")


def _generic(label: str) -> bool:
    """A name that every worker of a run has."""
    return _is_worker(label) and _short(label) is None


def _named_worker(speaker: Speaker | None) -> bool:
    return speaker is not None and _is_worker(speaker.label) and _short(speaker.label) is not None


def _sibling(speaker: Speaker | None, members: dict[str, Speaker]) -> bool:
    """Whether another data-parallel engine core of the same run is known already."""
    if speaker is None or "EngineCore" not in speaker.label or "dp" not in _dims(speaker.label):
        return False
    return speaker.label not in members and any(
        "EngineCore" in other and "dp" in _dims(other) for other in members
    )


def _anonymous_pids(members: dict[str, Speaker]) -> bool:
    """Whether process ids were made alike, as people do before they share a log."""
    pids = [(speaker.pid, speaker.ip) for label, speaker in members.items() if not _generic(label)]
    return len(pids) > len(set(pids))
