"""What grew: owner x phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.owners.growth import Growth, growth_by_owner
from vllm_memprof.accounting.readings.quantities import TORCH_ROWS
from vllm_memprof.document import Section
from vllm_memprof.record.spans import UNEXPLAINED
from vllm_memprof.tables import SHOWN_GROUPS, WIDE, Column, Look, group_ranks, labels_of, table
from vllm_memprof.text import join, text
from vllm_memprof.units import format_mib, sum_or_none

#: The rows of torch's segments are one column here: the table of phases divides them.
_SEGMENTS = "torch"
_COMMUNICATOR = "communicator:"
_COMMUNICATORS = "communicators"
#: Characters between two columns, and those that a table needs at its sides.
_GAP, _SIDES = 2, 2
_TITLES = {
    "torch": text("torch"),
    "communicators": text("HCCL"),
    "unexplained": text("unexplained"),
    "npu_workspace": text("operator\nworkspace"),
    "npu_workspace_and_other": text("workspace\nand other"),
    "other_processes": text("other\nprocesses"),
}
#: Phases with a table of their own.
_ELSEWHERE = ("empty_cache",)
#: Passages of a phase in a rank that are still listed one by one.
_LISTED_PASSAGES = 8


class _Grown(NamedTuple):
    growth: Growth
    owners: dict[str, int | None]  # as columns have them


def growth_sections(report: Report, width: int) -> list[Section]:
    """Return growth by phase and owner, MiB; owners and phases without any are left out."""
    found = []
    tables = {rank.label: _bundled(growth_by_owner(rank)) for rank in report.ranks}
    groups = group_ranks(
        report.ranks,
        lambda rank: tuple((row.place, *row.owners.items()) for row in tables[rank.label]),
    )
    for members in groups[:SHOWN_GROUPS]:
        section = _section(report, members, tables[members[0].label], width)
        if section is not None:
            found.append(section)
    return found


def _bundled(passages: list[Growth]) -> list[Growth]:
    """Return passages through the same place as one row where they are many, at the first."""
    places: dict[tuple[str, int], list[Growth]] = {}
    for row in passages:
        if row.phase not in _ELSEWHERE:
            places.setdefault((row.place, row.depth), []).append(row)
    found = []
    for rows in places.values():
        if len(rows) > _LISTED_PASSAGES:
            names = dict.fromkeys(name for row in rows for name in row.owners)
            owners = {name: sum_or_none([row.owners.get(name) for row in rows]) for name in names}
            rows = [replace(rows[0], phase=f"{rows[0].phase} x{len(rows)}", owners=owners)]
        found += rows
    return sorted(found, key=lambda row: (row.order, row.after is None))


def _section(
    report: Report, members: list[RankReport], rows: list[Growth], width: int
) -> Section | None:
    grown = [_Grown(row, _merge_communicators(row.owners, width)) for row in rows]
    grown = [row for row in grown if any(row.owners.values())]
    if not grown:
        return None
    moved: dict[str, int] = {}
    for _, owners in grown:
        for name, size in owners.items():
            moved[name] = max(moved.get(name, 0), abs(size or 0))
    names = [name for name, size in moved.items() if size]
    shown = _fitting(names, moved, grown, width)
    folded = [name for name in names if name not in shown]

    def of_owners(*owned: str) -> Callable[[_Grown], int | None]:
        return lambda row: sum_or_none([row.owners.get(name) for name in owned])

    columns = [
        Column("Phase", lambda row: _place(row.growth)),
        *(Column(_title(name), of_owners(name), format_mib) for name in shown),
        Column("other\nowners", of_owners(*folded), format_mib, bool(folded)),
    ]
    notes: list[str] = []
    if folded:
        owned = join(", ", [_title(name) for name in folded])
        notes.append(text("other owners: {owners}", owners=owned))
    if report.run.simulated:
        notes.append(text("all but torch is set by the profile of the simulated device (m)"))
    if any(row.after is not None for row, _ in grown):
        notes.append(text("before a phase: since the end of the phase in the row above it"))
    title = text("Growth by owner, MiB, {labels}", labels=labels_of(members))
    return table(title, columns, grown, notes, look=lambda row: Look(indent=row.growth.depth))


def _merge_communicators(owners: dict[str, int | None], width: int) -> dict[str, int | None]:
    """Return torch as one owner, and the communicators as one where they are many."""
    torch = sum_or_none([owners[name] for name in TORCH_ROWS if name in owners])
    outside = {
        _SEGMENTS: torch,
        **{name: size for name, size in owners.items() if name not in TORCH_ROWS},
    }
    named = [name for name in outside if name.startswith(_COMMUNICATOR)]
    if len(named) <= (3 if width >= WIDE else 1):
        return outside
    together = sum_or_none([outside.pop(name) for name in named])
    return {_SEGMENTS: outside.pop(_SEGMENTS), _COMMUNICATORS: together, **outside}


def _fitting(
    names: list[str],
    moved: dict[str, int],
    grown: list[_Grown],
    width: int,
) -> list[str]:
    """Return the owners whose columns fit the line, in their order.

    Those that moved least give way to a last column; torch and what is unexplained stay.
    """
    phases = max(2 * row.depth + len(_place(row)) for row, _ in grown)
    sizes = {
        name: _GAP
        + max(
            *(len(line) for line in _title(name).split("\n")),
            *(len(format_mib(owners.get(name))) for _, owners in grown),
        )
        for name in names
    }
    ranked = sorted(names, key=lambda name: (name not in (_SEGMENTS, UNEXPLAINED), -moved[name]))
    left = width - _SIDES - phases
    if sum(sizes.values()) <= left:
        return names
    left -= max(_GAP + len("owners"), *sizes.values())
    kept = []
    for name in ranked:
        if name not in (_SEGMENTS, UNEXPLAINED) and sizes[name] > left:
            break
        left -= sizes[name]
        kept.append(name)
    return [name for name in names if name in kept]


def _place(row: Growth) -> str:
    return row.phase if row.after is None else text("before {phase}", phase=row.phase)


def _title(name: str) -> str:
    return _TITLES.get(name, name.removeprefix(_COMMUNICATOR).replace("_", " "))
