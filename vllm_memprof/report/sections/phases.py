"""Phases x memory, before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from vllm_memprof.accounting.model import NotMeasured, RankReport, Report
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span
from vllm_memprof.report.document import (
    BAD,
    MUTED,
    NOT_MEASURED,
    PLAIN,
    Column,
    Row,
    Section,
)
from vllm_memprof.report.sections.base import (
    SHOWN_GROUPS,
    fold,
    group_ranks,
    labels_of,
    modelled,
    printed_gib,
)
from vllm_memprof.text import Text, text
from vllm_memprof.units import GIB

#: Passages of the same phase in a row that are still listed one by one.
_LISTED_PASSAGES = 8
#: Ranks, or ranges of them, that a row names.
_LISTED_RANKS = 4
_SECONDS = text("s")

_PhaseKey = tuple[str, ...]  # names from the outermost phase inwards, each with its count


@dataclass(frozen=True)
class _PhasePassage:
    """One or several passages of one rank through a phase, as one row shows them."""

    name: str
    depth: int
    seconds: float | None
    before: Snapshot | None
    after: Snapshot | None
    open: bool


def phase_section(report: Report, wide: bool) -> Section:
    """Return phases x memory, before and after, in the order in which they occurred.

    Ranks that print alike share a row.
    """
    digits = _digits(report)
    fields: list[tuple[str, str]] = [
        (text("Reserved"), "reserved_bytes"),
        (text("Allocated peak"), "allocated_peak_bytes"),
        *([(text("Allocated"), "allocated_bytes")] if wide else []),
        (modelled(text("Non-torch"), report.run.simulated), "non_torch_bytes"),
        *([(modelled(text("Free"), report.run.simulated), "device_free_bytes")] if wide else []),
    ]
    names = [name for _, name in fields]

    per_rank = {rank.label: _passages(rank) for rank in report.ranks}
    rows: list[tuple[str, Row]] = []
    hidden = False
    for key in _merged_order(list(per_rank.values())):
        groups: dict[tuple[str, ...], _Group] = {}
        for label, passages in per_rank.items():
            if key in passages:
                cells = tuple(_edges(passages[key], name, digits) for name in names)
                groups.setdefault((*cells, str(passages[key].open)), []).append(
                    (label, passages[key])
                )
        shown = _extremes(groups, names)
        hidden |= len(shown) < len(groups)
        for cells in shown:
            members = groups[cells]
            first = members[0][1]
            known = [passage.seconds for _, passage in members if passage.seconds is not None]
            seconds = text("open") if first.open else f"{max(known):.2f}" if known else "-"
            style = BAD if first.open else PLAIN
            row = Row([first.name, seconds, *cells[:-1]], first.depth, style)
            rows.append((fold([label for label, _ in members]), row))
    log = report.run.source == "log"
    everyone = fold(list(per_rank))
    if not log:  # few logs print a moment: a note names the others
        gaps: dict[str, list[str]] = {}
        for gap in report.not_measured:
            labels = list(per_rank) if gap.labels is None else gap.labels
            gaps.setdefault(gap.phase, []).extend(labels)
        for phase, lacking in gaps.items():
            cells = ("", NOT_MEASURED, *[""] * (len(fields) - 1))
            ranks = fold([label for label in per_rank if label in lacking])
            rows.append((ranks, Row([phase, *cells], 0, MUTED)))
    columns = [
        Column(text("Phase"), right=False),
        Column(_SECONDS),
        *(Column(title) for title, _ in fields),
    ]
    if any(ranks != everyone for ranks, _ in rows):
        title = text("Phases, GiB before → after")
        columns.insert(1, Column(text("Rank"), right=False))
        plain = [
            replace(row, cells=[row.cells[0], _short(ranks), *row.cells[1:]]) for ranks, row in rows
        ]
        if not wide:  # a column for the ranks leaves no room for blanks
            plain = [
                replace(row, cells=[cell.replace(" → ", "→") for cell in row.cells])
                for row in plain
            ]
    else:
        title = text("Phases, GiB before → after")
        if len(report.ranks) == 1:
            title = text("Phases, GiB before → after, {labels}", labels=labels_of(report.ranks))
        elif everyone:
            title = text("Phases, GiB before → after, {labels} alike", labels=everyone)
        plain = [row for _, row in rows]
    if log:  # a log tells of moments, not of time
        at = next(i for i, column in enumerate(columns) if column.title is _SECONDS)
        del columns[at]
        plain = [replace(row, cells=[*row.cells[:at], *row.cells[at + 1 :]]) for row in plain]
    notes = _phase_notes(report)
    if hidden:
        notes.append(
            text(
                "of more than {count} groups of ranks, the largest and those that differ most from "
                "the median; report.json has every rank",
                count=SHOWN_GROUPS,
            )
        )
    return Section(title, columns, plain, notes)


_Group = list[tuple[str, _PhasePassage]]


def _extremes(groups: dict[tuple[str, ...], _Group], names: list[str]) -> list[tuple[str, ...]]:
    """Return the keys of the groups that are shown: the largest, those farthest from the median."""
    if len(groups) <= SHOWN_GROUPS:
        return list(groups)
    readings = {key: _readings(members[0][1], names) for key, members in groups.items()}
    everyone = [readings[key] for key, members in groups.items() for _ in members]
    middle: list[int | None] = []
    for column in zip(*everyone, strict=True):
        known = sorted(size for size in column if size is not None)
        middle.append(known[len(known) // 2] if known else None)

    def distance(key: tuple[str, ...]) -> float:
        """Return the bytes by which a figure differs most; inf for an open or a missing one."""
        pairs = list(zip(readings[key], middle, strict=True))
        if groups[key][0][1].open or any(
            (size is None) != (usual is None) for size, usual in pairs
        ):
            return float("inf")
        return max(abs((size or 0) - (usual or 0)) for size, usual in pairs)

    largest = max(groups, key=lambda key: len(groups[key]))
    others = sorted((key for key in groups if key != largest), key=distance, reverse=True)
    kept = {largest, *others[: SHOWN_GROUPS - 1]}
    return [key for key in groups if key in kept]


def _readings(passage: _PhasePassage, names: list[str]) -> list[int | None]:
    edges = (passage.before, passage.after)
    return [
        None if snapshot is None else getattr(snapshot, name)
        for snapshot in edges
        for name in names
    ]


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
    if len(report.ranks) > 1 and report.run.source != "log":
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


def _edges(passage: _PhasePassage, name: str, digits: int) -> str:
    before, after = (
        None if snapshot is None else getattr(snapshot, name)
        for snapshot in (passage.before, passage.after)
    )
    if before is None and after is None:
        return "-"
    return f"{printed_gib(before, digits)} → {printed_gib(after, digits)}"


def _passages(rank: RankReport) -> dict[_PhaseKey, _PhasePassage]:
    """Return a rank's phases by name, by start; many of a kind within one parent become one."""
    keys: dict[int | None, _PhaseKey] = {None: ()}
    found: list[tuple[int, _PhaseKey, _PhasePassage]] = []
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


def _bundle(name: str, rows: list[Span]) -> _PhasePassage:
    seconds = [row.seconds for row in rows if row.seconds is not None]
    return _PhasePassage(
        name=name,
        depth=rows[0].depth,
        seconds=sum(seconds) if seconds else None,
        before=rows[0].before,
        after=rows[-1].after,
        open=rows[-1].open,
    )


def _merged_order(per_rank: list[dict[_PhaseKey, _PhasePassage]]) -> list[_PhaseKey]:
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
