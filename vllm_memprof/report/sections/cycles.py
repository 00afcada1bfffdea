"""Cycles of sleep mode and weight updates, and what each of them left on the device."""

from __future__ import annotations

from vllm_memprof.accounting.model import Cycle, RankReport, Report
from vllm_memprof.report.sections.base import (
    MODELLED_MARK,
    SHOWN_GROUPS,
    Column,
    Row,
    Section,
    group_ranks,
    labels_of,
)
from vllm_memprof.units import MIB, format_gib

#: Cycles that are listed from the first on; of the rest the last alone.
_LISTED = 8
_TITLES = {"sleep": "Sleep and wake-up cycles", "weight_update": "Weight updates"}


def cycle_sections(report: Report) -> list[Section]:
    """One table per kind of cycle and per group of ranks that agree."""
    found = []
    for kind, title in _TITLES.items():
        ranks = [rank for rank in report.ranks if _of(rank, kind)]
        groups = group_ranks(ranks, lambda rank: repr([_cells(cycle) for cycle in _of(rank, kind)]))  # noqa: B023
        for members in groups[:SHOWN_GROUPS]:
            found.append(
                _section(
                    f"{title}, {labels_of(members)}", _of(members[0], kind), report.run.simulated
                )
            )
    return found


def _of(rank: RankReport, kind: str) -> list[Cycle]:
    return [cycle for cycle in rank.cycles if cycle.kind == kind]


def _section(title: str, cycles: list[Cycle], simulated: bool) -> Section:
    mark = f" {MODELLED_MARK}" if simulated else ""
    asleep = any(cycle.asleep_used_bytes is not None for cycle in cycles)
    columns = [Column("N"), Column("s")]
    columns += [Column("Asleep GiB")] if asleep else []
    columns += [Column("After GiB"), Column("Left MiB"), Column("Allocated"), Column("Cached")]
    columns += [Column(f"Non-torch{mark}"), Column("Emptied", right=False)]
    shown = cycles if len(cycles) <= _LISTED + 1 else [*cycles[:_LISTED], cycles[-1]]
    rows = []
    for cycle in shown:
        seconds = "-" if cycle.seconds is None else f"{cycle.seconds:.2f}"
        cells = _cells(cycle)
        rows.append(Row([str(cycle.number), seconds, *(cells if asleep else cells[1:])]))
    notes = [
        "left: more in use than after the one before; the first is compared with the moment before it"
    ]
    notes += [f"{len(cycles) - len(shown)} more in report.json"] if len(shown) < len(cycles) else []
    return Section(f"{title}: device memory in use", columns, rows, notes)


def _cells(cycle: Cycle) -> list[str]:
    residues = (
        cycle.residue_bytes,
        cycle.allocated_residue_bytes,
        cycle.cached_residue_bytes,
        cycle.non_torch_residue_bytes,
    )
    return [
        format_gib(cycle.asleep_used_bytes, 4),
        format_gib(cycle.used_bytes, 4),
        *(_mib(size) for size in residues),
        "yes" if cycle.emptied else "no",
    ]


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:+.1f}" if size else "0"
