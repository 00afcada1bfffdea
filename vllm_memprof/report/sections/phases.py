"""Phases x memory, before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.model import NotMeasured, RankReport, Report
from vllm_memprof.document import BAD, MUTED, NOT_MEASURED, PLAIN, Row, Section
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span
from vllm_memprof.tables import (
    LABELS,
    PHASE_COLUMNS,
    SECONDS,
    SHOWN_GROUPS,
    Column,
    Folded,
    fold,
    fold_rows,
    group_ranks,
    labels_of,
    printed_gib,
    table,
)
from vllm_memprof.text import Text, text
from vllm_memprof.units import GIB

#: Passages of the same phase in a row that are still listed one by one.
_LISTED_PASSAGES = 8
#: Ranks, or ranges of them, that a row names.
_LISTED_RANKS = 4

_PhaseKey = tuple[str, ...]  # names from the outermost phase inwards, each with its count


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


def phase_section(report: Report, wide: bool) -> Section:
    """Return phases x memory, before and after, in the order in which they occurred.

    Ranks that print alike share a row.
    """
    evidence = EVIDENCE[report.run.source]
    digits = _digits(report)
    per_rank = {rank.label: passages_of(rank) for rank in report.ranks}
    everyone = fold(list(per_rank))
    fields = [column for column in PHASE_COLUMNS if column.shown([], wide)]

    def columns(ranks: bool) -> list[Column]:
        arrow = "→" if ranks and not wide else " → "  # with the ranks no room is left for blanks

        def edges(sizes: list[int | None]) -> str:
            if sizes == [None, None]:
                return "-"
            return arrow.join(printed_gib(size, digits) for size in sizes)

        return [
            Column("Phase", "name"),
            Column("Rank", LABELS, _short, when=ranks, right=False),
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
    for key in _merged_order(list(per_rank.values())):
        passages = {label: [own[key]] for label, own in per_rank.items() if key in own}
        groups = fold_rows(columns(False), passages)
        shown = _extremes(groups, [str(column.value) for column in fields])
        hidden |= len(shown) < len(groups)
        rows += shown
    gaps: dict[str, list[str]] = {}
    for gap in (
        [] if evidence.partial else report.not_measured
    ):  # few logs print a moment: a note has the others
        labels = list(per_rank) if gap.labels is None else gap.labels
        gaps.setdefault(gap.phase, []).extend(labels)
    unread = {
        phase: fold([label for label in per_rank if label in lacking])
        for phase, lacking in gaps.items()
    }
    told = {*(fold(row.labels) for row in rows), *unread.values()}
    several = bool(told - {everyone})
    title = text("Phases, GiB before → after")
    if not several and len(report.ranks) == 1:
        title = text("Phases, GiB before → after, {labels}", labels=labels_of(report.ranks))
    elif not several and everyone:
        title = text("Phases, GiB before → after, {labels} alike", labels=everyone)
    notes = _phase_notes(report)
    if hidden:
        notes.append(
            text(
                "of more than {count} groups of ranks, the largest and those that differ most from "
                "the median; report.json has every rank",
                count=SHOWN_GROUPS,
            )
        )
    blank = [""] * (len(fields) - 1)
    lines = [
        Row([phase, *([_short(ranks)] if several else []), "", NOT_MEASURED, *blank], 0, MUTED)
        for phase, ranks in unread.items()
    ]
    return table(
        title,
        columns(several),
        [*rows, *lines],
        notes,
        wide,
        report.run.simulated,
        look=lambda row: BAD if row.open else PLAIN,
    )


def _extremes(groups: list[Folded], names: list[str]) -> list[Folded]:
    """Return the groups that are shown: the largest, and those farthest from the median."""
    if len(groups) <= SHOWN_GROUPS:
        return groups
    readings = [
        [*(group.rows[0].edges(name)[side] for side in (0, 1) for name in names)]
        for group in groups
    ]
    everyone = [own for own, group in zip(readings, groups, strict=True) for _ in group.labels]
    middle: list[int | None] = []
    for column in zip(*everyone, strict=True):
        known = sorted(size for size in column if size is not None)
        middle.append(known[len(known) // 2] if known else None)

    def distance(at: int) -> float:
        """Return the bytes by which a figure differs most; inf for an open or a missing one."""
        pairs = list(zip(readings[at], middle, strict=True))
        if groups[at].rows[0].open or any(
            (size is None) != (usual is None) for size, usual in pairs
        ):
            return inf
        return float(max(abs((size or 0) - (usual or 0)) for size, usual in pairs))

    places = range(len(groups))
    largest = max(places, key=lambda at: len(groups[at].labels))
    others = sorted((at for at in places if at != largest), key=distance, reverse=True)
    kept = {largest, *others[: SHOWN_GROUPS - 1]}
    return [groups[at] for at in places if at in kept]


def _short(labels: str) -> str:
    """Return the ranks of a row, as many as a column has room for."""
    parts = labels.split(", ")
    return (
        labels if len(parts) <= _LISTED_RANKS else f"{', '.join(parts[: _LISTED_RANKS - 1])}, ..."
    )


def _phase_notes(report: Report) -> list[str]:
    notes: list[str] = []
    if not report.ranks:
        notes.append(text("no worker got far enough to report anything"))
    if len(report.ranks) > 1 and EVIDENCE[report.run.source].no_times is None:
        notes.append(text("seconds are those of the slowest rank"))
    for members in group_ranks(report.ranks, lambda rank: tuple(rank.open_phases)):
        if phases := " > ".join(members[0].open_phases):
            labels = labels_of(members)
            notes.append(
                text("{labels}: {phases} was under way", labels=labels, phases=phases)
                if report.run.status == "running"
                else text("{labels}: {phases} was not finished", labels=labels, phases=phases)
            )
    notes += _folded_notes((rank, _raised(rank)) for rank in report.ranks)
    notes += _folded_notes(
        (rank, [text("memprof's hook failed, {error}", error=error) for error in rank.errors])
        for rank in report.ranks
    )
    gaps: dict[tuple[str, str], list[NotMeasured]] = {}
    for gap in report.not_measured:
        gaps.setdefault((gap.reason, fold(gap.labels or [])), []).append(gap)
    for (reason, labels), members_of in gaps.items():
        what = ", ".join(gap.phase for gap in members_of)
        notes.append(
            text(
                "NOT MEASURED on {labels}: {what} ({reason})",
                labels=labels,
                what=what,
                reason=reason,
            )
            if labels
            else text("NOT MEASURED: {what} ({reason})", what=what, reason=reason)
        )
    return notes


def _raised(rank: RankReport) -> list[Text]:
    """Return the exceptions that left a phase, each where it began, not where it was passed on."""
    inner = {row.parent: row.error for row in rank.phases if row.error}
    return [
        text("{phase} raised {error}", phase=row.phase, error=row.error)
        for row in rank.phases
        if row.error and inner.get(row.order) != row.error
    ]


def _folded_notes(per_rank: Iterable[tuple[RankReport, list[Text]]]) -> list[Text]:
    """Return each note once, with the ranks that it holds for."""
    labels: dict[Text, list[str]] = {}
    for rank, found in per_rank:
        for note in found:
            labels.setdefault(note, []).append(rank.label)
    return [
        text("{labels}: {note}", labels=fold(list(dict.fromkeys(names))), note=note)
        for note, names in labels.items()
    ]


def _digits(report: Report) -> int:
    """Return 2 as in the engine's log; 4 where a whole run stays below 1 GiB of torch memory."""
    snapshots = [row.after for rank in report.ranks for row in rank.phases if row.after is not None]
    peaks = [s.reserved_peak_bytes or s.reserved_bytes or 0 for s in snapshots]
    return 4 if 0 < max(peaks, default=0) < GIB else 2


