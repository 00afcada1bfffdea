"""Passages of a process through phases: spans, their edges, the device by owner at each edge.

The loader makes spans from event files, logs from text; accounting adds the owners. Spans of a
process are a list in the order of their start, and ``order`` is the position in it. Everything that
walks from a span to the phases around it is here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

from vllm_memprof.record.codec import computed, one_of
from vllm_memprof.record.schema import SNAPSHOT_FIELDS, Snapshot
from vllm_memprof.units import minus

#: The row of a divided device that holds every remainder.
UNEXPLAINED = "unexplained"
BEFORE, AFTER = "before", "after"
#: Where a figure comes from: read from the device or the allocator, derived from other figures,
#: estimated because a part of it is not known, or set by the profile of a simulated device. The
#: strongest first.
_STRENGTH = MEASURED, DERIVED, ESTIMATED, MODELLED = "measured", "derived", "estimated", "modelled"
How = Annotated[str, one_of(*_STRENGTH)]
#: Phases that a process passes for several things -> key of the detail that names the thing.
_NAMED_BY = {"communicator": "group", "component_load": "name", "stage": "name",
             "memory_file": "name"}  # fmt: skip


@dataclass(frozen=True, slots=True)  # hundreds per rank
class ComponentRow:
    """One owner of device memory at one edge."""

    component: str
    bytes: int | None
    how: How
    source: str = ""  # what the figure was read from
    #: The row or rows that hold it already; None: a row of its own.
    part_of: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The device by owner: known rows and ``unexplained_bytes`` add up to its total."""

    rows: list[ComponentRow]
    #: Every remainder, signed; None where the device's total is unknown. ``parts`` divides it.
    unexplained_bytes: int | None
    #: Held by rows or by what is unexplained already: not added.
    parts: list[ComponentRow] = field(default_factory=list)
    unexplained_how: How = DERIVED

    @property
    def by_owner(self) -> dict[str, int | None]:
        """Return the bytes of the rows, and what is unexplained."""
        sizes: dict[str, int | None] = {row.component: row.bytes for row in self.rows}
        return sizes | {UNEXPLAINED: self.unexplained_bytes}

    def remainders(self) -> list[ComponentRow]:
        """Return the parts of what is unexplained; they add up to it."""
        return [part for part in self.parts if part.part_of == UNEXPLAINED]


class Edge(NamedTuple):
    """One end of a span, as it was read."""

    side: str  # before | after
    snapshot: Snapshot
    owners: DeviceMemory | None  # None: not divided


@dataclass(frozen=True, slots=True)
class Span:
    """One passage of a process through a phase."""

    phase: str
    order: int  # position by start within the process, from 0
    parent: int | None = None  # order of the enclosing span; None at the top level
    depth: int = 0  # 0 at the top level
    before: Snapshot | None = None  # None: not recorded
    after: Snapshot | None = None
    owners: dict[str, DeviceMemory] = field(default_factory=dict)  # by side; empty: not divided
    start_t_ns: int | None = None  # time.monotonic_ns()
    end_t_ns: int | None = None
    error: str | None = None  # the exception that left the phase
    detail: Mapping[str, object] = field(default_factory=dict)  # of both edges, the later one wins
    id: int | None = field(default=None, compare=False)  # in the file

    @property
    def edges(self) -> list[Edge]:
        """Return the edges that were recorded, before, then after."""
        sides = ((BEFORE, self.before), (AFTER, self.after))
        return [Edge(side, read, self.owners.get(side)) for side, read in sides if read is not None]

    @property
    def name(self) -> str:
        """The phase, with whose it was: of which group, part of a pipeline or stage."""
        name = self.detail.get(_NAMED_BY.get(self.phase, ""))
        return self.phase if name in (None, "undefined") else f"{self.phase} {name}"

    @property
    @computed
    def open(self) -> bool:
        """True when the process never left the phase: it died there, or is still inside."""
        return self.end_t_ns is None

    @property
    @computed
    def seconds(self) -> float | None:
        passed = minus(self.end_t_ns, self.start_t_ns)
        return None if passed is None else passed / 1e9

    @property
    @computed
    def delta(self) -> dict[str, int | None] | None:
        """Snapshot after less snapshot before, by field; None where either is unknown."""
        if self.before is None or self.after is None:
            return None
        names = ("t_ns", *SNAPSHOT_FIELDS)
        return {
            name: minus(getattr(self.after, name), getattr(self.before, name)) for name in names
        }

    def integer(self, name: str) -> int | None:
        """Return a detail that is an integer; None where it is missing or anything else."""
        value = self.detail.get(name)
        return value if isinstance(value, int) else None

    def listed(self, name: str) -> list[Any] | None:
        """Return a detail that is a list; None where it is missing or anything else."""
        value = self.detail.get(name)
        return value if isinstance(value, list) else None

    def string(self, name: str) -> str | None:
        """Return a detail as a string; None where it is missing."""
        value = self.detail.get(name)
        return None if value is None else str(value)


def weakest(hows: Iterable[str]) -> str:
    """Return how a figure is known that is made of others: as the weakest of them."""
    return max(hows, key=_STRENGTH.index, default=MEASURED)


def edges_of(spans: Sequence[Span]) -> Iterator[tuple[Span, Edge]]:
    """Yield every recorded edge with its span, in the order of the spans."""
    return ((span, edge) for span in spans for edge in span.edges)


def ancestors(spans: Sequence[Span], span: Span) -> Iterator[Span]:
    """Yield the spans that a span lies in, the innermost first, as far as the list has them."""
    while span.parent is not None:
        at = bisect_left(spans, span.parent, key=attrgetter("order"))
        if at == len(spans) or spans[at].order != span.parent:
            return
        yield (span := spans[at])


def is_within(spans: Sequence[Span], span: Span, place: str | int) -> bool:
    """Return whether a span lies in a phase of this name, or in the span of this order."""
    return any(place in (each.phase, each.order) for each in ancestors(spans, span))


def first_of(spans: Sequence[Span], phase: str) -> Span | None:
    """Return the first passage through a phase."""
    return next((span for span in spans if span.phase == phase), None)


def last_of(spans: Sequence[Span], phase: str) -> Span | None:
    """Return the last passage through a phase."""
    return first_of(spans[::-1], phase)


def device_after(spans: Sequence[Span], phase: str) -> DeviceMemory | None:
    """Return the device by owner after the last passage whose edge has the device's total."""
    divided = (span.owners.get(AFTER) for span in reversed(spans) if span.phase == phase)
    return next((each for each in divided if each and each.unexplained_bytes is not None), None)
