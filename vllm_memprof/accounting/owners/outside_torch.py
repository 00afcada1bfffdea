"""Infer the owners of memory outside torch from the order of events in one process.

The runtime counts memory by module and the driver by process. Neither knows a communicator's name,
ATB's pool or a captured graph; those follow from the phase in which a counter grew. Each inference
is one function, and its docstring names the readings that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count

from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.readings.counters import (
    HCCL,
    RUNTIME,
    app_outside_torch,
    counted_bytes,
    counter,
    torch_bytes,
)
from vllm_memprof.accounting.readings.quantities import CONTEXT_CEILING_BYTES
from vllm_memprof.accounting.readings.startup import growth
from vllm_memprof.record.loader import ProcessRecord
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import AFTER, BEFORE, Span, ancestors, edges_of
from vllm_memprof.units import MIB, minus

#: ATB's tiling buffers: ATB_DEVICE_TILING_BUFFER_BLOCK_NUM blocks (32 at the least) of 3 MiB, each
#: rounded to pages.
#: (ATB device_tiling_buffer_pool; vllm-ascend#14300)
ATB_POOL_BYTES = 32 * 3 * MIB
_ATB_POOL_MOST_BYTES = 32 * 4 * MIB
#: Phases in which operators run: where ATB's first operation may be.
_OPERATOR_PHASES = ("profile_run", "graph_capture")
#: The same of an engine that runs no profile, and warms up no operation of ATB alone.
_FIRST_OPERATORS = ("graph_capture", "request")


@dataclass(frozen=True, slots=True)
class EdgeTime:
    """The time of a snapshot: an edge of a phase."""

    t_ns: int
    order: int  # of the span
    edge: str  # before | after

    @classmethod
    def of(cls, span: Span, edge: str) -> EdgeTime:
        """Return the time of an edge of a span, 0 where it was not read."""
        snapshot = span.before if edge == BEFORE else span.after
        return cls(0 if snapshot is None else snapshot.t_ns or 0, span.order, edge)

    def is_after(self, moment: EdgeTime) -> bool:
        """Return whether this edge comes after another; those of one span differ by name."""
        if self.order == moment.order:
            return self.edge == AFTER
        return self.t_ns > moment.t_ns


@dataclass(frozen=True)
class Communicator:
    """A communicator, from its group's first collective on."""

    name: str
    begins: EdgeTime
    configured_bytes: int | None  # buffers by its configuration
    configured_by: str | None
    # growth of the counter, or of non-torch memory, over its first collective
    seen_bytes: int | None

    @property
    def expected_bytes(self) -> int | None:
        return self.seen_bytes if self.configured_bytes is None else self.configured_bytes

    @cached_property
    def source(self) -> str:
        """Where its size is known from."""
        if self.configured_bytes is None:
            return "growth at its first collective"
        by = {"default": "HCCL's default", None: "its configuration"}.get(
            self.configured_by, self.configured_by
        )
        return f"2 x {self.configured_bytes // 2 // MIB} MiB by {by}"


@dataclass(frozen=True)
class Appeared:
    """Memory of an owner that appeared at one edge and stayed."""

    since: EdgeTime
    bytes: int


@dataclass(frozen=True)
class GraphCapture:
    """A graph capture: the runtime's counter before it, and the counter's growth over it."""

    begins: EdgeTime
    ends: EdgeTime | None
    base_bytes: int
    grown_bytes: int


@dataclass(frozen=True)
class Owners:
    """The owners that follow from all events of a process, for the division of each snapshot."""

    counted: bool = False  # the runtime's counters were read
    communicators: tuple[Communicator, ...] = ()
    # (t_ns, bytes) wherever the driver's figure gave it, in time
    contexts: tuple[tuple[int, int], ...] = ()
    # where the driver gave none: from the first reading, if no other process can be in it
    first_context: int | None = None
    # (t_ns, bytes) wherever the driver's list of processes was read, in time
    others: tuple[tuple[int, int], ...] = ()
    atb: Appeared | None = None
    captures: tuple[GraphCapture, ...] = ()

    def other_processes(self, t_ns: int) -> int | None:
        """Return what other processes held, bytes, at the last reading not after ``t_ns``."""
        return next((size for at, size in reversed(self.others) if at <= t_ns), None)

    def context(self, t_ns: int) -> int | None:
        """Return the context, bytes, as the driver's last figure before ``t_ns`` gave it."""
        known = self.first_context
        for at, size in self.contexts:
            if at > t_ns and known is not None:
                break
            known = size
        return known


