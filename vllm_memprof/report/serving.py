"""Memory while serving, for the page: curves between their lowest and highest, requests as bars.

A ``RankReport`` enters, plain figures leave. Bytes are integers; None is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_memprof.accounting.model import RankReport, RequestRow
from vllm_memprof.text import text

#: Bars at most; of more requests those with the highest peaks are drawn.
MOST_BARS = 400
#: Figure of a point -> title of its curve.
CURVES = {
    "reserved_bytes": text("reserved"),
    "allocated_bytes": text("allocated"),
}


@dataclass(frozen=True)
class ServedCurve:
    name: str
    title: str
    low: list[int | None]
    high: list[int | None]


@dataclass(frozen=True)
class Bar:
    """One request."""

    id: str
    begin: float  # seconds since the launch
    end: float
    lane: int  # rows of bars that overlap in time, from 0
    peak_bytes: int | None
    exact: bool
    failed: bool


@dataclass(frozen=True)
class ServingMemory:
    """Memory over time of one rank."""

    seconds: list[float]  # since the launch: the end of each stretch, which begins at the last one
    curves: list[ServedCurve]
    bars: list[Bar]
    left_out: int  # requests without a bar
    readings: int


def serving_of(rank: RankReport) -> ServingMemory | None:
    """Return memory over time of a rank; None where it was not sampled."""
    points = [point for point in rank.samples if point.readings]
    if not points:
        return None
    curves = [
        ServedCurve(
            name,
            title,
            [point.low.get(name) for point in points],
            [point.high.get(name) for point in points],
        )
        for name, title in CURVES.items()
        if any(name in point.high for point in points)
    ]
    timed = [row for row in rank.requests if row.begin_seconds is not None]
    drawn = sorted(timed, key=lambda row: -(row.allocated_peak_bytes or 0))[:MOST_BARS]
    return ServingMemory(
        seconds=[point.end_seconds for point in points],
        curves=curves,
        bars=_bars(sorted(drawn, key=lambda row: row.begin_seconds or 0.0)),
        left_out=len(rank.requests) - len(drawn),
        readings=sum(point.readings for point in points),
    )


def _bars(rows: list[RequestRow]) -> list[Bar]:
    free_at: list[float] = []  # by lane
    bars = []
    for row in rows:
        begin = row.begin_seconds or 0.0
        end = begin if row.end_seconds is None else row.end_seconds
        lane = next((i for i, free in enumerate(free_at) if free <= begin), len(free_at))
        if lane == len(free_at):
            free_at.append(end)
        free_at[lane] = end
        failed = row.finished is False
        bars.append(Bar(row.id, begin, end, lane, row.allocated_peak_bytes, row.peak_exact, failed))
    return bars
