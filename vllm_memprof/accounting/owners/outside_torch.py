"""Infer the owners of memory outside torch from the order of events in one process.

The runtime counts memory by module and the driver by process. Neither knows a communicator's name,
ATB's pool or a captured graph; those follow from the phase in which a counter grew. Each inference
is one function, and its docstring names the readings that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import NamedTuple

from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.readings.counters import (
    APP,
    HCCL,
    RUNTIME,
    app_outside_torch,
    counted_bytes,
    counter,
    torch_bytes,
)
from vllm_memprof.accounting.readings.quantities import CONTEXT_CEILING_BYTES
from vllm_memprof.record.loader import ProcessRecord
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import AFTER, BEFORE, Span, ancestors, edges_of, first_of
from vllm_memprof.units import MIB, Amount, either, floor_zero, minus, only_known

#: ATB's tiling buffers: ATB_DEVICE_TILING_BUFFER_BLOCK_NUM blocks (32 at the least) of 3 MiB, each
#: rounded to pages.
#: (ATB device_tiling_buffer_pool; vllm-ascend#14300)
ATB_POOL_BYTES = 32 * 3 * MIB
_ATB_POOL_MOST_BYTES = 32 * 4 * MIB
#: Communicators of a process that have a row; engines make some tens.
_MOST_COMMUNICATORS = 128
#: Phases in which operators run: where ATB's first operation may be.
_OPERATOR_PHASES = ("profile_run", "graph_capture")
#: The same of an engine that runs no profile, and warms up no operation of ATB alone.
_FIRST_OPERATORS = ("graph_capture", "request")

#: Phases in which a KV connector takes memory: it is made, registers the KV cache, first transfers.
CONNECTOR_PHASES = ("kv_connector", "kv_register", "kv_transfer")
NON_TORCH = "non-torch"
#: A figure of a snapshot, bytes.
Read = Callable[[Snapshot], Amount]


class EdgeTime(NamedTuple):
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
class Taken:
    """What a phase took and left; while it lasts, what was taken since it began."""

    name: str
    source: str
    begins: EdgeTime
    ends: EdgeTime | None  # None: the process never left the phase
    base_bytes: int  # that were counted when it began
    grown_bytes: Amount  # None: what it leaves is not known

    @classmethod
    def over(cls, span: Span, read: Read, name: str, source: str) -> Taken | None:
        """Return what a phase took of a counter; None where it was not read when it began."""
        base = None if span.before is None else read(span.before)
        if base is None:
            return None
        ends = None if span.after is None else EdgeTime.of(span, AFTER)
        return cls(name, source, EdgeTime.of(span, BEFORE), ends, base, grown(span, read))

    def is_there(self, at: EdgeTime) -> bool:
        """Return whether the phase has begun; one that failed has left nothing that is known."""
        if self.ends is not None and at.is_after(self.ends):
            return self.grown_bytes is not None
        return at.is_after(self.begins)

    def size(self, counted: Amount, at: EdgeTime) -> Amount:
        """Return its bytes at an edge with so much counted."""
        if self.ends is not None and at.is_after(self.ends):
            return self.grown_bytes
        return minus(counted, self.base_bytes)


@dataclass(frozen=True)
class Communicator:
    """A communicator, from its group's first collective on."""

    name: str
    begins: EdgeTime
    configured_bytes: Amount  # buffers by its configuration
    configured_by: str | None
    # growth of the counter, or of non-torch memory, over its first collective
    seen_bytes: Amount

    @property
    def expected_bytes(self) -> Amount:
        return either(self.configured_bytes, self.seen_bytes)

    @property
    def source(self) -> str:
        """Where its size is known from."""
        if self.configured_bytes is None:
            return "growth at its first collective"
        by = {"default": "HCCL's default", None: "its configuration"}.get(
            self.configured_by, self.configured_by
        )
        return f"2 x {self.configured_bytes // 2 // MIB} MiB by {by}"


