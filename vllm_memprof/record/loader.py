"""Load a run folder: files enter, a frozen ``Run`` without any file handle leaves.

Runs in the launcher or in ``memprof report``. Half a line left by a killed process is dropped and
the run marked truncated; anything that is not a run record is refused with the path and a hint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_memprof.errors import RunRecordError
from vllm_memprof.record import oom_files
from vllm_memprof.record.allocations import AllocationTrace
from vllm_memprof.record.cause import NamedFailure
from vllm_memprof.record.codec import from_event, from_json
from vllm_memprof.record.failures import Failure
from vllm_memprof.record.lines import Event, parse_event, parse_events
from vllm_memprof.record.samples import Served, dropped_of, load_samples
from vllm_memprof.record.schema import (
    EVENTS_DIR,
    EVENTS_SCHEMA,
    RUN_FILE,
    RUN_SCHEMA,
    SAMPLES_DIR,
    RunInfo,
    Snapshot,
)
from vllm_memprof.record.spans import AFTER, BEFORE, Span, edges
from vllm_memprof.redact import redact_command, redact_data, redact_text


@dataclass(frozen=True)
class Identity:
    """Identity of a process. A rank alone is none: under data parallelism several are rank 0."""

    host: str | None = None
    pid: int | None = None
    ppid: int | None = None
    role: str = "unknown"  # the last role that the process claimed
    roles: frozenset[str] = (
        frozenset()
    )  # every role it claimed: one process may be engine core and worker
    rank: int | None = None
    local_rank: int | None = None
    dp_rank: int | None = None
    pp_rank: int | None = None
    tp_rank: int | None = None
    ep_rank: int | None = None
    device_index: int | None = None
    label: str | None = None  # as the process calls itself, e.g. TP0
    soc: str | None = None
    world_size: int | None = None
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
    until_t_ns: int | None  # None: to the end of its record
    events: int | None  # that were not written; None: not known
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
    versions: dict[str, str]
    argv: list[str]
    python: str | None
    phases: list[Span]
    figures: dict[
        str, int | float | None
    ]  # FIGURES; a later event overrides, null never overrides a number
    kv_plan: dict[str, Any] | None
    hooks: dict[str, HookState]
    errors: list[str]  # "where: message" of hooks that failed
    ready_t_ns: dict[str, int]  # what became ready -> time.monotonic_ns()
    last_t_ns: int | None
    dropped_lines: int = 0  # lines that were not a whole JSON object
    figures_half_units: dict[str, int] = field(
        default_factory=dict
    )  # bytes; half the last printed digit, from logs
    unread: dict[str, str] = field(
        default_factory=dict
    )  # a reading that the process did not get -> why
    failures: list[Failure] = field(default_factory=list)  # allocations, in the order of events
    losses: list[Loss] = field(default_factory=list)  # in the order of their beginning
    allocations: list[AllocationTrace] = field(default_factory=list)  # with --trace-allocations
    sleeps: list[PrintedSleep] = field(default_factory=list)  # from logs
    served: Served = field(default_factory=Served)  # with --sample: samples, stages, requests
    wall: float | None = None  # time.time() of the first event, s
    t_ns: int | None = None  # CLOCK_MONOTONIC at the same moment

    @property
    def truncated(self) -> bool:
        return self.dropped_lines > 0 or bool(self.losses)

    @property
    def is_worker(self) -> bool:
        roles = self.identity.roles
        return "worker" in roles or (bool(self.phases) and not roles & {"api", "engine_core"})


@dataclass(frozen=True)
class Run:
    """Everything a run folder says. ``source`` tells whether hooks or log text made it."""

    name: str  # of the folder, for messages
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
        there = dict.fromkeys(process.identity.host for process in self.processes)
        return sorted(there, key=lambda host: host != self.info.host) or [self.info.host]

    @cached_property
    def planners(self) -> list[ProcessRecord]:
        """Return the processes that recorded a KV plan."""
        return [each for each in self.processes if each.kv_plan is not None]

    def first_ready(self, host: str | None) -> int | None:
        """Return when the first thing but a plan was ready, by a host's clock; None: nothing."""
        first = self._first_ready
        return None if first is None else first + self.clock_offsets.get(host, 0)

    @cached_property
    def _first_ready(self) -> int | None:
        times = [
            t_ns - self.clock_offsets.get(each.identity.host, 0)
            for each in self.processes
            for what, t_ns in each.ready_t_ns.items()
            if what != "plan"
        ]
        return min(times, default=None)

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
    run_dir = Path(run_dir)
    info = load_info(run_dir)
    processes: list[ProcessRecord] = []
    notes: list[str] = []
    for path in _event_files(run_dir / EVENTS_DIR):
        process = _load_process(run_dir, path)
        if process is None:
            notes.append(f"{path.name}: the process died before its first record was complete")
            continue
        processes.append(process)
        if lines := process.dropped_lines + process.served.dropped_lines:
            notes.append(f"{path.name}: {lines} incomplete line(s) dropped")
    processes.sort(key=_process_order)
    return Run(
        name=run_dir.name,
        info=info,
        processes=processes,
        truncated=bool(notes) or any(process.truncated for process in processes),
        notes=notes,
        oom_counters=oom_files.load(run_dir),
    )


