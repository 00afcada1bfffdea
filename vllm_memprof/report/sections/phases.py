"""Phases x memory, before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_memprof.accounting.model import NotMeasured, RankReport, Report
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span
from vllm_memprof.report.sections.base import (
    BAD,
    MODELLED_MARK,
    MUTED,
    NOT_MEASURED,
    PLAIN,
    SHOWN_GROUPS,
    Column,
    Row,
    Section,
    fold,
    group_ranks,
    labels_of,
)
from vllm_memprof.units import GIB, format_gib

#: Passages of the same phase in a row that are still listed one by one.
_LISTED_PASSAGES = 8
#: Ranks, or ranges of them, that a row names.
_LISTED_RANKS = 4

_PhaseKey = tuple[str, ...]  # names from the outermost phase inwards, each with its count


@dataclass(frozen=True)
class _Passage:
    """One or several passages of one rank through a phase, as one row shows them."""

    name: str
    depth: int
    seconds: float | None
    before: Snapshot | None
    after: Snapshot | None
    open: bool


def phase_section(report: Report, wide: bool) -> Section:
    """Phases x memory, before and after, in the order in which they occurred; ranks that print alike share a row."""
    digits = _digits(report)
    mark = f" {MODELLED_MARK}" if report.run.simulated else ""
    fields = [("Reserved", "reserved_bytes"), ("Allocated peak", "allocated_peak_bytes")]
    fields += [("Allocated", "allocated_bytes")] if wide else []
    fields += [(f"Non-torch{mark}", "non_torch_bytes")]
    fields += [("Free", "device_free_bytes")] if wide else []
    names = [name for _, name in fields]

    per_rank = {rank.label: _passages(rank) for rank in report.ranks}
    rows: list[tuple[str, Row]] = []
    hidden = False
    for key in _merged_order(list(per_rank.values())):
        groups: dict[tuple[str, ...], list[tuple[str, _Passage]]] = {}
        for label, passages in per_rank.items():
            if key in passages:
                cells = tuple(_edges(passages[key], name, digits) for name in names)
                groups.setdefault((*cells, str(passages[key].open)), []).append(
                    (label, passages[key])
                )
        shown = _extremes(groups, names)
        hidden |= len(shown) < len(groups)
        for texts in shown:
            rows.append(
                (
                    fold([label for label, _ in groups[texts]]),
                    _phase_row(groups[texts], list(texts[:-1])),
                )
            )
    log = report.run.source == "log"
    gaps = (
        {} if log else _gaps(report, list(per_rank))
    )  # few logs print a moment: a note names the others
    rows += [
        (labels, Row([phase, "", NOT_MEASURED, *[""] * (len(fields) - 1)], 0, MUTED))
        for phase, labels in gaps.items()
    ]
    columns = [Column("Phase", right=False), Column("s"), *(Column(title) for title, _ in fields)]
    everyone = fold(list(per_rank))
    title = "Phases, GiB before → after"
    if any(labels != everyone for labels, _ in rows):
        columns.insert(1, Column("Rank", right=False))
        plain = [
            Row([row.cells[0], _short(labels), *_tight(row, wide)], row.indent, row.style)
            for labels, row in rows
        ]
    else:
        title += (
            f", {everyone}" if len(report.ranks) == 1 else f", {everyone} alike" if everyone else ""
        )
        plain = [row for _, row in rows]
    if log:  # a log tells of moments, not of time
        at = next(i for i, column in enumerate(columns) if column.title == "s")
        del columns[at]
        plain = [
            Row([*row.cells[:at], *row.cells[at + 1 :]], row.indent, row.style) for row in plain
        ]
    notes = _phase_notes(report)
    if hidden:
        notes.append(
            f"of more than {SHOWN_GROUPS} groups of ranks, the largest and those that differ most from the middle; "
            "report.json has every rank"
        )
    return Section(title, columns, plain, notes)


_Group = list[tuple[str, _Passage]]


def _extremes(groups: dict[tuple[str, ...], _Group], names: list[str]) -> list[tuple[str, ...]]:
    """Keys of the groups that are shown, in their order: the largest, and those farthest from the middle rank."""
    if len(groups) <= SHOWN_GROUPS:
        return list(groups)
    readings = {key: _readings(members[0][1], names) for key, members in groups.items()}
    everyone = [readings[key] for key, members in groups.items() for _ in members]
    middle: list[int | None] = []
    for column in zip(*everyone, strict=True):
        known = sorted(size for size in column if size is not None)
        middle.append(known[len(known) // 2] if known else None)

    def distance(key: tuple[str, ...]) -> float:
        """Bytes of the figure that differs most; a passage that is open, or lacks a figure, is the farthest."""
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


def _readings(passage: _Passage, names: list[str]) -> list[int | None]:
    edges = (passage.before, passage.after)
    return [
        None if snapshot is None else getattr(snapshot, name)
        for snapshot in edges
        for name in names
    ]


def _short(labels: str) -> str:
    """The ranks of a row, as many as a column has room for."""
    parts = labels.split(", ")
    return (
        labels if len(parts) <= _LISTED_RANKS else f"{', '.join(parts[: _LISTED_RANKS - 1])}, ..."
    )


def _gaps(report: Report, everyone: list[str]) -> dict[str, str]:
    """Phases without figures, with the ranks that lack them; the reasons are in the notes."""
    labels: dict[str, list[str]] = {}
    for gap in report.not_measured:
        labels.setdefault(gap.phase, []).extend(everyone if gap.labels is None else gap.labels)
    return {
        phase: fold([label for label in everyone if label in found])
        for phase, found in labels.items()
    }


def _tight(row: Row, wide: bool) -> list[str]:
    """A column for the ranks leaves a narrow table no room for blanks."""
    return row.cells[1:] if wide else [cell.replace(" → ", "→") for cell in row.cells[1:]]


def _phase_row(members: list[tuple[str, _Passage]], cells: list[str]) -> Row:
    first = members[0][1]
    known = [passage.seconds for _, passage in members if passage.seconds is not None]
    seconds = "open" if first.open else f"{max(known):.2f}" if known else "-"
    return Row([first.name, seconds, *cells], first.depth, BAD if first.open else PLAIN)


def _phase_notes(report: Report) -> list[str]:
    notes = [] if report.ranks else ["no worker got far enough to report anything"]
    if len(report.ranks) > 1 and report.run.source != "log":
        notes.append("seconds are those of the slowest rank")
    ended = "was under way" if report.run.status == "running" else "was not finished"
    for members in group_ranks(report.ranks, lambda rank: tuple(rank.open_phases)):
        if members[0].open_phases:
            notes.append(f"{labels_of(members)}: {' > '.join(members[0].open_phases)} {ended}")
    notes += _folded_notes((rank, _raised(rank)) for rank in report.ranks)
    notes += _folded_notes(
        (rank, [f"memprof's hook failed, {error}" for error in rank.errors])
        for rank in report.ranks
    )
    gaps: dict[tuple[str, str], list[NotMeasured]] = {}
    for gap in report.not_measured:
        gaps.setdefault((gap.reason, fold(gap.labels or [])), []).append(gap)
    for (reason, labels), members_of in gaps.items():
        where = f" on {labels}" if labels else ""
        notes.append(
            f"{NOT_MEASURED}{where}: {', '.join(gap.phase for gap in members_of)} ({reason})"
        )
    return notes


def _raised(rank: RankReport) -> list[str]:
    """Exceptions that left a phase, each where it began: the phases around it only passed it on."""
    inner = {row.parent: row.error for row in rank.phases if row.error}
    return [
        f"{row.phase} raised {row.error}"
        for row in rank.phases
        if row.error and inner.get(row.order) != row.error
    ]


def _folded_notes(per_rank: Iterable[tuple[RankReport, list[str]]]) -> list[str]:
    """Each text once, with the ranks that it holds for."""
    labels: dict[str, list[str]] = {}
    for rank, found in per_rank:
        for text in found:
            labels.setdefault(text, []).append(rank.label)
    return [f"{fold(list(dict.fromkeys(names)))}: {text}" for text, names in labels.items()]


def _digits(report: Report) -> int:
    """Two digits as in the engine's log; four where a whole run stays below 1 GiB of torch memory."""
    snapshots = [row.after for rank in report.ranks for row in rank.phases if row.after is not None]
    peaks = [s.reserved_peak_bytes or s.reserved_bytes or 0 for s in snapshots]
    return 4 if 0 < max(peaks, default=0) < GIB else 2


