"""Load a run folder: files enter, a frozen ``Run`` without any file handle leaves.

Runs in the launcher or in ``memprof report``. Half a line left by a killed process is dropped and
the run marked truncated; anything that is not a run record is refused with the path and a hint.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, TypeVar

from vllm_memprof.errors import RunRecordError
from vllm_memprof.files import check_limit, listed, read_file, reading
from vllm_memprof.record import oom_files
from vllm_memprof.record.allocations import AllocationTrace
from vllm_memprof.record.cause import NamedFailure
from vllm_memprof.record.codec import from_json
from vllm_memprof.record.failures import Failure
from vllm_memprof.record.held import is_held
from vllm_memprof.record.lines import Event, parse_event, parse_events
from vllm_memprof.record.memory_files import MemoryFile
from vllm_memprof.record.samples import Served, dropped_of, load_samples
from vllm_memprof.record.schema import (
    DAMAGED,
    EVENTS_DIR,
    EVENTS_SCHEMA,
    MOST_SAMPLES_BYTES,
    RUN_FILE,
    RUN_SCHEMA,
    SAMPLES_DIR,
    Count,
    RunInfo,
    Snapshot,
)
from vllm_memprof.record.spans import AFTER, BEFORE, Span
from vllm_memprof.record.weights import Loaded
from vllm_memprof.units import known_items, only_known

_T = TypeVar("_T")


@dataclass(frozen=True)
class Identity:
    """Identity of a process. A rank alone is none: under data parallelism several are rank 0."""

    host: str | None = None
    pid: Count = None
    ppid: Count = None
    role: str = "unknown"  # the last role that the process claimed
    roles: frozenset[str] = (
        frozenset()
    )  # every role it claimed: one process may be engine core and worker
    rank: Count = None
    local_rank: Count = None
    dp_rank: Count = None
    pp_rank: Count = None
    tp_rank: Count = None
    ep_rank: Count = None
    device_index: Count = None
    label: str | None = None  # as the process calls itself, e.g. TP0
    soc: str | None = None
    world_size: Count = None
    lines: tuple[int, int] | None = None  # of a log: the first and last of a worker without a name


@dataclass(frozen=True)
class HookState:
    """The last thing heard of one hook in one process."""

    hook: str
    phase: str | None
    need: str | None  # required | optional | expected_absent
    state: str
    target: str | None = None
    detail: str | None = None


@dataclass(frozen=True)
class Loss:
    """A time in which a process could not write its events."""

    since_t_ns: int  # CLOCK_MONOTONIC
    until_t_ns: Count  # None: to the end of its record
    events: Count  # that were not written; None: not known
    reason: str  # the operating system's, e.g. No space left on device


@dataclass(frozen=True)
class PrintedSleep:
    """What a log prints of one sleep of the engine."""

    line: int
    freed_bytes: int
    in_use_bytes: int  # of the device, while asleep


@dataclass(frozen=True)
class ProcessRecord:
    """One event file."""

    file: str  # name within events/
    identity: Identity
    versions: dict[str, str] = field(default_factory=dict)
    phases: list[Span] = field(default_factory=list)
    #: FIGURES; a later event overrides, null never overrides a number.
    figures: dict[str, int | float | None] = field(default_factory=dict)
    kv_plan: dict[str, Any] | None = None
    hooks: dict[str, HookState] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)  # "where: message" of hooks that failed
    #: What became ready -> time.monotonic_ns().
    ready_t_ns: dict[str, int] = field(default_factory=dict)
    last_t_ns: Count = None
    dropped_lines: int = 0  # lines that were not a whole JSON object
    wrong: list[str] = field(default_factory=list)  # figures that cannot be, with their line
    figures_half_units: dict[str, int] = field(
        default_factory=dict
    )  # bytes; half the last printed digit, from logs
    unread: dict[str, str] = field(
        default_factory=dict
    )  # a reading that the process did not get -> why
    failures: list[Failure] = field(default_factory=list)  # allocations, in the order of events
    losses: list[Loss] = field(default_factory=list)  # in the order of their beginning
    allocations: list[AllocationTrace] = field(default_factory=list)  # with --trace-allocations
    files: list[MemoryFile] = field(default_factory=list)  # of other tools, about its device
    weights: Loaded | None = None
    sleeps: list[PrintedSleep] = field(default_factory=list)  # from logs
    served: Served = field(default_factory=Served)  # with --sample: samples, stages, requests
    wall: float | None = None  # time.time() of the first event, s
    t_ns: Count = None  # CLOCK_MONOTONIC at the same moment
    model: str | None = None  # as the engine has it: a folder

    @property
    def is_worker(self) -> bool:
        roles = self.identity.roles
        return "worker" in roles or (bool(self.phases) and not roles & {"api", "engine_core"})


@dataclass(frozen=True)
class Run:
    """Everything a run folder says. ``source`` tells whether hooks or log text made it."""

    folder: Path  # of a log: its name
    info: RunInfo
    processes: list[ProcessRecord]
    truncated: bool = False
    notes: list[str] = field(default_factory=list)  # what was dropped, one sentence each
    source: str = "hooks"
    forms: list[str] = field(
        default_factory=list
    )  # from logs: ids of the equations whose line forms were seen
    oom_counters: dict[int, oom_files.Counters] = field(
        default_factory=dict
    )  # by device index, from torch_npu's csv
    #: What the engine printed of its KV plan into engine.log: data-parallel rank, None where it
    #: named none -> name of ``schema.KV_PLAN`` -> value.
    printed_kv: dict[int | None, dict[str, int | float]] = field(default_factory=dict)
    #: What its log says of its failure, where it has one.
    failure: NamedFailure | None = None
    #: Of a deployment: the runs of all hosts of its group as one; None: this run is the whole.
    group: Run | None = field(default=None, repr=False)
    #: Of such a whole: the runs that it is made of.
    parts: tuple[Run, ...] = field(default=(), repr=False)
    #: Host -> ns by which its monotonic clock is ahead of that of the first host.
    clock_offsets: dict[str | None, int] = field(default_factory=dict)

    @property
    def whole(self) -> Run:
        """Return the run with the processes of all hosts."""
        return self if self.group is None else self.group

    @property
    def workers(self) -> list[ProcessRecord]:
        """Return the processes that run a rank of the model."""
        return [each for each in self.processes if each.is_worker]

    @cached_property
    def serving(self) -> list[ProcessRecord]:
        """Return the processes that recorded requests or samples of the KV cache."""
        return [each for each in self.processes if each.served.requests or each.served.kv_samples]

    @cached_property
    def versions(self) -> dict[str, str]:
        """Return package -> version, names with "-": of the launcher, then of the processes."""
        found = dict(self.info.versions)
        for process in self.processes:
            found.update(process.versions)
        return {name.replace("_", "-"): version for name, version in found.items()}

    @cached_property
    def hosts(self) -> list[str | None]:
        """Return the hosts of its processes, the launcher's first; that alone without any."""
        # a process that a log alone names has none
        there = dict.fromkeys(only_known(each.identity.host for each in self.processes))
        return sorted(there, key=lambda host: host != self.info.host) or [self.info.host]

    @cached_property
    def planners(self) -> list[ProcessRecord]:
        """Return the processes that recorded a KV plan."""
        return [each for each in self.processes if each.kv_plan is not None]

    def first_ready(self, host: str | None) -> int | None:
        """Return when the first thing but a plan was ready, by a host's clock; None: nothing."""
        times = [
            t_ns - self.clock_offsets.get(each.identity.host, 0)
            for each in self.processes
            for what, t_ns in each.ready_t_ns.items()
            if what != "plan"
        ]
        return min(times) + self.clock_offsets.get(host, 0) if times else None

    @cached_property
    def pids(self) -> dict[str | None, frozenset[str]]:
        """Return the ids of its processes by host."""
        found: dict[str | None, set[str]] = {}
        for process in self.processes:
            found.setdefault(process.identity.host, set()).add(str(process.identity.pid))
        return {host: frozenset(pids) for host, pids in found.items()}