def passages_of(rank: RankReport) -> dict[_PhaseKey, Passage]:
    """Return a rank's phases by name, by start; many of a kind within one parent become one."""
    keys: dict[int | None, _PhaseKey] = {None: ()}
    found: list[tuple[int, _PhaseKey, Passage]] = []
    for depth in range(max((row.depth for row in rank.phases), default=-1) + 1):
        groups: dict[tuple[_PhaseKey, str], list[Span]] = {}
        for row in rank.phases:
            if row.depth == depth:
                groups.setdefault((keys[row.parent], row.name), []).append(row)
        for (parent, name), rows in groups.items():
            for number, bundle in enumerate(_bundles(rows)):
                key = (*parent, f"{name}#{number}")
                keys.update(dict.fromkeys((row.order for row in bundle), key))
                shown = f"{name} x{len(bundle)}" if len(bundle) > 1 else name
                found.append((bundle[0].order, key, _bundle(shown, bundle)))
    return {key: passage for _, key, passage in sorted(found, key=lambda entry: entry[0])}


def _bundles(rows: list[Span]) -> list[list[Span]]:
    """Return rows one by one, or those that ended as one where they are many."""
    ended = [row for row in rows if not row.open]
    if len(ended) <= _LISTED_PASSAGES:
        return [[row] for row in rows]
    return [ended, *([row] for row in rows if row.open)]


def _bundle(name: str, rows: list[Span]) -> Passage:
    seconds = [row.seconds for row in rows if row.seconds is not None]
    return Passage(
        name=name,
        indent=rows[0].depth,
        seconds=sum(seconds) if seconds else None,
        before=rows[0].before,
        after=rows[-1].after,
        open=rows[-1].open,
    )


def _merged_order(per_rank: list[dict[_PhaseKey, Passage]]) -> list[_PhaseKey]:
    """Return one order for all ranks: a phase of one rank alone comes after its previous one."""
    order: list[_PhaseKey] = []
    known: set[_PhaseKey] = set()
    for passages in per_rank:
        place = 0
        for key in passages:
            if key in known:
                place = order.index(key) + 1
            else:
                order.insert(place, key)
                known.add(key)
                place += 1
    return order