def _edges(passage: _Passage, name: str, digits: int) -> str:
    before, after = (
        None if snapshot is None else getattr(snapshot, name)
        for snapshot in (passage.before, passage.after)
    )
    if before is None and after is None:
        return "-"
    return f"{format_gib(before, digits)} → {format_gib(after, digits)}"


def _passages(rank: RankReport) -> dict[_PhaseKey, _Passage]:
    """A rank's phases by name, in the order of their start; many of a kind within one parent become one."""
    keys: dict[int | None, _PhaseKey] = {None: ()}
    found: list[tuple[int, _PhaseKey, _Passage]] = []
    for depth in range(max((row.depth for row in rank.phases), default=-1) + 1):
        groups: dict[tuple[_PhaseKey, str], list[Span]] = {}
        for row in rank.phases:
            if row.depth == depth:
                groups.setdefault((keys[row.parent], _phase_name(row)), []).append(row)
        for (parent, name), rows in groups.items():
            for number, bundle in enumerate(_bundles(rows)):
                key = (*parent, f"{name}#{number}")
                keys.update(dict.fromkeys((row.order for row in bundle), key))
                shown = f"{name} x{len(bundle)}" if len(bundle) > 1 else name
                found.append((bundle[0].order, key, _bundle(shown, bundle)))
    return {key: passage for _, key, passage in sorted(found, key=lambda entry: entry[0])}


def _bundles(rows: list[Span]) -> list[list[Span]]:
    """Rows one by one, or those that ended as one where they are many."""
    ended = [row for row in rows if not row.open]
    if len(ended) <= _LISTED_PASSAGES:
        return [[row] for row in rows]
    return [ended, *([row] for row in rows if row.open)]


def _bundle(name: str, rows: list[Span]) -> _Passage:
    seconds = [row.seconds for row in rows if row.seconds is not None]
    return _Passage(
        name=name,
        depth=rows[0].depth,
        seconds=sum(seconds) if seconds else None,
        before=rows[0].before,
        after=rows[-1].after,
        open=rows[-1].open,
    )


def _phase_name(row: Span) -> str:
    group = row.detail.get("group")
    return (
        f"{row.phase} {group}"
        if row.phase == "communicator" and group not in (None, "undefined")
        else row.phase
    )


def _merged_order(per_rank: list[dict[_PhaseKey, _Passage]]) -> list[_PhaseKey]:
    """One order for all ranks: a phase that a rank alone has comes after that rank's previous one."""
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