def load_run(run_dir: Path) -> Run:
    """Reads a run folder.

    Args:
        run_dir: the folder that holds ``run.json`` and ``events/``.

    Raises:
        RunRecordError: there is no such folder, it is not a run folder, a file cannot be read or is
            not a record, or another release with a different schema wrote it.
    """
    info = load_info(run_dir)
    processes: list[ProcessRecord] = []
    notes: list[str] = []
    with reading(run_dir / EVENTS_DIR):
        # none where the engine died before any process reported
        paths = listed(run_dir / EVENTS_DIR, "*.jsonl")
        check_limit("folder", size_of_records(run_dir), f"{run_dir} has")
    for path in paths:
        process = _load_process(run_dir, path)
        if process is None:
            notes.append(f"{path.name}: the process died before its first record was complete")
            continue
        processes.append(process)
        if lines := process.dropped_lines + process.served.dropped_lines:
            notes.append(f"{path.name}: {lines} incomplete line(s) dropped")
        if wrong := process.wrong + process.served.wrong:
            who = process.identity.label or process.identity.role
            more = f"; {len(wrong) - 1} more" if wrong[1:] else ""
            notes.append(
                f"{DAMAGED} of {who}: {path.name}, {wrong[0]}{more}; what cannot be is unknown"
            )
    processes.sort(
        key=lambda each: (
            not each.is_worker,
            each.identity.dp_rank or 0,
            each.identity.rank is None,
            each.identity.rank or 0,
            each.file,
        )
    )
    return Run(
        folder=run_dir,
        info=info,
        processes=processes,
        truncated=bool(notes) or any(process.losses for process in processes),
        notes=notes,
        oom_counters=oom_files.load(run_dir),
    )


