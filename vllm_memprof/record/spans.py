"""Passages of a process through phases: spans, their edges, the device by owner at each edge.

The loader makes spans from event files, logs from text; accounting adds the owners. Spans of a
process are a list in the order of their start, and ``order`` is the position in it. Everything that
walks from a span to the phases around it is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from vllm_memprof.record.codec import INLINE, OPTIONAL, Allowed, Spread, computed
from vllm_memprof.record.schema import SNAPSHOT_FIELDS, Snapshot
from vllm_memprof.units import minus

#: The row of a divided device that holds every remainder.
UNEXPLAINED = "unexplained"
BEFORE, AFTER = "before", "after"
Side = Annotated[str, Allowed((BEFORE, AFTER))]
#: Where a figure comes from: read from the device or the allocator, derived from other figures,
#: estimated because a part of it is not known, or set by the profile of a simulated device.
MEASURED, DERIVED, ESTIMATED, MODELLED = "measured", "derived", "estimated", "modelled"
#: The strongest first.
_STRENGTH = (MEASURED, DERIVED, ESTIMATED, MODELLED)
How = Annotated[str, Allowed(_STRENGTH)]
#: Phases that a process passes for several things -> key of the detail that names the thing.
_NAMED_BY = {"communicator": "group", "component_load": "name", "stage": "name"}


@dataclass(frozen=True, slots=True)  # hundreds per rank
class ComponentRow:
    """One owner of device memory at one edge."""

    component: str
    bytes: int | None
    how: How
    source: str = ""  # what the figure was read from
    #: The row or rows that hold it already; None: a row of its own.
    part_of: str | None = field(default=None, metadata={"json": OPTIONAL})


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The device by owner: known rows and ``unexplained_bytes`` add up to its total."""

    rows: list[ComponentRow] = field(metadata={"json": "owners"})
    #: Every remainder, signed; None where the device's total is unknown. ``parts`` divides it.
    unexplained_bytes: int | None
    #: Held by rows or by what is unexplained already: not added.
    parts: list[ComponentRow] = field(default_factory=list)
    unexplained_how: How = DERIVED

    def remainders(self) -> list[ComponentRow]:
        """Return the parts of what is unexplained; they add up to it."""
        return [part for part in self.parts if part.part_of == UNEXPLAINED]


@dataclass(frozen=True, slots=True)
class Edge:
    """One end of a span, as it was read."""

    side: Side
    snapshot: Snapshot = field(metadata={"json": INLINE})
    #: None: not divided.
    owners: DeviceMemory | None = field(default=None, metadata={"json": INLINE})


@dataclass(frozen=True, slots=True)
class Span:
    """One passage of a process through a phase."""

    phase: str
    order: int  # position by start within the process, from 0
    parent: int | None  # order of the enclosing span; None at the top level
    depth: int  # 0 at the top level
    #: Those that were recorded, before, then after.
    edges: tuple[Edge, ...] = field(metadata={"json": Spread("side", (BEFORE, AFTER))})
    start_t_ns: int | None  # time.monotonic_ns()
    end_t_ns: int | None
    error: str | None = None  # the exception that left the phase
    detail: Mapping[str, object] = field(default_factory=dict)  # of both edges, the later one wins
    id: int | None = field(default=None, compare=False, metadata={"json": False})  # in the file
    hook: str | None = field(default=None, compare=False, metadata={"json": False})

    @property
    def before(self) -> Snapshot | None:
        edge = self.edge(BEFORE)
        return None if edge is None else edge.snapshot

    @property
    def after(self) -> Snapshot | None:
        edge = self.edge(AFTER)
        return None if edge is None else edge.snapshot

    @property
    def name(self) -> str:
        """The phase, with whose it was: of which group, part of a pipeline or stage."""
        key = _NAMED_BY.get(self.phase)
        name = None if key is None else self.detail.get(key)
        return self.phase if name in (None, "undefined") else f"{self.phase} {name}"

    @property
    @computed
    def open(self) -> bool:
        """True when the process never left the phase: it died there, or is still inside."""
        return self.end_t_ns is None

    @property
    @computed
    def seconds(self) -> float | None:
        if self.start_t_ns is None or self.end_t_ns is None:
            return None
        return (self.end_t_ns - self.start_t_ns) / 1e9

    @property
    @computed
    def delta(self) -> dict[str, int | None] | None:
        """Snapshot after less snapshot before, by field; None where either is unknown."""
        before, after = self.before, self.after
        if before is None or after is None:
            return None
        old, new = vars(before), vars(after)
        return {name: minus(new[name], old[name]) for name in ("t_ns", *SNAPSHOT_FIELDS)}

    def edge(self, side: str) -> Edge | None:
        """Return the edge before or after; None where it was not recorded."""
        for edge in self.edges:
            if edge.side == side:
                return edge
        return None

    def integer(self, name: str) -> int | None:
        """Return a detail that is an integer; None where it is missing or anything else."""
        value = self.detail.get(name)
        return value if isinstance(value, int) else None

    def string(self, name: str) -> str | None:
        """Return a detail as a string; None where it is missing."""
        value = self.detail.get(name)
        return None if value is None else str(value)


def weakest(hows: Iterable[str]) -> str:
    """Return how a figure is known that is made of others: as the weakest of them."""
    return max(hows, key=_STRENGTH.index, default=MEASURED)


def edges(before: Snapshot | None, after: Snapshot | None) -> tuple[Edge, ...]:
    """Return the edges of a span of which these snapshots were recorded."""
    sides = ((BEFORE, before), (AFTER, after))
    return tuple(Edge(side, snapshot) for side, snapshot in sides if snapshot is not None)


def edges_of(spans: Sequence[Span]) -> Iterator[tuple[Span, Edge]]:
    """Yield every recorded edge with its span, in the order of the spans."""
    return ((span, edge) for span in spans for edge in span.edges)


def ancestors(spans: Sequence[Span], span: Span) -> Iterator[Span]:
    """Yield the spans that a span lies in, the innermost first."""
    parent = span.parent
    while parent is not None:
        if parent < len(spans) and spans[parent].order == parent:
            span = spans[parent]
        else:  # some spans of the process were left out of the list
            found = next((each for each in spans if each.order == parent), None)
            if found is None:
                return
            span = found
        yield span
        parent = span.parent


def is_within(spans: Sequence[Span], span: Span, place: str | int) -> bool:
    """Return whether a span lies in a phase of this name, or in the span of this order."""
    if span.parent is None:
        return False
    return any(each.phase == place or each.order == place for each in ancestors(spans, span))


def first_of(spans: Sequence[Span], phase: str) -> Span | None:
    """Return the first passage through a phase."""
    return next((span for span in spans if span.phase == phase), None)


def last_of(spans: Sequence[Span], phase: str) -> Span | None:
    """Return the last passage through a phase."""
    return next((span for span in reversed(spans) if span.phase == phase), None)


def device_after(spans: Sequence[Span], phase: str) -> DeviceMemory | None:
    """Return the device by owner after the last passage whose edge has the device's total."""
    for span in reversed(spans):
        edge = span.edge(AFTER) if span.phase == phase else None
        memory = None if edge is None else edge.owners
        if memory is not None and memory.unexplained_bytes is not None:
            return memory
    return None
