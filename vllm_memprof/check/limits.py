"""The figures that ``memprof check`` can hold a run to, and the keys of a budget file.

``limits.toml`` has the rows. A figure is read on every rank, in the quantities of
``accounting.readings.quantities``, so that a limit means the same under every equation. What is not
known has no value and a reason; it is never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vllm_memprof.accounting.model import RankReport, Reading, Report
from vllm_memprof.accounting.readings.quantities import QUANTITIES
from vllm_memprof.files import read_own
from vllm_memprof.record.codec import computed
from vllm_memprof.record.spans import edges_of
from vllm_memprof.tables import group_ranks
from vllm_memprof.text import Text, text, titled
from vllm_memprof.units import Amount, largest, minus

BYTES, TOKENS, FINDING, STATUS = "bytes", "tokens", "finding", "status"
AT_LEAST = "at least"
BUDGET, REGRESSION = "budget", "regression"


@dataclass(frozen=True)
class LimitReading:
    """One rank, or a group of ranks that a figure compares, under one limit, in its unit."""

    rank: int | None
    label: str
    value: int | None  # None: not measured
    half_unit: int = 0  # of the printed digits: of the figure, and of the baseline's
    reason: str | None = None  # why value or limit is None; of a finding, its title
    whole: Amount = None  # what a percentage in [budget] is taken of
    limit: Amount = None  # None: not known, as the baseline does not have the figure
    ok: bool = False
    baseline: Amount = None
    margin: Amount = None  # what is left to the limit; negative: over it by so much

    @property
    @computed
    def within_digits(self) -> bool:
        """True where the figure before its rounding may lie on the other side of the limit."""
        return self.margin is not None and -self.half_unit <= self.margin < self.half_unit


class LimitFigure(NamedTuple):
    """A figure that limits are set on; ``limits.toml`` says what its fields are."""

    title: Text
    read: Callable[[RankReport], Reading]
    phase: str
    unit: str = BYTES
    printed: tuple[tuple[str, ...], ...] = ()
    per_rank: bool = True
    device_wide: bool = False
    varies_bytes: int = 0


class LimitKey(NamedTuple):
    """A key of a budget file: the figure it limits, and from which side."""

    table: str  # budget | regression
    name: str
    figure: LimitFigure
    sense: str  # at least | at most
    percent_of: str | None = None  # None: a percentage means nothing here
    same_rank: bool = False  # held against that rank of the baseline, not its worst one


def _granted(rank: RankReport) -> Reading:
    return Reading(rank.budget.engine_kv_cache_bytes)


def _unexplained(rank: RankReport) -> Reading:
    """Read the largest remainder of all edges, without its sign.

    Nothing where the runtime's counters were not read: a remainder without them may be anybody's.
    """
    divided = [
        edge.owners
        for _, edge in edges_of(rank.phases)
        if edge.owners is not None and edge.owners.unexplained_bytes is not None
    ]
    parts = [part.component for owners in divided for part in owners.remainders()]
    if "other_non_torch" in parts:
        reason = text("only the remainder is known: the runtime's counters were not read")
        return Reading(None, reason=reason)
    return Reading(largest(abs(owners.unexplained_bytes or 0) for owners in divided))


_READ: dict[str, Callable[[RankReport], Reading]] = {
    "kv_cache": _granted,
    "kv_cache_tokens": lambda rank: Reading(rank.kv.tokens),
    "unexplained": _unexplained,
    # known where everything held at the serving peak is: a part would make it too large
    "headroom": lambda rank: Reading(
        rank.budget.headroom_bytes
        if all(item.bytes is not None for item in rank.budget.held_at_peak)
        else None
    ),
    "rank_skew": _granted,
    "host": lambda rank: Reading(rank.host_memory.of("")),
    "pinned": lambda rank: Reading(rank.host_memory.of("pinned:")),
    "shm": lambda rank: Reading(rank.host_memory.of("shm:")),
}


def limit_figure(name: str, row: Mapping[str, Any]) -> LimitFigure:
    """Return the figure of a row of ``limits.toml``: one of the above, or a quantity."""
    own = dict(row)
    if (quantity := QUANTITIES.get(name)) is not None:
        own |= {"title": quantity.title, "device_wide": quantity.device_wide}
    own["title"] = titled(own["title"])
    return LimitFigure(read=_READ.get(name, lambda rank: rank.readings[name]), **own)


_TABLE = read_own(__file__, "limits.toml")
FIGURES = {name: limit_figure(name, row) for name, row in _TABLE["figures"].items()}
KEYS = tuple(
    LimitKey(table, name, **{**row, "figure": FIGURES[row["figure"]]})
    for table, rows in _TABLE["keys"].items()
    for name, row in rows.items()
)
#: What differs between runs and bears on no figure.
NO_WEIGHT: dict[str, tuple[str, ...]] = _TABLE["no_weight"]
#: Findings that a proposed file forbids, less those that its run has.
PROPOSED: tuple[str, ...] = _TABLE["proposed"]["fail_on"]
#: The key of [budget] that names findings a run must not have.
FAIL_ON = "fail_on"


def read_figure(report: Report, figure: LimitFigure) -> list[LimitReading]:
    """Read a figure on every rank, or per group of ranks where it compares them; never empty."""
    if not report.ranks:
        return [LimitReading(None, "", None, reason=text("no worker was recorded"))]
    readings, no_figure = [], report.run.evidence.no_figure
    for rank in report.ranks:
        read = figure.read(rank)
        printed = {name for name, size in rank.figures.items() if size is not None}
        known = (names for names in figure.printed if printed.issuperset(names))
        half_unit = rank.rounding(*next(known, ()))
        reason = None
        if read.bytes is None:
            gap = next(
                (
                    text("{phase}: {reason}", row)
                    for row in report.not_measured
                    if row.phase == figure.phase
                    and (row.labels is None or rank.label in row.labels)
                ),
                None,
            )
            open_ = rank.open_phases
            left = text("the rank did not finish {phase}", phase=open_[-1]) if open_ else None
            unread = read.reason or text("no record of it, run {status}", report.run)
            reason = no_figure or gap or left or unread
        readings.append(LimitReading(rank.rank, rank.label, read.bytes, half_unit, reason))
    return readings if figure.per_rank else _spreads(report, readings)


def _spreads(report: Report, readings: list[LimitReading]) -> list[LimitReading]:
    """Return the largest less the smallest of ranks that hold the same layers.

    The label is that of the smallest.
    """
    if unknown := [reading for reading in readings if reading.value is None]:
        return unknown
    if len(readings) > 1 and any(reading.rank is None for reading in readings):
        return [LimitReading(None, "", None, reason=text("the log does not name its ranks"))]
    found = []
    ranked = zip(report.ranks, readings, strict=True)
    for group in group_ranks(ranked, lambda own: (own[0].group, own[0].dp_rank, own[0].pp_rank)):
        ordered = sorted((each for _, each in group), key=lambda each: each.value or 0)
        least, most = ordered[0], ordered[-1]
        spread = minus(most.value, least.value)
        slack = least.half_unit + most.half_unit if spread else 0
        found.append(replace(least, value=spread, half_unit=slack, whole=most.value))
    return found
