"""The device over time by owner, for the page: a rank's readings enter, plain figures leave.

Bytes are integers, None is unknown. Readings are those of ``report.json``: the device at both ends
of each phase.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nlargest
from math import inf
from operator import itemgetter
from typing import NamedTuple

from vllm_memprof.accounting.deployment.clock import MOMENTS
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.readings.quantities import TORCH_ROWS
from vllm_memprof.accounting.readings.startup import peak_between, value
from vllm_memprof.accounting.titles import title_in
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import (
    AFTER,
    DERIVED,
    MEASURED,
    UNEXPLAINED,
    DeviceMemory,
    Edge,
    Span,
    ancestors,
    edges_of,
)
from vllm_memprof.tables import foremost
from vllm_memprof.text import text
from vllm_memprof.units import largest, minus, only_known

#: Readings that a timeline draws; of more, those at which the device changed most.
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
_OTHER_TENSORS, _UNDIVIDED = "tensors: other", "tensors: not divided"
_RESERVED = "reserved, not allocated"
_NOT_OWNERS = (*TORCH_ROWS, "free")


@dataclass(frozen=True)
class TimelinePoint:
    seconds: float  # since the first reading on the rank's host
    phase: str
    edge: str  # before | after


@dataclass(frozen=True)
class StackedOwner:
    """One owner over time, in the order of the moments."""

    name: str
    bytes: list[int | None]
    how: str  # as the last reading has it
    title: str  # the name, in words


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
    owners: list[StackedOwner]  # bottom of the stack first
    in_use: list[int | None]  # device total less free, as read
    bands: list[Band]
    peaks: list[Peak]
    worst_bytes: int | None  # most that all owners were seen to hold
    left_out: int  # readings that are not drawn


class _Reading(NamedTuple):
    t_ns: int
    span: Span
    edge: Edge
    owners: DeviceMemory


def timeline_of(rank: RankReport, start: int) -> Timeline | None:
    """Return the moments with a time and at least one figure; None where there is none."""
    readings = sorted(
        (
            _Reading(edge.snapshot.t_ns, span, edge, edge.owners)
            for span, edge in edges_of(rank.phases)
            if edge.snapshot.t_ns and edge.owners is not None
            if any(row.bytes is not None for row in edge.owners.rows)
        ),
        key=lambda reading: reading.t_ns,
    )
    if not readings:
        return None
    in_use = [reading.edge.snapshot.used_bytes for reading in readings]
    ends = (0, len(readings) - 1)

    def changed(at: int) -> float:
        return inf if at in ends else abs((in_use[at] or 0) - (in_use[at - 1] or 0))

    places = foremost(range(len(readings)), MOST_MOMENTS, changed)
    drawn = [readings[at] for at in places]
    peaks = [peak for span in rank.phases for peak in _heights(span, start)]
    held = [peak.bytes for peak in peaks if peak.what == "in use"]
    return Timeline(
        moments=[
            TimelinePoint((each.t_ns - start) / 1e9, each.span.phase, each.edge.side)
            for each in drawn
        ],
        owners=_owners(rank, drawn),
        in_use=[in_use[at] for at in places],
        bands=_bands(rank, start),
        peaks=_peaks(rank, start),
        worst_bytes=largest(held),
        left_out=len(readings) - len(drawn),
    )


def _owners(rank: RankReport, readings: list[_Reading]) -> list[StackedOwner]:
    """Return the owners over time: tensors by the phase that allocated them, then all others.

    What sleep mode unmapped is off the device, so it is taken off the allocated memory, then off
    the rest of the reserved.
    """
    grown = [
        (span.after.t_ns or 0, _TENSORS[span.phase], size)
        for span in rank.phases
        if span.phase in _TENSORS and span.before is not None and span.after is not None
        if (size := minus(span.after.allocated_bytes, span.before.allocated_bytes) or 0) > 0
    ]
    changed = [span.before for span in rank.phases if span.phase in _TENSORS_CHANGE]
    until = min((at.t_ns or 0 for at in changed if at is not None), default=inf)

    def stack(reading: _Reading) -> dict[str, int | None]:
        rows = reading.owners.by_owner
        here, reserved = rows.get("allocated"), rows.get("reserved_not_allocated")
        unmapped = -(rows.get("unmapped") or 0)
        if unmapped and here is not None and reserved is not None:
            reserved -= max(0, unmapped - here)
            here = max(0, here - unmapped)
        tensors: dict[str, int | None] = {}
        for since, name, size in grown:
            if since <= reading.t_ns:
                tensors[name] = (tensors.get(name) or 0) + size
        known = sum(size or 0 for size in tensors.values())
        if here is None or reading.t_ns > until or known > here:
            tensors = {_UNDIVIDED: here}
        else:
            tensors[_OTHER_TENSORS] = here - known
        return {**tensors, _RESERVED: reserved, **rows}

    stacks = [stack(reading) for reading in readings]
    how = {row.component: row.how for reading in readings for row in reading.owners.rows}
    how |= dict.fromkeys((*_TENSORS.values(), _OTHER_TENSORS), DERIVED)
    how[UNEXPLAINED] = readings[-1].owners.unexplained_how
    names = [*_TENSORS.values(), _OTHER_TENSORS, _UNDIVIDED, _RESERVED]
    names += [name for own in stacks for name in own if name != UNEXPLAINED]
    return [
        StackedOwner(name, sizes, how.get(name, MEASURED), title_in("timeline", name))
        for name in dict.fromkeys((*names, UNEXPLAINED))
        if name not in _NOT_OWNERS and any(sizes := [own.get(name) for own in stacks])
    ]


def _bands(rank: RankReport, start: int) -> list[Band]:
    found = []
    for span in rank.phases:
        begins, ends = _time(span.before), _time(span.after)
        timed = span.seconds is not None or span.phase in MOMENTS
        if begins is None and ends is not None and timed:
            begins = ends - int((span.seconds or 0) * 1e9)
        if begins is not None:
            end = None if ends is None else (ends - start) / 1e9
            found.append(Band(span.phase, span.depth, max(0.0, (begins - start) / 1e9), end))
    kept = foremost(
        found, MOST_BANDS, lambda band: (band.depth == 0, (band.end or inf) - band.start)
    )
    return sorted(kept, key=lambda band: (band.start, band.depth))


def _heights(span: Span, start: int) -> Iterator[Peak]:
    """Yield how much was in use and allocated at the ends of a phase, and at most within it.

    The allocator keeps peaks. Non-torch memory at that moment is not known: as
    ``accounting.budget.serving_peak`` has it, it is the lesser of both ends.
    """
    for edge in span.edges:
        where = text("after {phase}", span) if edge.side == AFTER else text("before {phase}", span)
        at = edge.snapshot
        for what, size in (("in use", at.used_bytes), ("allocated", at.allocated_bytes)):
            if size is not None and at.t_ns:
                yield Peak(what, where, size, (at.t_ns - start) / 1e9, True)
    begins, ends = _time(span.before), _time(span.after)
    if begins is None or ends is None:
        return
    where, seconds = text("in {phase}", span), ((begins + ends) / 2 - start) / 1e9
    reserved, allocated = peak_between(span), peak_between(span, "allocated_run_peak_bytes")
    others = [value(at, "non_torch_bytes") for at in (span.before, span.after)]
    known = only_known(others)
    if reserved is not None and len(known) == 2:
        yield Peak("in use", where, reserved + min(known), seconds, False)
    if allocated is not None:
        yield Peak("allocated", where, allocated, seconds, False)


def _peaks(rank: RankReport, start: int) -> list[Peak]:
    """Return the highest of each kind per outermost phase, above its ends; the steepest few.

    Of nested phases with the same peak within them it is that of the innermost.
    """
    inside: dict[int, list[Span]] = {}
    for span in rank.phases:  # by start: parents come first
        *_, outer = span, *ancestors(rank.phases, span)
        inside.setdefault(outer.order, []).append(span)
    found: list[tuple[int, Peak]] = []
    for spans in inside.values():
        heights = [(peak, span) for span in spans for peak in _heights(span, start)]
        for what in ("in use", "allocated"):
            own = [(peak, span) for peak, span in heights if peak.what == what]
            ends = [peak.bytes for peak, span in own if peak.exact and span is spans[0]]
            if len(ends) == 2:
                best, _ = max(own, key=_height)
                found.append((best.bytes - max(ends), best))
    least = _LEAST_RISE * (rank.device_total_bytes or inf)
    steepest = nlargest(MOST_PEAKS, [entry for entry in found if entry[0] > least], itemgetter(0))
    return sorted((peak for _, peak in steepest), key=lambda peak: peak.seconds)


def _height(entry: tuple[Peak, Span]) -> tuple[int, bool, float]:
    peak, span = entry
    return peak.bytes, peak.exact, -peak.seconds if peak.exact else span.depth


def _time(snapshot: Snapshot | None) -> int | None:
    return None if snapshot is None or not snapshot.t_ns else snapshot.t_ns
