"""The plots of the page: a ``Report`` enters, plain figures leave: no colours, HTML or rounding.

One ``View`` per group of ranks that agree in print: the device over time by owner, memory while
serving, and the budget from the device's total down to the KV cache. ``Skew`` compares the ranks.
Bytes are integers, None is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from statistics import median_low

from vllm_memprof.accounting.budget.equations import STARTUP_PLAN, divisor_of
from vllm_memprof.accounting.deployment.clock import host_starts
from vllm_memprof.accounting.model import RankReport, Report, RequestRow
from vllm_memprof.accounting.readings.quantities import title_of
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.record.spans import MODELLED, edges_of
from vllm_memprof.report.sections.base import labels_of
from vllm_memprof.report.sections.budget import BUDGET_TITLES, term_title
from vllm_memprof.report.timeline import Timeline, timeline_of
from vllm_memprof.tables import foremost, group_ranks, modelled
from vllm_memprof.text import join, text
from vllm_memprof.units import GIB, Amount, format_gib, minus

#: Groups of ranks that the page shows; of more, those with a least or a most of something.
MOST_VIEWS = 24
#: Bars at most; of more requests those with the highest peaks are drawn.
MOST_BARS = 400


@dataclass(frozen=True)
class WaterfallBar:
    """One bar of the waterfall."""

    title: str
    bytes: int  # signed where it is a change
    kind: str  # level | change


@dataclass(frozen=True)
class ServedCurve:
    """A figure between its lowest and its highest."""

    name: str
    title: str
    low: list[int | None]
    high: list[int | None]


@dataclass(frozen=True)
class RequestBar:
    """One request."""

    id: str
    begin: float  # seconds since the launch
    end: float
    lane: int  # rows of bars that overlap in time, from 0
    peak_bytes: Amount
    exact: bool
    failed: bool


@dataclass(frozen=True)
class ServingMemory:
    """Memory over time of one rank."""

    seconds: list[float]  # since the launch: the end of each stretch, which begins at the last one
    curves: list[ServedCurve]
    bars: list[RequestBar]
    left_out: int  # requests without a bar
    readings: int


@dataclass(frozen=True)
class RankView:
    """A group of ranks that agree in print, drawn with the times of the first."""

    labels: str
    drawn: str  # label of the rank whose times and bytes these are
    ranks: int
    device_total_bytes: Amount
    requested_bytes: Amount
    timeline: Timeline | None
    no_timeline: str | None  # why there is none
    waterfall: list[WaterfallBar]
    no_waterfall: str | None
    serving: ServingMemory | None  # None: the run was not sampled


@dataclass(frozen=True)
class SkewRow:
    """One figure of all ranks that have it."""

    title: str
    least: int
    least_label: str
    most: int
    most_label: str
    median: int  # of the ranks' figures, the lower of the middle two
    bytes: list[int | None]  # by rank

    @property
    def spread(self) -> int:
        return self.most - self.least


@dataclass(frozen=True)
class Plots:
    """What the page draws."""

    views: list[RankView]
    folded: str  # ranks whose view is left out, "" where there are none
    labels: list[str]  # of all ranks
    skew: list[SkewRow]  # empty where there is but one rank

    @property
    def drawn(self) -> bool:
        """Whether something is plotted over time."""
        return any(view.timeline or view.serving for view in self.views)

    @property
    def differing(self) -> list[SkewRow]:
        """The figures in which the ranks differ."""
        return [row for row in self.skew if row.spread]

    def to_json(self) -> dict[str, object]:
        """Return what the page's script draws."""
        names = ("title", "median", "bytes")
        rows = [{name: getattr(row, name) for name in names} for row in self.differing]
        views = [asdict(view) for view in self.views]
        return {"gib": GIB, "views": views, "labels": self.labels, "skew": rows}


