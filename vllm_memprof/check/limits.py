"""The figures that ``memprof check`` can hold a run to, and the keys of a budget file.

A figure is read on every rank, in the quantities of ``accounting.readings.quantities``, so that a
limit means the same under every equation. What is not known has no value and a reason; it is never
0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.readings.quantities import QUANTITIES
from vllm_memprof.record.spans import edges_of
from vllm_memprof.text import Text, text
from vllm_memprof.units import MIB

BYTES, TOKENS, FINDING, STATUS = "bytes", "tokens", "finding", "status"
AT_LEAST, AT_MOST = "at least", "at most"
BUDGET, REGRESSION = "budget", "regression"
#: What a percentage is a percentage of.
OF_BASELINE, OF_LARGEST = "the baseline", "the largest KV cache"
#: What a rank is held against in [regression]: the same rank of the baseline, or its worst one.
SAME_RANK, WORST_RANK = "same rank", "worst rank"


@dataclass(frozen=True)
class LimitReading:
    """One figure of one rank, in the unit of the figure."""

    rank: int | None
    label: str
    value: int | None
    half_unit: int = 0  # half of the last printed digit; 0 from hooks
    reason: str | None = None  # why the value is None
    whole: int | None = None  # what a percentage in [budget] is taken of


@dataclass(frozen=True)
class LimitFigure:
    """A figure that limits are set on."""

    name: str
    title: Text
    unit: str  # bytes | tokens
    value: Callable[[RankReport, bool], int | None]  # of a rank of a run that is simulated or not
    phase: str  # its absence explains the absence of the figure
    #: Of a log: figures that it is made of, the first of these that are known.
    printed: tuple[tuple[str, ...], ...] = ()
    per_rank: bool = True  # False: one figure per group of ranks, the largest less the smallest
    device_wide: bool = False  # modelled where the device is simulated
    varies_bytes: int = 0  # from start to start; a proposed limit leaves at least so much room
    #: Of a rank: why it is not known there; None: for a reason that all figures share.
    why_unknown: Callable[[RankReport], Text | None] | None = None


@dataclass(frozen=True)
class Key:
    """A key of a budget file: the figure it limits, and from which side.

    In ``[regression]`` the limit is what the baseline had, less or plus what is allowed. The KV
    cache is held against the rank of the baseline that had the least, because all ranks serve with
    the least, whichever has it.
    """

    table: str  # budget | regression
    name: str
    figure: str
    sense: str  # at least | at most
    percent_of: str | None = None  # None: a percentage means nothing here
    against: str = WORST_RANK  # same rank | worst rank, of the baseline


def of_quantity(name: str, phase: str, *printed: tuple[str, ...], varies: int = 0) -> LimitFigure:
    """Return the figure of a quantity of ``accounting.readings.quantities``."""
    row = QUANTITIES[name]

    def read(rank: RankReport, simulated: bool) -> int | None:
        return rank.readings[name].bytes

    return LimitFigure(
        name, row.title, BYTES, read, phase, printed, True, row.device_wide, varies_bytes=varies
    )


def _granted(rank: RankReport, simulated: bool) -> int | None:
    return rank.budget.engine_kv_cache_bytes


def _unexplained(rank: RankReport, simulated: bool) -> int | None:
    """Return the largest remainder of all edges, without its sign.

    None where the runtime's counters were not read: a remainder without them may be anybody's.
    """
    if _only_remainder(rank) is not None:
        return None
    sizes = [edge.owners.unexplained_bytes for _, edge in edges_of(rank.phases) if edge.owners]
    return max((abs(size) for size in sizes if size is not None), default=None)


def _only_remainder(rank: RankReport) -> Text | None:
    """Return why what is unexplained cannot be told; None where the owners were read."""
    undivided = any(
        part.component == "other_non_torch"
        for _, edge in edges_of(rank.phases)
        if edge.owners is not None and edge.owners.unexplained_bytes is not None
        for part in edge.owners.remainders()
    )
    if not undivided:
        return None
    return text("only the remainder is known: the runtime's counters were not read")


def _headroom(rank: RankReport, simulated: bool) -> int | None:
    """Known where everything held at the serving peak is: a part would make it too large."""
    whole = all(item.bytes is not None for item in rank.budget.held_at_peak)
    return rank.budget.headroom_bytes if whole else None


_KV_CACHE_BYTES = (("kv_cache_bytes",),)
_VARIES = 16 * MIB
FIGURES: dict[str, LimitFigure] = {
    figure.name: figure
    for figure in (
        LimitFigure(
            "kv_cache",
            text("KV cache"),
            BYTES,
            _granted,
            "profile_run",
            _KV_CACHE_BYTES,
            varies_bytes=_VARIES,
        ),
        LimitFigure(
            "kv_cache_tokens",
            text("KV cache"),
            TOKENS,
            lambda rank, simulated: rank.kv.tokens,
            "profile_run",
        ),
        of_quantity("weights", "weight_load", ("weights_bytes",)),
        of_quantity(
            "peak_activation",
            "profile_run",
            ("peak_activation_bytes",),
            ("profile_after_allocated_peak_bytes", "profile_before_allocated_peak_bytes"),
        ),
        of_quantity(
            "non_torch",
            "profile_run",
            ("non_torch_increase_bytes",),
            ("profile_after_non_torch_bytes", "initial_non_torch_bytes"),
            ("profile_after_non_torch_bytes", "device_total_bytes", "initial_free_bytes"),
            varies=_VARIES,
        ),
        of_quantity("graph", "graph_capture", ("graph_bytes",), varies=_VARIES),
        LimitFigure(
            "unexplained",
            text("unexplained, the most at any moment"),
            BYTES,
            _unexplained,
            "profile_run",
            device_wide=True,
            varies_bytes=_VARIES,
            why_unknown=_only_remainder,
        ),
        LimitFigure(
            "headroom",
            text("headroom at the serving peak"),
            BYTES,
            _headroom,
            "warm_up",
            device_wide=True,
            varies_bytes=_VARIES,
        ),
        LimitFigure(
            "rank_skew",
            text("KV cache, most less least"),
            BYTES,
            _granted,
            "profile_run",
            _KV_CACHE_BYTES,
            per_rank=False,
            varies_bytes=_VARIES,
        ),
    )
}

#: What is granted, what it is made of, what is left.
KEYS: tuple[Key, ...] = (
    Key(BUDGET, "min_kv_cache", "kv_cache", AT_LEAST),
    Key(BUDGET, "min_kv_cache_tokens", "kv_cache_tokens", AT_LEAST),
    Key(BUDGET, "max_weights", "weights", AT_MOST),
    Key(BUDGET, "max_peak_activation", "peak_activation", AT_MOST),
    Key(BUDGET, "max_non_torch", "non_torch", AT_MOST),
    Key(BUDGET, "max_graph", "graph", AT_MOST),
    Key(BUDGET, "max_unexplained", "unexplained", AT_MOST),
    Key(BUDGET, "min_headroom", "headroom", AT_LEAST),
    Key(BUDGET, "max_rank_skew", "rank_skew", AT_MOST, OF_LARGEST),
    Key(REGRESSION, "max_kv_cache_drop", "kv_cache", AT_LEAST, OF_BASELINE),
    Key(REGRESSION, "max_kv_cache_tokens_drop", "kv_cache_tokens", AT_LEAST, OF_BASELINE),
    Key(REGRESSION, "max_weights_growth", "weights", AT_MOST, OF_BASELINE, SAME_RANK),
    Key(
        REGRESSION, "max_peak_activation_growth", "peak_activation", AT_MOST, OF_BASELINE, SAME_RANK
    ),
    Key(REGRESSION, "max_non_torch_growth", "non_torch", AT_MOST, OF_BASELINE, SAME_RANK),
    Key(REGRESSION, "max_graph_growth", "graph", AT_MOST, OF_BASELINE, SAME_RANK),
    Key(REGRESSION, "max_headroom_drop", "headroom", AT_LEAST, OF_BASELINE),
    Key(REGRESSION, "max_rank_skew_growth", "rank_skew", AT_MOST, OF_BASELINE),
)


def figure_of(key: Key) -> LimitFigure:
    """Return the figure that a key limits."""
    return FIGURES[key.figure]


#: The key of [budget] that names findings a run must not have.
FAIL_ON = "fail_on"


def read_figure(report: Report, figure: LimitFigure) -> list[LimitReading]:
    """Read a figure on every rank, or per group of ranks where it compares them; never empty."""
    if not report.ranks:
        return [LimitReading(None, "", None, reason=text("no worker was recorded"))]
    readings = []
    for rank in report.ranks:
        value = figure.value(rank, report.run.simulated)
        reason = _why_unknown(report, rank, figure) if value is None else None
        known = (
            names
            for names in figure.printed
            if value is not None and all(rank.figures.get(name) is not None for name in names)
        )
        half_unit = sum(rank.half_units.get(name, 0) for name in next(known, ()))
        readings.append(LimitReading(rank.rank, rank.label, value, half_unit, reason))
    return readings if figure.per_rank else _spreads(report, readings)


def _why_unknown(report: Report, rank: RankReport, figure: LimitFigure) -> str:
    if (reason := EVIDENCE[report.run.source].no_figure) is not None:
        return reason
    if figure.why_unknown is not None and (reason := figure.why_unknown(rank)) is not None:
        return reason
    for row in report.not_measured:
        if row.phase == figure.phase and (row.labels is None or rank.label in row.labels):
            return text("{phase}: {reason}", phase=row.phase, reason=row.reason)
    if rank.open_phases:
        return text("the rank did not finish {phase}", phase=rank.open_phases[-1])
    reading = rank.readings.get(figure.name)
    if reading is not None and reading.reason is not None:
        return reading.reason
    return text("no record of it, run {status}", status=report.run.status)


def _spreads(report: Report, readings: list[LimitReading]) -> list[LimitReading]:
    """Return the largest less the smallest of ranks that hold the same layers.

    The label is that of the smallest.
    """
    unknown = [reading for reading in readings if reading.value is None]
    if unknown:
        return unknown
    unnamed = any(reading.rank is None for reading in readings)
    if len(readings) > 1 and unnamed:
        return [LimitReading(None, "", None, reason=text("the log does not name its ranks"))]
    groups: dict[tuple[object, ...], list[tuple[int, LimitReading]]] = {}
    for rank, reading in zip(report.ranks, readings, strict=True):
        alike = (rank.group, rank.dp_rank, rank.pp_rank)
        groups.setdefault(alike, []).append((reading.value or 0, reading))
    found = []
    for group in groups.values():
        (low, least), (high, most) = (pick(group, key=lambda pair: pair[0]) for pick in (min, max))
        slack = least.half_unit + most.half_unit if least is not most else 0
        found.append(LimitReading(least.rank, least.label, high - low, slack, whole=high))
    return found
