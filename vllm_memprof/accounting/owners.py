"""Who holds what outside torch, over one process's life: what a single snapshot cannot tell.

The runtime counts by module and the driver by process; neither knows a communicator's name, ATB's pool or a captured
graph. Those follow from when a counter grew. Every inference here is one function; each says what it rests on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_memprof.accounting.quantities import CONTEXT_CEILING_BYTES
from vllm_memprof.record.loader import ProcessRecord
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span, edges_of
from vllm_memprof.units import MIB

#: Counters of aclrtGetMemUsageInfo that are divided further; any other is an owner of its own.
APP, HCCL, RUNTIME = "APP", "HCCL", "RUNTIME"
#: ATB's tiling buffers: ATB_DEVICE_TILING_BUFFER_BLOCK_NUM blocks (32 at the least) of 3 MiB, each rounded to pages.
#: (ATB device_tiling_buffer_pool; vllm-ascend#14300)
ATB_POOL_BYTES = 32 * 3 * MIB
_ATB_POOL_MOST_BYTES = 32 * 4 * MIB
#: Phases in which operators run: where ATB's first operation may be.
_OPERATOR_PHASES = ("profile_run", "graph_capture")


@dataclass(frozen=True)
class Moment:
    """An edge of a phase: where in time a snapshot is."""

    t_ns: int
    order: int  # of the span
    edge: str  # before | after


@dataclass(frozen=True)
class Communicator:
    """A communicator, from its group's first collective on."""

    name: str
    begins: Moment
    configured_bytes: int | None  # buffers by its configuration
    configured_by: str | None
    seen_bytes: (
        int | None
    )  # growth of the counter, or of non-torch memory, over its first collective

    @property
    def expected_bytes(self) -> int | None:
        return self.seen_bytes if self.configured_bytes is None else self.configured_bytes


@dataclass(frozen=True)
class Step:
    """An owner's memory as something that appeared at a moment and stayed."""

    since: Moment
    bytes: int


@dataclass(frozen=True)
class Capture:
    """A graph capture: what the runtime's counter showed before it, and by how much it had grown after it."""

    begins: Moment
    ends: Moment | None
    base_bytes: int
    grown_bytes: int


@dataclass(frozen=True)
class Owners:
    """What the whole of a process's record adds to each of its snapshots."""

    counted: bool = False  # the runtime's counters were read
    communicators: tuple[Communicator, ...] = ()
    contexts: tuple[
        tuple[int, int], ...
    ] = ()  # (t_ns, bytes) wherever the driver's figure gave it, in time
    first_context: int | None = (
        None  # where the driver gave none: the first reading, if nobody else can be in it
    )
    atb: Step | None = None
    captures: tuple[Capture, ...] = ()

    def context(self, t_ns: int) -> int | None:
        """The context at a moment at which the driver was not asked: as it was at the last one at which it was."""
        known = self.first_context
        for at, size in self.contexts:
            if at > t_ns and known is not None:
                break
            known = size
        return known


def is_after(t_ns: int, order: int, edge: str, moment: Moment) -> bool:
    """Whether an edge lies behind the one at which something appeared. Edges of one passage are told by their name."""
    if order == moment.order:
        return edge == "after"
    return t_ns > moment.t_ns


def owners_of(process: ProcessRecord) -> Owners:
    """Everything that follows from the order of events in one process."""
    edges = [
        (Moment(edge.snapshot.t_ns or 0, span.order, edge.side), edge.snapshot)
        for span, edge in edges_of(process.phases)
    ]
    edges.sort(key=lambda entry: entry[0].t_ns)
    counted = any(snapshot.components for _, snapshot in edges)
    return Owners(
        counted=counted,
        communicators=tuple(_communicators(process.phases)),
        contexts=tuple(_contexts(edges)),
        first_context=_first_context(edges),
        atb=_atb(process.phases),
        captures=tuple(_captures(process.phases)),
    )


def torch_bytes(snapshot: Snapshot) -> int | None:
    """Device memory of torch's segments: reserved, less what sleep mode has unmapped."""
    if snapshot.reserved_bytes is None:
        return None
    return snapshot.reserved_bytes - (snapshot.unmapped_bytes or 0)


def counter(snapshot: Snapshot, name: str) -> int | None:
    """One of the runtime's counters; 0 where it is not listed, None where nothing was read."""
    if snapshot.components is None:
        return None
    return snapshot.components.get(name, {}).get("bytes", 0)


def app_outside_torch(snapshot: Snapshot) -> int | None:
    """What the process asked the device for besides torch's segments and operator workspace."""
    app, torch, workspace = (
        counter(snapshot, APP),
        torch_bytes(snapshot),
        snapshot.npu_workspace_bytes,
    )
    return None if app is None or torch is None or workspace is None else app - torch - workspace


def _contexts(edges: list[tuple[Moment, Snapshot]]) -> Iterator[tuple[int, int]]:
    """The driver's figure of the process, less all that the runtime counts for it."""
    for moment, snapshot in edges:
        if snapshot.process_bytes is not None and snapshot.components is not None:
            yield moment.t_ns, snapshot.process_bytes - _sum_of_counters(snapshot)


def _first_context(edges: list[tuple[Moment, Snapshot]]) -> int | None:
    """Non-torch memory at the first reading, before anything is allocated, less what is counted already.

    Sound where the device is this process's own; above the ceiling somebody else must be on it.
    """
    for _, snapshot in edges:
        total, free, torch = (
            snapshot.device_total_bytes,
            snapshot.device_free_bytes,
            torch_bytes(snapshot),
        )
        if total is None or free is None or torch is None:
            continue
        counted = _sum_of_counters(snapshot) if snapshot.components is not None else torch
        size = total - free - counted
        return size if 0 <= size <= CONTEXT_CEILING_BYTES else None
    return None