def plots(report: Report) -> Plots:
    """Return the figures of every plot."""
    skew = _skew(report)
    groups = group_ranks(report.ranks, _in_print)
    told = {label for row in skew for label in (row.least_label, row.most_label)}
    told |= {rank.label for rank in report.ranks if rank.open_phases or rank.oom}
    first = {id(members) for members in (*groups[:1], *foremost(groups, 1, len))}

    def telling(members: list[RankReport]) -> tuple[bool, bool]:
        """Return whether it is the first or the largest, and whether a rank stands out."""
        return id(members) in first, any(rank.label in told for rank in members)

    shown = foremost(groups, MOST_VIEWS, telling)
    drawn = {rank.label for members in shown for rank in members}
    starts = _starts(report.ranks) if report.deployment is None else host_starts(report)
    return Plots(
        views=[_view(report, members, starts) for members in shown],
        folded=labels_of(rank for rank in report.ranks if rank.label not in drawn),
        labels=[rank.label for rank in report.ranks],
        skew=skew,
    )


def _in_print(rank: RankReport) -> str:
    """Return what two ranks must share to be one view: figures in print, and how far they came."""
    moments = [
        (
            span.phase,
            edge.side,
            *((row.component, format_gib(row.bytes)) for row in edge.owners.rows),
        )
        for span, edge in edges_of(rank.phases)
        if edge.owners is not None
    ]
    budget = rank.budget
    figures = [rank.device_total_bytes, budget.requested_bytes]
    figures += [getattr(budget, name) for name in BUDGET_TITLES]
    figures += [budget.term(term.name) for term in budget.terms]
    figures += [item.bytes for item in budget.not_subtracted]
    served = serving_of(rank)
    curves = [list(map(format_gib, curve.high)) for curve in served.curves] if served else None
    return repr((moments, [*map(format_gib, figures)], rank.open_phases, rank.oom, curves))


def _starts(ranks: Sequence[RankReport]) -> dict[str | None, int]:
    """Host -> the first reading there, ns: clocks of two hosts have nothing in common."""
    starts: dict[str | None, int] = {}
    for rank in ranks:
        for _, edge in edges_of(rank.phases):
            if t_ns := edge.snapshot.t_ns:
                starts[rank.host] = min(t_ns, starts.get(rank.host, t_ns))
    return starts


def _view(report: Report, members: list[RankReport], starts: dict[str | None, int]) -> RankView:
    rank = members[0]
    drawn = timeline_of(rank, starts.get(rank.host, 0))
    why = report.run.evidence.no_times
    unread = why or text("no memory was read on this rank: there is no timeline")
    steps, missing = waterfall(report, rank)
    return RankView(
        labels=labels_of(members),
        drawn=rank.label,
        ranks=len(members),
        device_total_bytes=rank.device_total_bytes,
        requested_bytes=rank.budget.requested_bytes,
        timeline=drawn,
        no_timeline=unread if drawn is None else None,
        waterfall=steps,
        no_waterfall=missing,
        serving=serving_of(rank),
    )


def waterfall(report: Report, rank: RankReport) -> tuple[list[WaterfallBar], str | None]:
    """Return the budget as levels and the changes between them; or no steps, and why.

    Every level but the first is the sum of the steps before it. What the equation does besides
    subtracting its terms (rounding, halving, clamping) is a step of its own.
    """
    budget = rank.budget
    granted, computed = budget.engine_kv_cache_bytes, budget.kv_cache_bytes
    asked = budget.requested_bytes
    if granted is None and computed is None:
        return [], text("no KV cache was sized: there is no waterfall")
    terms = {} if budget.override else budget.subtracted
    unknown: list[str] = [text("requested")] if asked is None else []
    unknown += [term_title(report, name) for name, size in terms.items() if size is None]
    if asked is None or unknown:
        return [], text("not drawn, unknown: {titles}", titles=join(", ", unknown))
    charged = [(term_title(report, name), size or 0) for name, size in terms.items()]
    beside = [
        (modelled(item.title, item.how == MODELLED), item.bytes)
        for item in budget.not_subtracted
        if item.bytes
    ]
    other = text("other steps of the equation")
    if budget.override == STARTUP_PLAN:
        other = text("fixed by a start-up plan, profiling skipped")
    elif budget.override:
        other = text("fixed by --{option}", option=budget.override.replace("_", "-"))
    residual = text("engine - recomputed")
    if computed is None:
        residual = text("subtracted, no equation known")
    divided = divisor_of(budget.equation) != 1
    rounded = title_of("halved") if divided else text("rounding")
    #: Title of a level, its bytes, what else leads to it, and the changes before that.
    levels: tuple[tuple[str, int | None, str, list[tuple[str, int]]], ...] = (
        (text("device total"), rank.device_total_bytes, "", []),
        (text("requested"), asked, text("outside requested memory"), []),
        ("", asked - sum(size for _, size in charged), "", charged),
        ("", computed, other, []),
        (text("KV cache"), computed if granted is None else granted, residual, []),
        (BUDGET_TITLES["fits_request_bytes"], budget.fits_request_bytes, rounded, beside),
    )
    bars: list[WaterfallBar] = []
    height: int | None = None
    for title, level, rest, changes in levels:
        if level is None:
            continue
        for name, size in changes:
            bars.append(WaterfallBar(name, -size, "change"))
            height = minus(height, size)
        if height is not None and height != level:
            bars.append(WaterfallBar(rest, level - height, "change"))
        height = level
        if title:
            bars.append(WaterfallBar(title, level, "level"))
    return bars, None


