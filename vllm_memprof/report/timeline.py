"""The device over time by owner, for the page: a rank's readings enter, plain figures leave.

Bytes are integers, None is unknown. Readings are those of ``report.json``: the device at both ends
of each phase.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from vllm_memprof.accounting.deployment.clock import MOMENTS
from vllm_memprof.accounting.model import DERIVED, MEASURED, RankReport
from vllm_memprof.accounting.readings.quantities import TORCH_ROWS
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import UNEXPLAINED, DeviceMemory, Edge, Span, ancestors, edges_of
from vllm_memprof.text import text
from vllm_memprof.units import minus

#: Readings that a timeline draws; of more, the first and the fullest of each stretch.
MOST_MOMENTS = 1200
#: Passages through phases that are drawn, the longest of them.
MOST_BANDS = 400
#: Peaks that are marked.
MOST_PEAKS = 6
#: A peak is marked where it is this share of the device above the readings at its phase's ends.
_LEAST_RISE = 0.01
#: Phases whose growth of allocated memory tells what the tensors are, bottom of the stack first.
_TENSORS = {"weight_load": "tensors: weights", "kv_cache_alloc": "tensors: KV cache"}
#: From the start of one of these on, what tensors there are is not known any more.
_TENSORS_CHANGE = ("sleep", "wake_up", "weight_update", "shutdown")
_OTHER_TENSORS = "tensors: other"
_UNDIVIDED = "tensors: not divided"
_RESERVED = "reserved, not allocated"
#: Owners whose name is a word of ours.
_TITLES = {
    "tensors: weights": text("tensors: weights"),
    "tensors: KV cache": text("tensors: KV cache"),
    "tensors: other": text("tensors: other"),
    "tensors: not divided": text("tensors: not divided"),
    "reserved, not allocated": text("reserved, not allocated"),
    "unexplained": text("unexplained"),
}
_NOT_OWNERS = (*TORCH_ROWS, "free")


@dataclass(frozen=True)
class TimelinePoint:
    seconds: float  # since the first reading on the rank's host
    phase: str
    edge: str  # before | after


@dataclass(frozen=True)
class Owner:
    """One owner over time, in the order of the moments."""

    name: str
    bytes: list[int | None]
    how: str = MEASURED  # as the last reading has it
    title: str = ""  # the name, in words

    def __post_init__(self) -> None:
        if not self.title:
            object.__setattr__(self, "title", _TITLES.get(self.name, self.name))


@dataclass(frozen=True)
class Band:
    """One passage through a phase."""

    phase: str
    depth: int  # 0: outermost
    start: float  # seconds, as for moments
    end: float | None  # None: never left


@dataclass(frozen=True)
class Peak:
    """A height between or at readings that deserves a mark."""

    what: str  # in use | allocated
    where: str  # before a phase, after it, or in it; in words
    bytes: int
    seconds: float
    exact: bool  # False: the time within the phase is not known


@dataclass(frozen=True)
class Timeline:
    moments: list[TimelinePoint]
    owners: list[Owner]  # bottom of the stack first
    in_use: list[int | None]  # device total less free, as read
    bands: list[Band]
    peaks: list[Peak]
    worst_bytes: int | None  # most that all owners were seen to hold
    left_out: int = 0  # readings that are not drawn


@dataclass(frozen=True)
class _Reading:
    span: Span
    edge: Edge
    memory: DeviceMemory

    @property
    def t_ns(self) -> int:
        return self.edge.snapshot.t_ns or 0

    @property
    def snapshot(self) -> Snapshot:
        return self.edge.snapshot


def timeline_of(rank: RankReport, start: int) -> Timeline | None:
    readings = _readings(rank)
    if not readings:
        return None
    drawn = _thinned(readings)
    names = list(dict.fromkeys(row.component for reading in drawn for row in reading.memory.rows))
    owners = [
        *_tensors(rank, drawn),
        *_plain(drawn, [name for name in names if name not in _NOT_OWNERS]),
    ]
    rest = [reading.memory.unexplained_bytes for reading in drawn]
    how = drawn[-1].memory.unexplained_how
    owners.append(Owner(UNEXPLAINED, rest, how))
    held = [edge.snapshot.used_bytes for _, edge in edges_of(rank.phases)]
    held += [_reserved_between(span) for span in rank.phases]
    return Timeline(
        moments=[
            TimelinePoint((each.t_ns - start) / 1e9, each.span.phase, each.edge.side)
            for each in drawn
        ],
        owners=[owner for owner in owners if any(owner.bytes)],
        in_use=[reading.snapshot.used_bytes for reading in drawn],
        bands=_bands(rank, start),
        peaks=_peaks(rank, readings, start),
        worst_bytes=max((size for size in held if size is not None), default=None),
        left_out=len(readings) - len(drawn),
    )


def _readings(rank: RankReport) -> list[_Reading]:
    """Return moments with a time and at least one figure, in the order of time."""
    found = []
    for span, edge in edges_of(rank.phases):
        memory = edge.owners
        if memory is None or all(each.bytes is None for each in memory.rows):
            continue
        if edge.snapshot.t_ns:
            found.append(_Reading(span, edge, memory))
    return sorted(found, key=lambda reading: reading.t_ns)


def _thinned(readings: list[_Reading]) -> list[_Reading]:
    """At most ``MOST_MOMENTS``: of each stretch of time the first reading and the fullest."""
    if len(readings) <= MOST_MOMENTS:
        return readings
    first, last = readings[0].t_ns, readings[-1].t_ns
    stretches: dict[int, list[int]] = {}
    for i, reading in enumerate(readings):
        stretch = (reading.t_ns - first) * (MOST_MOMENTS // 2 - 1) // max(1, last - first)
        stretches.setdefault(stretch, []).append(i)
    kept = {len(readings) - 1}
    for members in stretches.values():
        kept |= {members[0], max(members, key=lambda i: readings[i].snapshot.used_bytes or 0)}
    return [readings[i] for i in sorted(kept)]


def _tensors(rank: RankReport, readings: list[_Reading]) -> list[Owner]:
    """Return allocated memory by the phase that allocated it, and the rest of the reserved.

    What sleep mode unmapped is off the device, so it is taken off the allocated memory, then off
    the rest of the reserved.
    """
    allocated, cached = [], []
    for reading in readings:
        rows = {row.component: row.bytes for row in reading.memory.rows}
        here, spare = rows.get("allocated"), rows.get("reserved_not_allocated")
        unmapped = -(rows.get("unmapped") or 0)
        if unmapped and here is not None and spare is not None:
            spare -= max(0, unmapped - here)
            here = max(0, here - unmapped)
        allocated.append(here)
        cached.append(spare)
    until = min(
        (
            row.before.t_ns or 0
            for row in rank.phases
            if row.phase in _TENSORS_CHANGE and row.before is not None
        ),
        default=None,
    )
    grown = _grown(rank)
    divided: list[dict[str, int]] = []
    for reading, here in zip(readings, allocated, strict=True):
        parts: dict[str, int] = {}
        for since, title, size in grown:
            if since <= reading.t_ns:
                parts[title] = parts.get(title, 0) + size
        if here is None:
            divided.append({})
        elif (until is None or reading.t_ns <= until) and sum(parts.values()) <= here:
            divided.append({**parts, _OTHER_TENSORS: here - sum(parts.values())})
        else:
            divided.append({_UNDIVIDED: here})
    titles = [*_TENSORS.values(), _OTHER_TENSORS, _UNDIVIDED]
    owners = [
        Owner(
            title,
            [parts.get(title) for parts in divided],
            MEASURED if title == _UNDIVIDED else DERIVED,
        )
        for title in titles
    ]
    return [*owners, Owner(_RESERVED, cached)]


def _grown(rank: RankReport) -> list[tuple[int, str, int]]:
    """(when it ended, title, bytes) of the phases of ``_TENSORS`` that allocated something."""
    found = []
    for row in rank.phases:
        if row.phase in _TENSORS and row.before is not None and row.after is not None:
            size = minus(row.after.allocated_bytes, row.before.allocated_bytes)
            if size is not None and size > 0:
                found.append((row.after.t_ns or 0, _TENSORS[row.phase], size))
    return found


def _plain(readings: list[_Reading], names: list[str]) -> list[Owner]:
    tables = [{row.component: row.bytes for row in reading.memory.rows} for reading in readings]
    how = {row.component: row.how for reading in readings for row in reading.memory.rows}
    return [Owner(name, [table.get(name) for table in tables], how[name]) for name in names]


def _bands(rank: RankReport, start: int) -> list[Band]:
    found = []
    for row in rank.phases:
        begins, ends = _time(row.before), _time(row.after)
        timed = row.seconds is not None or row.phase in MOMENTS
        if begins is None and ends is not None and timed:
            begins = ends - int((row.seconds or 0) * 1e9)
        if begins is not None:
            end = None if ends is None else (ends - start) / 1e9
            found.append(Band(row.phase, row.depth, max(0.0, (begins - start) / 1e9), end))
    kept = sorted(found, key=lambda band: (band.depth > 0, -(band.end or 1e12) + band.start))[
        :MOST_BANDS
    ]
    return sorted(kept, key=lambda band: (band.start, band.depth))


def _peaks(rank: RankReport, readings: list[_Reading], start: int) -> list[Peak]:
    """Return the highest of each kind per outermost phase, above its ends; the steepest few."""
    total = rank.device_total_bytes
    if total is None:
        return []
    outermost: dict[int, int] = {}  # order -> that of the outermost phase around it
    rows: dict[int, list[Span]] = {}
    for row in rank.phases:  # by start: parents come first
        *_, outer = row, *ancestors(rank.phases, row)
        outermost[row.order] = outer.order
        rows.setdefault(outermost[row.order], []).append(row)
    read: dict[int, list[_Reading]] = {}
    for reading in readings:
        read.setdefault(outermost[reading.span.order], []).append(reading)
    found: list[tuple[int, Peak]] = []
    for order, inside in rows.items():
        for what, level, between in _KINDS_OF_PEAK:
            heights = [
                (each, size)
                for each in read.get(order, [])
                if (size := level(each.snapshot)) is not None
            ]
            ends = [size for each, size in heights if each.span.order == order]
            candidates = [
                Peak(
                    what,
                    text("before {phase}", phase=each.span.phase)
                    if each.edge.side == "before"
                    else text("after {phase}", phase=each.span.phase),
                    size,
                    (each.t_ns - start) / 1e9,
                    True,
                )
                for each, size in heights
            ]
            candidates += _risen(inside, what, between, start)
            best = max(candidates, key=lambda peak: peak.bytes, default=None)
            if best is not None and len(ends) == 2 and best.bytes - max(ends) > _LEAST_RISE * total:
                found.append((best.bytes - max(ends), best))
    steepest = sorted(found, key=lambda entry: -entry[0])[:MOST_PEAKS]
    return sorted((peak for _, peak in steepest), key=lambda peak: peak.seconds)


def _risen(
    rows: list[Span], what: str, between: Callable[[Span], int | None], start: int
) -> list[Peak]:
    """Return peaks that the allocator kept; of nested phases with the same one, the innermost."""
    found: dict[int, tuple[int, Peak]] = {}
    for row in rows:
        size, begins, ends = between(row), _time(row.before), _time(row.after)
        if (
            size is None
            or begins is None
            or ends is None
            or row.depth < found.get(size, (-1, None))[0]
        ):
            continue
        found[size] = (
            row.depth,
            Peak(
                what,
                text("in {phase}", phase=row.phase),
                size,
                ((begins + ends) / 2 - start) / 1e9,
                False,
            ),
        )
    return [peak for _, peak in found.values()]


def _allocated_between(row: Span) -> int | None:
    """Return the most that was allocated at once, where it was within this phase."""
    low = None if row.before is None else row.before.allocated_run_peak_bytes
    high = None if row.after is None else row.after.allocated_run_peak_bytes
    return high if low is not None and high is not None and high > low else None


def _reserved_between(row: Span) -> int | None:
    """Return the most in use within a phase: reserved peak + the lesser non-torch of both ends.

    As ``accounting.budget.serving_peak`` has it: non-torch memory at that moment is not known.
    """
    before, after = row.before, row.after
    if (
        before is None
        or after is None
        or before.non_torch_bytes is None
        or after.non_torch_bytes is None
    ):
        return None
    low, high = before.reserved_run_peak_bytes, after.reserved_run_peak_bytes
    if low is None or high is None or high <= low:
        return None
    return high + min(before.non_torch_bytes, after.non_torch_bytes)


#: What has peaks: how high a reading is, and how high it was at most within a phase.
_KINDS_OF_PEAK: tuple[
    tuple[str, Callable[[Snapshot], int | None], Callable[[Span], int | None]], ...
] = (
    ("in use", lambda snapshot: snapshot.used_bytes, _reserved_between),
    ("allocated", attrgetter("allocated_bytes"), _allocated_between),
)


def _time(snapshot: Snapshot | None) -> int | None:
    return None if snapshot is None or not snapshot.t_ns else snapshot.t_ns