def owners_of(process: ProcessRecord) -> Owners:
    """Return the owners that follow from the order of events in one process."""
    edges = [
        (EdgeTime(edge.snapshot.t_ns or 0, span.order, edge.side), edge.snapshot)
        for span, edge in edges_of(process.phases)
    ]
    edges.sort(key=lambda entry: entry[0].t_ns)
    counted = any(snapshot.components for _, snapshot in edges)
    captures = []  # growth of the runtime's counter: task buffers and streams of captured graphs
    for span in process.phases:
        base = None if span.before is None else counter(span.before, RUNTIME)
        if span.phase == "graph_capture" and base is not None:
            grown = _grown(span, lambda snapshot: counter(snapshot, RUNTIME))
            ends = None if grown is None else EdgeTime.of(span, AFTER)
            begins = EdgeTime.of(span, BEFORE)
            captures.append(GraphCapture(begins, ends, base, max(0, grown or 0)))
    return Owners(
        counted=counted,
        communicators=tuple(_communicators(process.phases)),
        # the driver's figure of the process less all counters of the runtime
        contexts=tuple(
            (moment.t_ns, size)
            for moment, snapshot in edges
            if (size := minus(snapshot.process_bytes, counted_bytes(snapshot))) is not None
        ),
        first_context=_first_context(edges),
        others=tuple(
            (moment.t_ns, snapshot.other_processes_bytes)
            for moment, snapshot in edges
            if snapshot.other_processes_bytes is not None
        ),
        atb=_atb(process.phases),
        captures=tuple(captures),
    )


def _first_context(edges: list[tuple[EdgeTime, Snapshot]]) -> int | None:
    """Return non-torch memory at the first reading, less what the counters hold already, bytes.

    It is the context where no other process is on the device. Above the ceiling there must be one.
    """
    for _, snapshot in edges:
        torch, counted = torch_bytes(snapshot), counted_bytes(snapshot)
        size = minus(snapshot.used_bytes, torch if counted is None else counted)
        if size is not None and torch is not None:
            return size if 0 <= size <= CONTEXT_CEILING_BYTES else None
    return None


def _communicators(spans: list[Span]) -> Iterator[Communicator]:
    names: set[str] = set()
    for span in spans:
        if span.phase != "communicator" or span.error is not None:
            continue
        # ``tp:0`` is ``communicator:tp``; in full, then with a number, where that is taken
        group = str(span.detail.get("group") or "unnamed")
        p2p = " p2p" if span.detail.get("p2p") else ""
        numbered = (f"{group}{p2p} {number}" for number in count(2))
        possible = chain((f"{group.removesuffix(':0')}{p2p}", f"{group}{p2p}"), numbered)
        name = next(name for name in possible if name not in names)
        names.add(name)
        grown = _grown(span, lambda snapshot: counter(snapshot, HCCL))
        grown = _grown(span, _outside) if grown is None else grown
        begins = EdgeTime.of(span, BEFORE if span.before is not None else AFTER)
        yield Communicator(
            name=f"communicator:{name}",
            begins=replace(begins, edge=BEFORE),
            configured_bytes=span.integer("buffer_bytes"),
            configured_by=span.string("buffer_source"),
            seen_bytes=None if grown is None else max(0, grown),
        )


def _grown(span: Span, read: Callable[[Snapshot], int | None]) -> int | None:
    """Return the growth of a reading over a phase, bytes; None where an edge has none."""
    before, after = span.before, span.after
    return None if before is None or after is None else minus(read(after), read(before))


def _outside(snapshot: Snapshot) -> int | None:
    """Return non-torch memory without operator workspace, bytes."""
    return minus(snapshot.non_torch_bytes, snapshot.npu_workspace_bytes or 0)