def _skew(report: Report) -> list[SkewRow]:
    """Return figures by rank; of engine groups with budgets of their own, group by group."""
    groups = [None] if report.deployment is None else report.deployment.groups
    rows = []
    for group in groups:
        ranks = [rank for rank in report.ranks if len(groups) < 2 or rank.group == group]
        terms = dict.fromkeys(term.name for rank in ranks for term in rank.budget.terms)
        figures: list[tuple[str, list[int | None]]] = [
            (title_of(name), [rank.budget.term(name) for rank in ranks]) for name in terms
        ]
        figures += [
            (title, [getattr(rank.budget, name) for rank in ranks])
            for name, title in BUDGET_TITLES.items()
            if name != "kv_cache_bytes"
        ]
        figures.append((text("free at the start"), [rank.initial_free_bytes for rank in ranks]))
        for title, sizes in figures:
            own = {rank.label: size for rank, size in zip(ranks, sizes, strict=True)}
            known = [(size, label) for label, size in own.items() if size is not None]
            if known and len(ranks) > 1:
                if len(groups) > 1:
                    title = text("{group}: {title}", group=group or "-", title=title)
                middle = median_low(size for size, _ in known)
                least, most = (end(known, key=itemgetter(0)) for end in (min, max))
                every = [own.get(rank.label) for rank in report.ranks]
                rows.append(SkewRow(title, *least, *most, middle, every))
    return rows


def serving_of(rank: RankReport) -> ServingMemory | None:
    """Return memory over time of a rank; None where it was not sampled."""
    points = [point for point in rank.samples if point.readings]
    if not points:
        return None
    timed = [row for row in rank.requests if row.begin_seconds is not None]
    drawn = foremost(timed, MOST_BARS, lambda row: row.allocated_peak_bytes or 0)
    return ServingMemory(
        seconds=[point.end_seconds for point in points],
        curves=[
            ServedCurve(
                name,
                title,
                [point.low.get(name) for point in points],
                [point.high.get(name) for point in points],
            )
            for name, title in TITLES["curves"].items()
            if any(name in point.high for point in points)
        ],
        bars=_bars(drawn),
        left_out=len(rank.requests) - len(drawn),
        readings=sum(point.readings for point in points),
    )


def _bars(rows: list[RequestRow]) -> list[RequestBar]:
    """Return requests as bars; those that overlap in time lie in lanes of their own."""
    bars, free_at = [], list[float]()  # by lane
    for row in sorted(rows, key=lambda row: row.begin_seconds or 0.0):
        begin = row.begin_seconds or 0.0
        end = begin if row.end_seconds is None else row.end_seconds
        lane = next((at for at, free in enumerate(free_at) if free <= begin), len(free_at))
        free_at[lane : lane + 1] = [end]
        exact, failed = row.peak_exact, row.finished is False
        bars.append(RequestBar(row.id, begin, end, lane, row.allocated_peak_bytes, exact, failed))
    return bars
