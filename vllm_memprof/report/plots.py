"""The plots of the page: a ``Report`` enters, plain figures leave: no colours, HTML or rounding.

One ``View`` per group of ranks that agree in print: the device over time by owner, and the budget
from the device's total down to the KV cache. ``Skew`` compares the ranks. Bytes are integers, None
is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

from vllm_memprof.accounting.budget.equations import STARTUP_PLAN, divisor_of
from vllm_memprof.accounting.deployment.clock import host_starts
from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.model import MODELLED, RankReport, Report
from vllm_memprof.accounting.readings.quantities import title_of
from vllm_memprof.record.spans import edges_of
from vllm_memprof.report.sections.budget import term_title
from vllm_memprof.report.serving import ServingMemory, serving_of
from vllm_memprof.report.timeline import Timeline, timeline_of
from vllm_memprof.tables import group_ranks, labels_of, modelled
from vllm_memprof.text import join, text
from vllm_memprof.units import GIB, format_gib

#: Groups of ranks that the page shows; of more, those with a least or a most of something.
MOST_VIEWS = 24


@dataclass(frozen=True)
class WaterfallBar:
    """One bar of the waterfall."""

    title: str
    bytes: int  # signed where it is a change
    kind: str  # level | change


@dataclass(frozen=True)
class RankView:
    """A group of ranks that agree in print, drawn with the times of the first."""

    labels: str
    drawn: str  # label of the rank whose times and bytes these are
    ranks: int
    device_total_bytes: int | None
    requested_bytes: int | None
    timeline: Timeline | None
    no_timeline: str | None  # why there is none
    waterfall: list[WaterfallBar]
    no_waterfall: str | None
    serving: ServingMemory | None = None  # None: the run was not sampled


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
    views: list[RankView]
    folded: str  # ranks whose view is left out, "" where there are none
    labels: list[str]  # of all ranks
    skew: list[SkewRow] = field(default_factory=list)  # empty where there is but one rank

    def to_json(self) -> dict[str, object]:
        """Return what the page's script draws; rows of the skew only where the ranks differ."""
        rows = [
            {"title": row.title, "median": row.median, "bytes": row.bytes}
            for row in self.skew
            if row.spread
        ]
        views = [asdict(view) for view in self.views]
        return {"gib": GIB, "views": views, "labels": self.labels, "skew": rows}


def plots(report: Report) -> Plots:
    """Return the figures of every plot."""
    skew = _skew(report)
    groups = group_ranks(report.ranks, _in_print)
    shown = _extremes(groups, skew) if len(groups) > MOST_VIEWS else groups
    drawn = {rank.label for members in shown for rank in members}
    starts = _starts(report.ranks) if report.deployment is None else host_starts(report)
    return Plots(
        views=[_view(report, members, starts) for members in shown],
        folded=labels_of(rank for rank in report.ranks if rank.label not in drawn),
        labels=[rank.label for rank in report.ranks],
        skew=skew,
    )


def _skew(report: Report) -> list[SkewRow]:
    """Return figures by rank; of engine groups with budgets of their own, group by group."""
    names = [None] if report.deployment is None else report.deployment.groups
    if len(names) < 2:
        return skew_rows(report.ranks)
    rows = []
    for name in names:
        members = [rank for rank in report.ranks if rank.group == name]
        for row in skew_rows(members):
            sizes = iter(row.bytes)
            every = [next(sizes) if rank.group == name else None for rank in report.ranks]
            title = text("{group}: {title}", group=name or "-", title=row.title)
            rows.append(replace(row, title=title, bytes=every))
    return rows


def _in_print(rank: RankReport) -> tuple[object, ...]:
    """Return what two ranks must share to be one view: figures in print, and how far they came."""
    moments = tuple(
        (
            span.phase,
            edge.side,
            *[(row.component, format_gib(row.bytes)) for row in edge.owners.rows],
        )
        for span, edge in edges_of(rank.phases)
        if edge.owners is not None
    )
    budget = rank.budget
    figures = [rank.device_total_bytes, budget.requested_bytes, budget.engine_kv_cache_bytes]
    figures += [
        budget.fits_request_bytes,
        budget.fits_device_bytes,
        budget.headroom_bytes,
        *(term.bytes for term in budget.terms),
    ]
    figures += [item.bytes for item in budget.not_subtracted]
    served = serving_of(rank)
    drawn = (
        None if served is None else [(c.name, [*map(format_gib, c.high)]) for c in served.curves]
    )
    ended = tuple(rank.open_phases), repr(rank.oom), repr(drawn)
    return moments, tuple(map(format_gib, figures)), *ended


def _extremes(groups: list[list[RankReport]], skew: list[SkewRow]) -> list[list[RankReport]]:
    """Return the first group, the largest, the unfinished, and those with a least or a most."""
    wanted = {label for row in skew for label in (row.least_label, row.most_label)}
    wanted |= {rank.label for members in groups for rank in members if rank.open_phases or rank.oom}
    largest = max(groups, key=len)
    ranked = sorted(
        groups,
        key=lambda members: (
            members is not groups[0] and members is not largest,
            not any(rank.label in wanted for rank in members),
        ),
    )
    kept = ranked[:MOST_VIEWS]
    return [members for members in groups if any(members is other for other in kept)]