def load_info(run_dir: Path) -> RunInfo:
    """Read ``run.json`` of a run folder.

    Raises:
        RunRecordError: as ``load_run``.
    """
    if not run_dir.is_dir():
        what = "is not a folder" if run_dir.exists() else "does not exist"
        raise RunRecordError(
            f"run folder {run_dir} {what}", hint="give the folder that a memprof run printed"
        )
    path = run_dir / RUN_FILE
    data = parse_event(_read(path))
    if data is None:
        raise RunRecordError(
            f"{path} is not a JSON object", hint="was it cut short, edited, or never memprof's?"
        )
    _check_schema(data.get("schema"), RUN_SCHEMA, path)
    try:
        return from_json(RunInfo, redact_data(data))
    except ValueError as exc:
        raise RunRecordError(
            f"{path}: a field is missing or has the wrong type: {exc}", hint="was it edited?"
        ) from exc


def _check_schema(found: object, wanted: str, path: Path) -> None:
    if found != wanted:
        raise RunRecordError(
            f"{path} has schema {found!r}, this memprof reads {wanted!r}",
            hint="read it with the memprof release that recorded it",
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as exc:
        raise RunRecordError(
            f"no {path.name} in {path.parent}", hint="is this a run folder of memprof?"
        ) from exc
    except PermissionError as exc:
        hint = "run records are private to their owner: read them as that user, or chmod them"
        raise RunRecordError(f"no permission to read {path}", hint=hint) from exc
    except OSError as exc:
        raise RunRecordError(f"cannot read {path}: {exc.strerror}") from exc


def _event_files(events_dir: Path) -> list[Path]:
    try:
        return sorted(path for path in events_dir.iterdir() if path.suffix == ".jsonl")
    except FileNotFoundError:
        return []  # the engine died before any process reported
    except OSError as exc:
        raise RunRecordError(f"cannot list {events_dir}: {exc.strerror}") from exc


def _load_process(run_dir: Path, path: Path) -> ProcessRecord | None:
    """One event file; None when not even its first line was finished."""
    lines = _read(path).split(b"\n")
    if len(lines) == 1 and parse_event(lines[0]) is None:
        if lines[0][:1] not in (b"", b"{"):
            raise RunRecordError(
                f"{path} is not an event file", hint="is this a run folder of memprof?"
            )
        return None
    events = parse_events([line for line in lines if line.strip()])
    head = events[0] if events else None
    if head is None or head.get("kind") != "process":
        raise RunRecordError(
            f"{path} does not begin with a process record", hint="is this an event file of memprof?"
        )
    _check_schema(head.get("schema"), EVENTS_SCHEMA, path)
    whole = [event for event in events if event is not None]
    with _refusing(f"{run_dir / SAMPLES_DIR / path.stem} has a sample"):
        served = load_samples(run_dir, path.stem)
    with _refusing(f"{path} has a record"):
        return _build_process(path.name, head, whole, len(events) - len(whole), served)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Refuse a file with something that is not memprof's."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, KeyError) as exc:
        raise RunRecordError(f"{what} that is not memprof's: {exc}", hint="was it edited?") from exc
    except OSError as exc:
        raise RunRecordError(f"cannot read {exc.filename}: {exc.strerror}") from exc


@dataclass(frozen=True)
class _Clocks:
    """Both clocks, in the first line of a process."""

    wall: object = None
    t_ns: int | None = None


@dataclass(frozen=True)
class _Figures:
    """A ``figures`` event."""

    values: dict[str, float | int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _PlannedGroup:
    """The figures of a group of layers in a ``kv_plan`` event."""

    layers: int | None = None
    block_size: int | None = None
    page_size_bytes: int | None = None
    bytes_per_token: float | None = None


@dataclass(frozen=True)
class _PlannedKv:
    """The figures of a ``kv_plan`` event."""

    blocks: int | None = None
    block_size: int | None = None
    tokens: int | None = None
    max_model_len: int | None = None
    bytes_per_token: float | None = None
    max_concurrency: float | None = None
    available_bytes: list[int | None] = field(default_factory=list)
    planned_bytes: list[int | None] = field(default_factory=list)
    groups: list[_PlannedGroup] = field(default_factory=list)


def _build_process(
    file: str, head: Event, events: list[Event], dropped: int, served: Served
) -> ProcessRecord:
    by_kind: dict[str, list[Event]] = {}
    for event in events:
        by_kind.setdefault(str(event.get("kind")), []).append(event)
    figures: dict[str, int | float | None] = {}
    for event in by_kind.get("figures", []):
        for name, value in from_event(_Figures, event).values.items():
            if value is not None or name not in figures:
                figures[name] = value
    plans = by_kind.get("kv_plan", [])
    for plan in plans[-1:]:
        from_event(_PlannedKv, plan)  # refuses what is no figure
    clocks = from_event(_Clocks, head)
    served.dropped.update(dropped_of(by_kind.get("dropped", [])))
    return ProcessRecord(
        file=file,
        identity=_build_identity([head, *by_kind.get("identity", [])], bool(plans)),
        versions=dict(head.get("versions") or {}),
        argv=redact_command([str(word) for word in head.get("argv") or []]),
        python=head.get("python"),
        phases=_pair_phases(by_kind.get("phase", [])),
        figures=figures,
        kv_plan=plans[-1] if plans else None,
        hooks={
            str(event.get("hook")): from_event(HookState, _redacted(event, "detail"))
            for event in by_kind.get("hook", [])
        },
        errors=[
            redact_text(f"{event.get('where')}: {event.get('message')}")
            for event in by_kind.get("error", [])
        ],
        ready_t_ns={
            str(event.get("what")): event["t_ns"]
            for event in by_kind.get("ready", [])
            if "t_ns" in event
        },
        last_t_ns=max(
            (t for event in events if isinstance(t := event.get("t_ns"), int)), default=None
        ),
        dropped_lines=dropped,
        served=served,
        unread={
            str(event.get("what")): str(event.get("reason")) for event in by_kind.get("unread", [])
        },
        wall=float(clocks.wall) if isinstance(clocks.wall, (int, float)) else None,
        t_ns=clocks.t_ns,
        failures=[
            from_event(Failure, {**_redacted(event, "message"), "snapshot": _reading(event)})
            for event in by_kind.get("failure", [])
        ],
        losses=_losses(by_kind.get("lost", [])),
        allocations=[
            from_event(AllocationTrace, event) for event in by_kind.get("allocations", [])
        ],
    )


def _redacted(event: Event, name: str) -> Event:
    text = event.get(name)
    return {**event, name: None if text is None else redact_text(str(text))}


def _losses(events: list[Event]) -> list[Loss]:
    """Return each loss once: its end, where it was written, says more than its beginning."""
    by_start: dict[int, Loss] = {}
    for event in events:
        loss = from_event(Loss, _redacted(event, "reason"))
        if loss.since_t_ns not in by_start or loss.until_t_ns is not None:
            by_start[loss.since_t_ns] = loss
    return [by_start[since] for since in sorted(by_start)]


def _build_identity(events: list[Event], plans_kv: bool) -> Identity:
    values: dict[str, Any] = {}
    roles = {"engine_core"} if plans_kv else set()
    for event in events:
        for name in Identity.__dataclass_fields__:
            if event.get(name) is not None:
                values[name] = event[name]
        claimed = event.get("roles")
        roles.update(
            str(role)
            for role in (event.get("role"), *(claimed if isinstance(claimed, list) else []))
            if role
        )
    return Identity(**{**values, "roles": frozenset(roles - {"unknown"})})


def _pair_phases(events: list[Event]) -> list[Span]:
    """Pairs the edges by id, in the order in which the phases began."""
    passages: list[dict[str, Event]] = []  # the event of each side
    by_id: dict[Any, dict[str, Event]] = {}
    for event in events:
        key, side = event.get("id"), BEFORE if event.get("edge") == BEFORE else AFTER
        passage = None if key is None else by_id.get(key)
        if side == BEFORE or passage is None or AFTER in passage:
            passages.append(passage := {})
            by_id[key] = passage
        passage[side] = event
    firsts = [passage.get(BEFORE) or passage[AFTER] for passage in passages]
    order_of = {first.get("id"): order for order, first in enumerate(firsts)}
    spans: list[Span] = []
    for order, (first, passage) in enumerate(zip(firsts, passages, strict=True)):
        before, after = passage.get(BEFORE, {}), passage.get(AFTER, {})
        parent = None if first.get("parent") is None else order_of.get(first["parent"])
        if parent is not None and parent >= order:
            parent = None  # an id that was reused; nesting is unknown
        last = _snapshot(after)
        spans.append(
            Span(
                phase=str(first.get("phase")),
                order=order,
                id=first.get("id"),
                parent=parent,
                depth=0 if parent is None else spans[parent].depth + 1,
                hook=first.get("hook"),
                edges=edges(_snapshot(before), last),
                start_t_ns=before.get("t_ns"),
                # the phase was over when the reading of its last snapshot began
                end_t_ns=after.get("t_ns") if last is None or last.t_ns is None else last.t_ns,
                error=redact_data(after.get("error") or before.get("error")),
                detail={
                    name: value
                    for event in (before, after)
                    if isinstance(detail := event.get("detail"), dict)
                    for name, value in detail.items()
                },
            )
        )
    return spans


def _reading(event: Event) -> Event | None:
    """Return the snapshot of an event, with its time; None where it has none."""
    data = event.get("snapshot")
    return {"t_ns": event.get("t_ns"), **data} if isinstance(data, dict) else None


def _snapshot(event: Event) -> Snapshot | None:
    reading = _reading(event)
    return None if reading is None else from_event(Snapshot, reading)


def _process_order(process: ProcessRecord) -> tuple[bool, int, int, str]:
    who = process.identity
    return (
        not process.is_worker,
        who.dp_rank or 0,
        who.rank if who.rank is not None else 1 << 30,
        process.file,
    )