#: Bytes wherever something gave them: (t_ns, bytes), in time.
Series = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Owners:
    """The owners that follow from all events of a process, for the division of each snapshot."""

    counted: bool = False  # the runtime's counters were read
    communicators: tuple[Communicator, ...] = ()
    contexts: Series = ()  # by the driver's figure of the process
    # where the driver gave none: from the first reading, if no other process can be in it
    first_context: Amount = None
    others: Series = ()  # by the driver's list of processes
    atb: Taken | None = None
    captures: tuple[Taken, ...] = ()  # of the runtime's counter
    #: Of KV connectors; their source is the counter, or non-torch memory where none was read.
    links: tuple[Taken, ...] = ()

    def other_processes(self, t_ns: int) -> Amount:
        """Return what other processes held, bytes, at the last reading not after ``t_ns``."""
        return next((size for at, size in reversed(self.others) if at <= t_ns), None)

    def context(self, t_ns: int) -> Amount:
        """Return the context, bytes, as the driver's last figure before ``t_ns`` gave it."""
        last = next((size for at, size in reversed(self.contexts) if at <= t_ns), None)
        return either(last, self.first_context, *(size for _, size in self.contexts[:1]))


def owners_of(process: ProcessRecord) -> Owners:
    """Return the owners that follow from the order of events in one process."""
    spans = process.phases
    read = sorted(
        (edge.snapshot for span, edge in edges_of(spans) if span.phase != "memory_file"),
        key=lambda snapshot: snapshot.t_ns or 0,
    )

    def series(figure: Read) -> Series:
        sizes = ((snapshot.t_ns or 0, figure(snapshot)) for snapshot in read)
        return tuple((t_ns, size) for t_ns, size in sizes if size is not None)

    captures = (
        Taken.over(span, lambda at: counter(at, RUNTIME), "graph", "")
        for span in spans
        if span.phase == "graph_capture"
    )
    return Owners(
        counted=any(snapshot.components for snapshot in read),
        communicators=tuple(islice(_communicators(spans), _MOST_COMMUNICATORS)),
        # the driver's figure of the process less all counters of the runtime
        contexts=series(lambda at: minus(at.process_bytes, counted_bytes(at))),
        first_context=_first_context(read),
        others=series(lambda at: at.other_processes_bytes),
        atb=_atb(spans),
        captures=tuple(only_known(captures)),
        links=tuple(_links(spans)),
    )


def _first_context(read: list[Snapshot]) -> Amount:
    """Return non-torch memory at the first reading, less what the counters hold already, bytes.

    It is the context where no other process is on the device. Above the ceiling there must be one.
    """
    for snapshot in read:
        torch = torch_bytes(snapshot)
        size = minus(snapshot.used_bytes, either(counted_bytes(snapshot), torch))
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
        begins = EdgeTime.of(span, BEFORE if span.before is not None else AFTER)
        yield Communicator(
            name=f"communicator:{name}",
            begins=begins._replace(edge=BEFORE),
            configured_bytes=span.integer("buffer_bytes"),
            configured_by=span.string("buffer_source"),
            seen_bytes=floor_zero(either(grown(span, _hccl), grown(span, _outside))),
        )


def grown(span: Span, read: Read) -> Amount:
    """Return the growth of a reading over a phase, bytes; None where an edge has none."""
    before, after = span.before, span.after
    return None if before is None or after is None else minus(read(after), read(before))


def _hccl(snapshot: Snapshot) -> Amount:
    return counter(snapshot, HCCL)


def _outside(snapshot: Snapshot) -> Amount:
    """Return non-torch memory without operator workspace, bytes."""
    return minus(snapshot.non_torch_bytes, snapshot.npu_workspace_bytes or 0)


def _atb(spans: list[Span]) -> Taken | None:
    """Return ATB's pool: growth outside torch while ATB's warm-up operation ran.

    The growth must be the size of the pool at least. Where it is less, an earlier operation had
    allocated the pool: then it is the growth of the process's memory outside torch in the first
    phase of operators where that is large enough; or its task was waiting, and it is the growth
    until the engine's warm-up ends. Both need counters, because communicators appear in the same
    phases. An engine without that warm-up has the second rule alone.
    """
    if first_of(spans, "kv_cache_sizing"):
        return _atb_in(spans, _FIRST_OPERATORS)
    warm_up = next((span for span in spans if span.phase == "atb_warm_up" and not span.error), None)
    if warm_up is None or warm_up.before is None or warm_up.after is None:
        return None
    size = either(grown(warm_up, app_outside_torch), grown(warm_up, _outside))
    if size is not None and size >= ATB_POOL_BYTES:
        return _pool(EdgeTime.of(warm_up, AFTER), size)
    # where the phase ends its operation may still be in torch_npu's task queue; not so where the
    # warm-up around it ends
    around = [replace(each, before=warm_up.before) for each in ancestors(spans, warm_up)]
    return _atb_in(spans, _OPERATOR_PHASES) or _atb_in([*around, warm_up], ("warm_up",))