def size_of_records(run_dir: Path) -> int:
    """Return the bytes of events, and of samples those that no process of memprof's writes."""
    samples = Counter[Path]()
    for path in listed(run_dir / SAMPLES_DIR, "*/*.jsonl"):
        samples[path.parent] += path.lstat().st_size
    beyond = (max(0, size - MOST_SAMPLES_BYTES) for size in samples.values())
    events = (path.lstat().st_size for path in listed(run_dir / EVENTS_DIR, "*.jsonl"))
    return sum(events) + sum(beyond)


def load_info(run_dir: Path) -> RunInfo:
    """Read ``run.json`` of a run folder; a run whose launcher is gone without its end has failed.

    Raises:
        RunRecordError: as ``load_run``.
    """
    if not run_dir.is_dir():
        what, hint = "does not exist", "give the folder that a memprof run printed"
        if run_dir.exists():
            what, hint = "is not a folder", f"of a log: memprof explain {run_dir}"
        raise RunRecordError(f"run folder {run_dir} {what}", hint)
    path = run_dir / RUN_FILE
    if not path.exists() and (plans := sorted(run_dir.glob(f"*/*/{RUN_FILE}"))):
        raise RunRecordError(
            f"{run_dir} has plans, and is no run itself",
            "the answer is its fit.json, sweep.csv, share.json or calibrated.json; a plan: "
            f"memprof report {plans[0].parent}",
        )
    with reading(path):
        data = parse_event(read_file(path, run_dir))
    if data is None:
        hint = "was it cut short, edited, or never memprof's?"
        raise RunRecordError(f"{path} is not a JSON object", hint)
    _check_schema(data, RUN_SCHEMA, path)
    try:
        info = from_json(RunInfo, data)
    except ValueError as exc:
        what = f"{path}: a field is missing or has the wrong type: {exc}"
        raise RunRecordError(what, "was it edited?") from exc
    if info.status == "running" and is_held(run_dir, info.host) is False:
        reason = "the process that recorded this run is gone and did not write its end"
        return replace(info, status="failed", exit_reason=reason)
    return info


def _check_schema(data: Event, wanted: str, path: Path) -> None:
    if data.get("schema") != wanted:
        what = f"{path} has schema {data.get('schema')!r}, this memprof reads {wanted!r}"
        raise RunRecordError(what, "read it with the memprof release that recorded it")


def _load_process(run_dir: Path, path: Path) -> ProcessRecord | None:
    """One event file; None when not even its first line was finished."""
    with reading(path):
        data = read_file(path, run_dir)
    wrong: list[str] = []
    events, dropped = parse_events(data, wrong)
    if not events and data[:1] in (b"", b"{"):
        return None
    if not events or events[0].get("kind") != "process":
        what = f"{path} does not begin with a process record"
        raise RunRecordError(what, "is this an event file of memprof?")
    _check_schema(events[0], EVENTS_SCHEMA, path)
    what = f"{run_dir / SAMPLES_DIR / path.stem} has a sample"
    try:
        with reading(run_dir / SAMPLES_DIR / path.stem):
            served = load_samples(run_dir, path.stem)
        what = f"{path} has a record"
        return replace(_build_process(path.name, events, dropped, served), wrong=wrong)
    except (TypeError, ValueError, AttributeError, KeyError) as exc:
        raise RunRecordError(f"{what} that is not memprof's: {exc}", "was it edited?") from exc


@dataclass(frozen=True)
class _First:
    """A ``process`` event."""

    versions: dict[str, str] = field(default_factory=dict)
    wall: float | None = None
    t_ns: Count = None


@dataclass(frozen=True)
class _PhaseEdge:
    """A ``phase`` event."""

    phase: str = ""
    edge: str = BEFORE
    id: Count = None
    parent: Count = None
    t_ns: Count = None
    snapshot: Snapshot | None = None
    error: str | None = None
    detail: dict[str, object] | None = None


@dataclass(frozen=True)
class _PlannedGroup:
    """The figures of a group of layers in a ``kv_plan`` event."""

    layers: Count = None
    block_size: Count = None
    page_size_bytes: Count = None
    bytes_per_token: float | None = None