def _sum_of_counters(snapshot: Snapshot) -> int:
    return sum(figures.get("bytes", 0) for figures in (snapshot.components or {}).values())


def _communicators(spans: list[Span]) -> Iterator[Communicator]:
    names: set[str] = set()
    for span in spans:
        if span.phase != "communicator" or span.error is not None:
            continue
        name = _communicator_name(span, names)
        names.add(name)
        begins = span.before or span.after
        yield Communicator(
            name=name,
            begins=Moment((0 if begins is None else begins.t_ns) or 0, span.order, "before"),
            configured_bytes=span.integer("buffer_bytes"),
            configured_by=span.string("buffer_source"),
            seen_bytes=_seen(span),
        )


def _communicator_name(span: Span, taken: set[str]) -> str:
    """``communicator:tp`` of ``tp:0``; the whole name, then a number, where that is taken."""
    group = str(span.detail.get("group") or "unnamed")
    short = group.removesuffix(":0")
    if span.detail.get("p2p"):
        short, group = f"{short} p2p", f"{group} p2p"
    numbered = (f"{group} {number}" for number in range(2, 1000))
    return next(
        f"communicator:{name}"
        for name in (short, group, *numbered)
        if f"communicator:{name}" not in taken
    )


def _seen(span: Span) -> int | None:
    if span.before is None or span.after is None:
        return None
    before, after = counter(span.before, HCCL), counter(span.after, HCCL)
    if before is None or after is None:
        before, after = _outside(span.before), _outside(span.after)
    return None if before is None or after is None else max(0, after - before)


def _outside(snapshot: Snapshot) -> int | None:
    """Non-torch memory without operator workspace."""
    non_torch = snapshot.non_torch_bytes
    return None if non_torch is None else non_torch - (snapshot.npu_workspace_bytes or 0)


def _atb(spans: list[Span]) -> Step | None:
    """ATB's pool: growth outside torch while ATB's warm-up operation ran, by the size of the pool at least.

    Where that operation added nothing, an earlier one had taken the pool: then the first phase in which operators ran
    and the process's own memory outside torch grew so much. Without counters only the first rule is sound, because
    communicators appear in the same phases.
    """
    warm_up = next((span for span in spans if span.phase == "atb_warm_up" and not span.error), None)
    if warm_up is None or warm_up.before is None or warm_up.after is None:
        return None
    before, after = app_outside_torch(warm_up.before), app_outside_torch(warm_up.after)
    if before is None or after is None:
        before, after = _outside(warm_up.before), _outside(warm_up.after)
    if before is not None and after is not None and after - before >= ATB_POOL_BYTES:
        return _step(warm_up, after - before)
    for span in spans:
        if span.phase in _OPERATOR_PHASES and span.before is not None and span.after is not None:
            before, after = app_outside_torch(span.before), app_outside_torch(span.after)
            if before is not None and after is not None and after - before >= ATB_POOL_BYTES:
                return _step(span, min(after - before, _ATB_POOL_MOST_BYTES))
    return None


def _step(span: Span, size: int) -> Step:
    assert span.after is not None
    return Step(Moment(span.after.t_ns or 0, span.order, "after"), size)


def _captures(spans: list[Span]) -> Iterator[Capture]:
    """Growth of the runtime's counter over a graph capture: task buffers and streams of the captured graphs."""
    for span in spans:
        base = (
            None
            if span.phase != "graph_capture" or span.before is None
            else counter(span.before, RUNTIME)
        )
        if base is None or span.before is None:
            continue
        end = None if span.after is None else counter(span.after, RUNTIME)
        begins = Moment(span.before.t_ns or 0, span.order, "before")
        if end is None or span.after is None:
            yield Capture(begins, None, base, 0)
        else:
            yield Capture(
                begins, Moment(span.after.t_ns or 0, span.order, "after"), base, max(0, end - base)
            )


@dataclass(frozen=True)
class Shares:
    """A communicator counter divided by name: bytes by name in their order, and what no name accounts for."""

    named: dict[str, int | None] = field(default_factory=dict)
    rest: int = 0


def share_communicators(owners: Owners, held: int, t_ns: int, order: int, edge: str) -> Shares:
    """Divides the communicators' counter at a moment.

    Each communicator that exists gets the buffers it is configured with; the last one made, whose buffers may be on
    their way, what is left for it. Where the counter holds less than the others need, some have been destroyed, and
    which ones it does not tell: their figures are None.
    """
    named: dict[str, int | None] = dict.fromkeys((each.name for each in owners.communicators), 0)
    present = [each for each in owners.communicators if is_after(t_ns, order, edge, each.begins)]
    if not present or held == 0:
        return Shares(named, held)
    *earlier, last = present
    expected = [each.expected_bytes for each in earlier]
    known = [size for size in expected if size is not None]
    if len(known) < len(expected) or sum(known) > held:
        return Shares({**named, **dict.fromkeys((each.name for each in present), None)}, held)
    named.update(zip((each.name for each in earlier), known, strict=True))
    left = held - sum(known)
    named[last.name] = left if last.expected_bytes is None else min(left, last.expected_bytes)
    return Shares(named, left - (named[last.name] or 0))