def _atb(spans: list[Span]) -> Appeared | None:
    """Return ATB's pool: growth outside torch while ATB's warm-up operation ran.

    The growth must be the size of the pool at least. Where it is less, an earlier operation had
    allocated the pool: then it is the growth of the process's memory outside torch in the first
    phase of operators where that is large enough. The second rule needs counters, because
    communicators appear in the same phases. An engine without that warm-up has the second rule
    alone.
    """
    if any(span.phase == "kv_cache_sizing" for span in spans):
        return _atb_in(spans, _FIRST_OPERATORS)
    warm_up = next((span for span in spans if span.phase == "atb_warm_up" and not span.error), None)
    if warm_up is None or warm_up.before is None or warm_up.after is None:
        return None
    grown = _grown(warm_up, app_outside_torch)
    grown = _grown(warm_up, _outside) if grown is None else grown
    if grown is not None and grown >= ATB_POOL_BYTES:
        return Appeared(EdgeTime.of(warm_up, AFTER), grown)
    return _atb_in(spans, _OPERATOR_PHASES)


def _atb_in(spans: list[Span], phases: Collection[str]) -> Appeared | None:
    for span in spans:
        grown = _grown(span, app_outside_torch) if span.phase in phases else None
        if grown is not None and grown >= ATB_POOL_BYTES and span.before is not None:
            size = (app_outside_torch(span.before) or 0) + ATB_POOL_BYTES
            # right before the first edge inside the phase that has so much, else its end: operators
            # run in a thread of torch_npu's, and may come before a phase that lies inside ends
            begin, end = EdgeTime.of(span, BEFORE).t_ns, EdgeTime.of(span, AFTER)
            inside = [
                at - 1
                for other, edge in edges_of(spans)
                if other is not span
                and begin <= (at := edge.snapshot.t_ns or 0) <= end.t_ns
                and (app_outside_torch(edge.snapshot) or 0) >= size
            ]
            since = replace(end, t_ns=min([*inside, end.t_ns]))
            return Appeared(since, min(grown, _ATB_POOL_MOST_BYTES))
    return None


@dataclass(frozen=True, slots=True)
class Shares:
    """The communicators' counter in bytes by name, in their order, and the rest without a name."""

    named: dict[str, int | None] = field(default_factory=dict)
    rest: int = 0


def share_communicators(owners: Owners, held: int, at: EdgeTime) -> Shares:
    """Divide the communicators' counter at one edge.

    Each existing communicator gets the buffers it is configured with. The last one made, whose
    buffers may not all be allocated yet, gets what is left, at most its own. Where the counter
    holds less than the others need, some were destroyed, not known which: all are None.
    """
    named: dict[str, int | None] = dict.fromkeys((each.name for each in owners.communicators), 0)
    present = [each for each in owners.communicators if at.is_after(each.begins)]
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


@dataclass(frozen=True)
class CommunicatorUse:
    """The first collective of one communicator."""

    names: list[str]  # vLLM's names of the groups that share it
    ranks: list[int] | None
    buffer_bytes: int | None  # of all its buffers, as configured
    buffer_source: str | None  # hccl_config | a variable's name | default
    op: str | None
    phase: str | None  # in which it was first used; None outside every phase
    seen_bytes: int | None  # growth of the HCCL counter over it, else of non-torch memory


def communicators_of(rank: RankReport) -> list[CommunicatorUse]:
    """Return the communicators of a rank in the order of their first collectives."""
    found = []
    for span in rank.phases:
        if span.phase != "communicator":
            continue
        names, ranks = span.detail.get("names"), span.detail.get("ranks")
        around = next(ancestors(rank.phases, span), None)
        grown = _grown(span, lambda snapshot: counter(snapshot, HCCL))
        if grown is None:
            grown = growth(span.before, span.after, "non_torch_bytes")
        use = CommunicatorUse(
            names=[str(name) for name in names] if isinstance(names, list) else [],
            ranks=ranks if isinstance(ranks, list) else None,
            buffer_bytes=span.integer("buffer_bytes"),
            buffer_source=span.string("buffer_source"),
            op=span.string("op"),
            phase=None if around is None else around.phase,
            seen_bytes=grown,
        )
        if span.detail.get("p2p"):
            use.names.append("p2p")
        found.append(use)
    return found