@dataclass(frozen=True)
class _PlannedKv:
    """The figures of a ``kv_plan`` event."""

    blocks: Count = None
    block_size: Count = None
    tokens: Count = None
    max_model_len: Count = None
    bytes_per_token: float | None = None
    max_concurrency: float | None = None
    available_bytes: list[int | None] | None = None
    planned_bytes: list[int | None] | None = None
    groups: list[_PlannedGroup] | None = None


def _build_process(file: str, events: list[Event], dropped: int, served: Served) -> ProcessRecord:
    by_kind: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_kind[str(event.get("kind"))].append(event)

    def every(kind: str, cls: type[_T]) -> list[_T]:
        return [from_json(cls, event) for event in by_kind[kind]]

    figures: dict[str, int | float | None] = {}
    for event in by_kind["figures"]:
        values = from_json(dict[str, int | float | None], event.get("values"))
        figures = {**values, **figures, **known_items(values)}
    every("kv_plan", _PlannedKv)  # refuses what is no figure
    first = from_json(_First, events[0])
    served.dropped.update(dropped_of(by_kind["dropped"]))
    losses: dict[int, Loss] = {}
    for loss in every("lost", Loss):  # its end, where it was written, says more than its beginning
        if loss.since_t_ns not in losses or loss.until_t_ns is not None:
            losses[loss.since_t_ns] = loss
    who: Event = {}  # of what repeats, the last that is known
    roles = {"engine_core" if by_kind["kv_plan"] else "unknown"}
    for event in (events[0], *by_kind["identity"]):
        who |= known_items(event)
        roles |= {event.get("role") or "unknown", *(event.get("roles") or ())}
    times = [event["t_ns"] for event in events if isinstance(event.get("t_ns"), int)]
    return ProcessRecord(
        file=file,
        identity=from_json(Identity, {**who, "roles": roles - {"unknown"}}),
        versions=first.versions,
        phases=_pair_phases(every("phase", _PhaseEdge)),
        figures=figures,
        kv_plan=by_kind["kv_plan"][-1] if by_kind["kv_plan"] else None,
        hooks={hook.hook: hook for hook in every("hook", HookState)},
        errors=[f"{event.get('where')}: {event.get('message')}" for event in by_kind["error"]],
        ready_t_ns={event["what"]: event["t_ns"] for event in by_kind["ready"]},
        last_t_ns=max(times, default=None),
        dropped_lines=dropped,
        served=served,
        unread={event["what"]: event["reason"] for event in by_kind["unread"]},
        wall=first.wall,
        t_ns=first.t_ns,
        model=who.get("model"),
        failures=every("failure", Failure),
        losses=[losses[since] for since in sorted(losses)],
        allocations=every("allocations", AllocationTrace),
        weights=reduce(_with_draft, every("weights", Loaded), None),
    )


def _with_draft(before: Loaded | None, loaded: Loaded) -> Loaded:
    """Return the models that were loaded last: a draft comes beside a model, or after it."""
    if before is None or not all(row.draft for row in loaded.rows):
        return loaded
    return replace(before, rows=[*before.rows, *loaded.rows])


def _pair_phases(edges: list[_PhaseEdge]) -> list[Span]:
    """Pairs the edges by id, in the order in which the phases began."""
    passages: list[dict[str, _PhaseEdge]] = []
    by_id: dict[int | None, dict[str, _PhaseEdge]] = {}
    for edge in edges:
        passage = None if edge.id is None else by_id.get(edge.id)
        if edge.edge == BEFORE or passage is None or AFTER in passage:
            passages.append(passage := {})
            by_id[edge.id] = passage
        passage[edge.edge] = edge
    firsts = [next(iter(passage.values())) for passage in passages]
    order_of = {first.id: order for order, first in enumerate(firsts)}
    spans: list[Span] = []
    for order, (first, passage) in enumerate(zip(firsts, passages, strict=True)):
        begin, end = passage.get(BEFORE, _PhaseEdge()), passage.get(AFTER, _PhaseEdge())
        parent = None if first.parent is None else order_of.get(first.parent)
        if parent is not None and parent >= order:
            parent = None  # an id that was reused; nesting is unknown
        # the phase was over when the reading of its last snapshot began
        read = None if end.snapshot is None else end.snapshot.t_ns
        spans.append(
            Span(
                phase=first.phase,
                order=order,
                parent=parent,
                depth=0 if parent is None else spans[parent].depth + 1,
                before=begin.snapshot,
                after=end.snapshot,
                start_t_ns=begin.t_ns,
                end_t_ns=end.t_ns if read is None else read,
                error=end.error or begin.error,
                detail={**(begin.detail or {}), **(end.detail or {})},
                id=first.id,
            )
        )
    return spans
