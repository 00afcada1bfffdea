"""Phases x memory, before and after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median_high

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.document import BAD, PLAIN, Section
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span
from vllm_memprof.report.sections.base import Sheet, draw, labels_of
from vllm_memprof.tables import (
    LABELS,
    PHASE_COLUMNS,
    SECONDS,
    SHOWN_GROUPS,
    Column,
    Folded,
    fold_rows,
    foremost,
    merged_order,
)
from vllm_memprof.text import Text, fold, text
from vllm_memprof.units import GIB, format_gib, only_known, sum_or_none

#: Passages through the same place that are still listed one by one.
_LISTED_PASSAGES = 8
#: Ranks, or ranges of them, that a row names.
_LISTED_RANKS = 4

_PhaseKey = tuple[str | int, ...]  # names from the outermost phase inwards, and a count


@dataclass(frozen=True)
class Passage:
    """One or several passages of one rank through a phase, as one row shows them."""

    name: str
    indent: int
    seconds: float | None
    before: Snapshot | None
    after: Snapshot | None
    open: bool

    def edges(self, name: str) -> list[int | None]:
        """Return a reading before and after."""
        return [None if at is None else getattr(at, name) for at in (self.before, self.after)]


def phases(sheet: Sheet) -> Iterator[Section]:
    """Return phases x memory, before and after, in the order in which they occurred.

    Ranks that print alike share a row. Few logs name a phase.
    """
    report, evidence = sheet.report, sheet.evidence
    snapshots = only_known(row.after for rank in report.ranks for row in rank.phases)
    peaks = [each.reserved_peak_bytes or each.reserved_bytes or 0 for each in snapshots]
    # 2 as in the engine's log; 4 where a whole run stays below 1 GiB of torch memory
    digits = 4 if 0 < max(peaks, default=0) < GIB else 2
    per_rank = {rank.label: passages_of(rank) for rank in report.ranks}
    everyone = fold(list(per_rank))
    fields = [column for column in PHASE_COLUMNS if column.shown([], sheet.wide)]

    def short(labels: str) -> str:
        parts = labels.split(", ")
        if len(parts) <= _LISTED_RANKS:
            return labels
        return ", ".join([*parts[: _LISTED_RANKS - 1], "..."])

    def columns(ranks: bool) -> list[Column]:
        arrow = "→" if ranks and not sheet.wide else " → "  # no room is left for blanks

        def edges(sizes: list[int | None]) -> str:
            known = sizes != [None, None]
            return arrow.join(format_gib(size, digits) for size in sizes) if known else "-"

        return [
            Column("Phase", "name"),
            Column("Rank", LABELS, short, when=ranks, right=False),
            Column(
                "s",
                lambda passage: inf if passage.open else passage.seconds,
                lambda seconds: text("open") if seconds == inf else SECONDS(seconds),
                when=evidence.no_times is None,
                compared=False,
            ),
            Column("", "open", when=False),
            *(
                replace(each, value=partial(Passage.edges, name=str(each.value)), unit=edges)
                for each in fields
            ),
        ]

    rows: list[Folded] = []
    hidden = False
    for key in merged_order(*per_rank.values()):
        passages = {label: [own[key]] for label, own in per_rank.items() if key in own}
        groups = fold_rows(columns(False), passages)
        rows += _extremes(groups, [str(column.value) for column in fields])
        hidden |= len(groups) > SHOWN_GROUPS
    if evidence.partial and not rows:
        return
    several = any(fold(row.labels) != everyone for row in rows)
    figures = {
        "labels": everyone and not several and labels_of(report.ranks),
        "no_ranks": not report.ranks,
        "timed": len(report.ranks) > 1 and evidence.no_times is None,
        "most": SHOWN_GROUPS if hidden else None,
    }
    style = {True: BAD, False: PLAIN}
    yield draw(
        sheet,
        "phases",
        rows,
        figures,
        _notes(report),
        lambda row: style[row.open],
        columns=columns(several),
    )


def _extremes(groups: list[Folded], names: list[str]) -> list[Folded]:
    """Return the groups that are shown: the largest, and those farthest from the median."""
    readings: dict[int, list[int | None]] = {
        id(group): [size for name in names for size in group.rows[0].edges(name)]
        for group in groups
    }
    every = [readings[id(group)] for group in groups for _ in group.labels]
    middle: list[int | None] = []
    for column in zip(*every, strict=True):
        known = only_known(column)
        middle.append(median_high(known) if known else None)
    largest = max(groups, key=lambda group: len(group.labels))

    def distance(group: Folded) -> float:
        """Return the bytes by which a figure differs most; inf for an open or a missing one."""
        pairs = list(zip(readings[id(group)], middle, strict=True))
        missing = any((size is None) != (usual is None) for size, usual in pairs)
        if group is largest or group.rows[0].open or missing:
            return inf
        return max(abs((size or 0) - (usual or 0)) for size, usual in pairs)

    return foremost(groups, SHOWN_GROUPS, distance)


def _notes(report: Report) -> Iterator[str]:
    running = report.run.status == "running"
    told: dict[Text, dict[str, RankReport]] = {}
    for rank in report.ranks:
        notes = [text("memprof's hook failed, {error}", error=error) for error in rank.errors]
        inner = {row.parent: row.error for row in rank.phases if row.error}
        raised = [
            text("{phase} raised {error}", row)
            for row in rank.phases
            if row.error and inner.get(row.order) != row.error  # where it began
        ]
        under_way = " > ".join(rank.open_phases)
        if under_way and running:
            raised.insert(0, text("{phases} was under way", phases=under_way))
        elif under_way:
            raised.insert(0, text("{phases} was not finished", phases=under_way))
        for note in [*raised, *notes]:
            told.setdefault(note, {})[rank.label] = rank
    for note, ranks in told.items():
        yield text("{labels}: {note}", labels=labels_of(ranks.values()), note=note)
    gaps: dict[tuple[str, str], list[str]] = {}
    for gap in report.not_measured:
        gaps.setdefault((fold(gap.labels or []), gap.reason), []).append(gap.phase)
    for (labels, reason), names in gaps.items():
        note = text("NOT MEASURED: {what} ({reason})", what=", ".join(names), reason=reason)
        yield text("{labels}: {note}", labels=labels, note=note) if labels else note


def passages_of(rank: RankReport) -> dict[_PhaseKey, Passage]:
    """Return a rank's phases by start; many of a kind in the same place become one."""
    paths: dict[int | None, _PhaseKey] = {None: ()}
    places: dict[_PhaseKey, list[Span]] = {}
    for span in rank.phases:  # parents come first
        paths[span.order] = (*paths[span.parent], span.name)
        places.setdefault(paths[span.order], []).append(span)
    found: list[tuple[int, _PhaseKey, Passage]] = []
    for path, spans in places.items():
        ended = [span for span in spans if not span.open]
        bundles = [[span] for span in spans]
        if len(ended) > _LISTED_PASSAGES:
            bundles = [ended, *([span] for span in spans if span.open)]
        for number, bundle in enumerate(bundles):
            first, last = bundle[0], bundle[-1]
            passage = Passage(
                name=f"{first.name} x{len(bundle)}" if len(bundle) > 1 else first.name,
                indent=first.depth,
                seconds=sum_or_none(span.seconds for span in bundle),
                before=first.before,
                after=last.after,
                open=last.open,
            )
            found.append((first.order, (*path, number), passage))
    return {key: passage for _, key, passage in sorted(found, key=lambda entry: entry[0])}