def _atb_in(spans: list[Span], phases: Collection[str]) -> Taken | None:
    for span in spans:
        size = grown(span, app_outside_torch) if span.phase in phases else None
        if size is not None and size >= ATB_POOL_BYTES and span.before is not None:
            least = (app_outside_torch(span.before) or 0) + ATB_POOL_BYTES
            # right before the first edge inside the phase that has so much, else its end: operators
            # run in a thread of torch_npu's, and may come before a phase that lies inside ends
            begin, end = EdgeTime.of(span, BEFORE).t_ns, EdgeTime.of(span, AFTER)
            inside = [
                at - 1
                for other, edge in edges_of(spans)
                if other is not span
                and begin <= (at := edge.snapshot.t_ns or 0) <= end.t_ns
                and (app_outside_torch(edge.snapshot) or 0) >= least
            ]
            since = end._replace(t_ns=min([*inside, end.t_ns]))
            return _pool(since, min(size, _ATB_POOL_MOST_BYTES))
    return None


def _links(spans: list[Span]) -> Iterator[Taken]:
    """Yield what KV connectors took outside torch, less communicators that first ran meanwhile."""
    for span in spans:
        if span.phase not in CONNECTOR_PHASES or span.before is None:
            continue
        inside = [each for each in spans if span in ancestors(spans, each)]
        named = sum(each.integer("buffer_bytes") or 0 for each in inside
                    if each.phase == "communicator")  # fmt: skip
        read = {APP: (app_outside_torch, 0), HCCL: (_hccl, named)}
        if span.before.components is None:
            read = {NON_TORCH: (_outside, named)}
        for source, (figure, less) in read.items():
            taken = Taken.over(span, figure, "connector_links", source)
            if taken is not None:
                size = floor_zero(minus(taken.grown_bytes, less))
                yield replace(taken, grown_bytes=size)


def _pool(since: EdgeTime, size: int) -> Taken:
    return Taken("atb", "growth in the phase of ATB's first operation", since, since, 0, size)


def share_communicators(owners: Owners, held: int, at: EdgeTime) -> tuple[dict[str, Amount], int]:
    """Divide the communicators' counter at one edge: bytes by name, and the rest without a name.

    Each existing communicator gets the buffers it is configured with. The last one made, whose
    buffers may not all be allocated yet, gets what is left, at most its own. Where the counter
    holds less than the others need, some were destroyed, not known which: all are None.
    """
    named: dict[str, Amount] = dict.fromkeys((each.name for each in owners.communicators), 0)
    present = [each for each in owners.communicators if at.is_after(each.begins)]
    if not present or held == 0:
        return named, held
    *earlier, last = present
    left = held
    for each in earlier:
        named[each.name] = each.expected_bytes
        left = -1 if each.expected_bytes is None else left - each.expected_bytes
        if left < 0:
            return named | dict.fromkeys(each.name for each in present), held
    own = left if last.expected_bytes is None else min(left, last.expected_bytes)
    return {**named, last.name: own}, left - own


@dataclass(frozen=True)
class CommunicatorUse:
    """The first collective of one communicator."""

    names: list[str]  # vLLM's names of the groups that share it
    ranks: list[int] | None
    buffer_bytes: Amount  # of all its buffers, as configured
    buffer_source: str | None  # hccl_config | a variable's name | default
    op: str | None
    phase: str | None  # in which it was first used; None outside every phase
    seen_bytes: Amount  # growth of the HCCL counter over it, else of non-torch memory


def communicators_of(rank: RankReport) -> list[CommunicatorUse]:
    """Return the communicators of a rank in the order of their first collectives."""
    found = []
    for span in rank.phases:
        if span.phase != "communicator":
            continue
        around = next(ancestors(rank.phases, span), None)
        p2p = ["p2p"] if span.detail.get("p2p") else []
        use = CommunicatorUse(
            names=[*map(str, span.listed("names") or ()), *p2p],
            ranks=span.listed("ranks"),
            buffer_bytes=span.integer("buffer_bytes"),
            buffer_source=span.string("buffer_source"),
            op=span.string("op"),
            phase=None if around is None else around.phase,
            seen_bytes=either(grown(span, _hccl), grown(span, lambda at: at.non_torch_bytes)),
        )
        found.append(use)
    return found
