"""What grew: owner x phase."""

from __future__ import annotations

from dataclasses import replace

from vllm_memprof.ledger.growth import UNACCOUNTED, Growth, growth_by_owner
from vllm_memprof.ledger.model import RankReport, Report
from vllm_memprof.report.sections.base import (
    MODELLED_MARK,
    SHOWN_GROUPS,
    Column,
    Row,
    Section,
    group_ranks,
    labels_of,
)
from vllm_memprof.units import format_mib

#: Rows of torch's segments, one column here: the table of phases divides them.
_TORCH = ("allocated", "cached", "unmapped")
_SEGMENTS = "torch"
_COMMUNICATOR = "communicator:"
_COMMUNICATORS = "communicators"
_OTHERS = "the rest"
#: Owners that get a column of their own, by the width of the line.
_NARROW, _WIDE = 5, 9
_TITLES = {"npu_workspace": "workspace", "npu_workspace_and_other": "workspace+other", "other_processes": "others"}
#: Phases with a table of their own.
_ELSEWHERE = ("empty_cache",)
#: Passages of a phase in a rank that are still listed one by one.
_LISTED_PASSAGES = 8


def growth_sections(report: Report, wide: bool) -> list[Section]:
    """Growth by phase and owner, MiB; owners and phases without any are left out."""
    found = []
    tables = {rank.label: _bundled(growth_by_owner(rank)) for rank in report.ranks}
    groups = group_ranks(report.ranks, lambda rank: repr([_key(row) for row in tables[rank.label]]))
    for members in groups[:SHOWN_GROUPS]:
        section = _section(report, members, tables[members[0].label], wide)
        if section is not None:
            found.append(section)
    return found


def _bundled(table: list[Growth]) -> list[Growth]:
    """Passages through the same place as one row where they are many, at the first of them."""
    places: dict[tuple[str, int], list[Growth]] = {}
    for row in table:
        if row.phase not in _ELSEWHERE:
            places.setdefault((row.place, row.depth), []).append(row)
    found = []
    for rows in places.values():
        found += rows if len(rows) <= _LISTED_PASSAGES else [_added(rows)]
    return sorted(found, key=lambda row: (row.order, row.after is None))


def _added(rows: list[Growth]) -> Growth:
    names = dict.fromkeys(name for row in rows for name in row.owners)
    owners = {name: _sum([row.owners.get(name) for row in rows]) for name in names}
    return replace(rows[0], phase=f"{rows[0].phase} x{len(rows)}", owners=owners)


def _key(row: Growth) -> tuple[str, list[tuple[str, int | None]]]:
    return row.place, list(row.owners.items())


def _section(report: Report, members: list[RankReport], table: list[Growth], wide: bool) -> Section | None:
    grown = [(row, _merge_communicators(row.owners, table, wide)) for row in table]
    grown = [(row, owners) for row, owners in grown if any(owners.values())]
    if not grown:
        return None
    moved: dict[str, int] = {}
    for _, owners in grown:
        for name, size in owners.items():
            moved[name] = max(moved.get(name, 0), abs(size or 0))
    names = [name for name, size in moved.items() if size]
    most = _WIDE if wide else _NARROW
    shown = names if len(names) <= most else [name for name in names if name in _largest(moved, most - 1)]
    folded = [name for name in names if name not in shown]
    rows = []
    for row, owners in grown:
        cells = [format_mib(owners.get(name)) for name in shown]
        cells += [format_mib(_sum([owners.get(name) for name in folded]))] if folded else []
        place = row.phase if row.after is None else f"before {row.phase}"
        rows.append(Row([place, *cells], row.depth))
    mark = f" {MODELLED_MARK}" if report.run.simulated else ""
    titles = [_title(name) + (mark if name not in (_SEGMENTS, UNACCOUNTED) else "") for name in shown]
    columns = [Column("Phase", right=False), *(Column(title) for title in titles)]
    columns += [Column(_OTHERS)] if folded else []
    notes = [f"the rest: {', '.join(_title(name) for name in folded)}"] if folded else []
    if any(row.after is not None for row, _ in grown):
        notes.append("before a phase: since the end of the one above it, in no phase at all")
    title = f"Growth by owner, MiB, {labels_of(members)}"
    return Section(title, columns, rows, notes)


def _merge_communicators(owners: dict[str, int | None], table: list[Growth], wide: bool) -> dict[str, int | None]:
    """Torch as one owner; the communicators as one where they are many."""
    torch = _sum([owners[name] for name in _TORCH if name in owners])
    outside = {_SEGMENTS: torch, **{name: size for name, size in owners.items() if name not in _TORCH}}
    named = [name for name in outside if name.startswith(_COMMUNICATOR)]
    if len(named) <= (3 if wide else 1):
        return outside
    together = _sum([outside.pop(name) for name in named])
    return {_SEGMENTS: outside.pop(_SEGMENTS), _COMMUNICATORS: together, **outside}


def _largest(moved: dict[str, int], count: int) -> set[str]:
    """Torch, what is not accounted for, and the owners that moved most."""
    ranked = sorted(moved, key=lambda name: (name not in (_SEGMENTS, UNACCOUNTED), -moved[name]))
    return set(ranked[:count])


def _title(name: str) -> str:
    return _TITLES.get(name, name.removeprefix(_COMMUNICATOR).replace("_", " "))


def _sum(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return None if len(known) < len(sizes) else sum(known)