def _starts(ranks: Iterable[RankReport]) -> dict[str | None, int]:
    """Host -> the first reading there, ns: clocks of two hosts have nothing in common."""
    starts: dict[str | None, int] = {}
    for rank in ranks:
        for row in rank.phases:
            for snapshot in (row.before, row.after):
                if snapshot is not None and snapshot.t_ns:
                    starts[rank.host] = min(snapshot.t_ns, starts.get(rank.host, snapshot.t_ns))
    return starts


def _view(report: Report, members: list[RankReport], starts: dict[str | None, int]) -> RankView:
    rank = members[0]
    drawn = timeline_of(rank, starts.get(rank.host, 0))
    why = EVIDENCE[report.run.source].no_times
    if drawn is not None:
        why = None
    elif why is None:
        why = text("no memory was read on this rank: there is no timeline")
    steps, missing = waterfall(report, rank)
    return RankView(
        labels=labels_of(members),
        drawn=rank.label,
        ranks=len(members),
        device_total_bytes=rank.device_total_bytes,
        requested_bytes=rank.budget.requested_bytes,
        timeline=drawn,
        no_timeline=why,
        waterfall=steps,
        no_waterfall=missing,
        serving=serving_of(rank),
    )


# --- from the device's total to the KV cache


def waterfall(report: Report, rank: RankReport) -> tuple[list[WaterfallBar], str | None]:
    """Return the budget as levels and the changes between them; or no steps, and why.

    Every level but the first is the sum of the steps before it. What the equation does besides
    subtracting its terms (rounding, halving, clamping) is a step of its own.
    """
    budget = rank.budget
    granted = budget.engine_kv_cache_bytes
    if granted is None and budget.kv_cache_bytes is None:
        return [], text("no KV cache was sized: there is no waterfall")
    asked = budget.requested_bytes
    charged = [] if budget.override else [term for term in budget.terms if term.subtracted]
    unknown = [term_title(report, term) for term in charged if term.bytes is None]
    if asked is None:
        unknown = [text("requested"), *unknown]
    if unknown:
        return [], text("not drawn, unknown: {titles}", titles=join(", ", unknown))
    assert asked is not None
    steps = []
    if rank.device_total_bytes is not None:
        steps.append(WaterfallBar(text("device total"), rank.device_total_bytes, "level"))
        steps += _change(text("outside the request"), asked - rank.device_total_bytes)
    steps.append(WaterfallBar(text("requested"), asked, "level"))
    level = asked
    for term in charged:
        assert term.bytes is not None
        steps.append(WaterfallBar(term_title(report, term), -term.bytes, "change"))
        level -= term.bytes
    computed = budget.kv_cache_bytes
    if computed is not None:
        other = text("other steps of the equation")
        if budget.override == STARTUP_PLAN:
            other = text("fixed by a start-up plan, profiling skipped")
        elif budget.override:
            other = text("fixed by --{option}", option=budget.override.replace("_", "-"))
        steps += _change(other, computed - level)
        level = computed
    if granted is not None:
        steps += _change(
            text("granted - recomputed")
            if computed is not None
            else text("subtracted, no equation known"),
            granted - level,
        )
        level = granted
    steps.append(WaterfallBar(text("KV cache"), level, "level"))
    if budget.fits_request_bytes is not None:
        for item in budget.not_subtracted:
            if item.bytes:
                title = modelled(item.title, item.how == MODELLED)
                steps.append(WaterfallBar(title, -item.bytes, "change"))
                level -= item.bytes
        divided = divisor_of(budget.equation) != 1
        rest = title_of("halved") if divided else text("rounding")
        steps += _change(rest, budget.fits_request_bytes - level)
        steps.append(
            WaterfallBar(text("KV cache that fits the request"), budget.fits_request_bytes, "level")
        )
    return steps, None


def _change(title: str, size: int) -> list[WaterfallBar]:
    return [WaterfallBar(title, size, "change")] if size else []


# --- ranks beside each other


def skew_rows(ranks: Sequence[RankReport]) -> list[SkewRow]:
    """Return figures by rank; nothing where there is but one rank."""
    if len(ranks) < 2:
        return []
    terms = dict.fromkeys(term.name for rank in ranks for term in rank.budget.terms)
    figures: list[tuple[str, list[int | None]]] = [
        (title_of(name), [rank.budget.term(name) for rank in ranks]) for name in terms
    ]
    figures += [
        (
            text("KV cache granted by the engine"),
            [rank.budget.engine_kv_cache_bytes for rank in ranks],
        ),
        (
            text("KV cache that fits the request"),
            [rank.budget.fits_request_bytes for rank in ranks],
        ),
        (
            text("KV cache that fits the device"),
            [rank.budget.fits_device_bytes for rank in ranks],
        ),
        (text("free at the start"), [rank.initial_free_bytes for rank in ranks]),
        (text("headroom at the serving peak"), [rank.budget.headroom_bytes for rank in ranks]),
    ]
    rows = []
    for title, sizes in figures:
        known = sorted((size, i) for i, size in enumerate(sizes) if size is not None)
        if known:
            (least, first), (most, _) = known[0], known[-1]
            last = next(i for size, i in known if size == most)
            middle = known[(len(known) - 1) // 2][0]
            rows.append(
                SkewRow(title, least, ranks[first].label, most, ranks[last].label, middle, sizes)
            )
    return rows
