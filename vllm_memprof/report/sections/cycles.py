"""Cycles of sleep mode, pauses and weight updates, and what each of them left on the device."""

from __future__ import annotations

from vllm_memprof.accounting.model import Cycle, RankReport, Report
from vllm_memprof.report.document import Column, Row, Section
from vllm_memprof.report.sections.base import SHOWN_GROUPS, group_ranks, labels_of, modelled
from vllm_memprof.text import text
from vllm_memprof.units import MIB, format_gib

#: Cycles that are listed from the first on; of the rest the last alone.
_LISTED = 8
_YES, _NO = text("yes"), text("no")


def cycle_sections(report: Report) -> list[Section]:
    """Return one table per kind of cycle and per group of ranks that agree."""
    found = []
    for kind in ("sleep", "pause", "weight_update"):
        cycles = {
            rank.label: [cycle for cycle in rank.cycles if cycle.kind == kind]
            for rank in report.ranks
        }
        groups = group_ranks(
            [rank for rank in report.ranks if cycles[rank.label]],
            lambda rank: repr([_cells(cycle) for cycle in cycles[rank.label]]),  # noqa: B023
        )
        found += [
            _section(kind, members, cycles[members[0].label], report.run.simulated)
            for members in groups[:SHOWN_GROUPS]
        ]
    return found


def _section(kind: str, members: list[RankReport], cycles: list[Cycle], simulated: bool) -> Section:
    asleep = any(cycle.asleep_used_bytes is not None for cycle in cycles)
    columns = [
        Column(text("Cycle")),
        Column(text("s")),
        *([Column(text("Asleep,\nGiB"))] if asleep else []),
        Column(text("After,\nGiB")),
        Column(text("Left,\nMiB")),
        Column(text("Allocated")),
        Column(text("Reserved, not\nallocated")),
        Column(modelled(text("Non-torch"), simulated)),
        Column(text("empty_cache"), right=False),
    ]
    shown = cycles if len(cycles) <= _LISTED + 1 else [*cycles[:_LISTED], cycles[-1]]
    rows = []
    for cycle in shown:
        seconds = "-" if cycle.seconds is None else f"{cycle.seconds:.2f}"
        cells = _cells(cycle)
        rows.append(Row([str(cycle.number), seconds, *(cells if asleep else cells[1:])]))
    notes: list[str] = [
        text(
            "left: device memory in use after the cycle less that after the cycle before, by owner "
            "in the columns behind it; the first cycle is compared with the moment before it"
        )
    ]
    if len(shown) < len(cycles):
        notes.append(text("{count} more in report.json", count=len(cycles) - len(shown)))
    labels = labels_of(members)
    titles = {
        "sleep": text("Sleep and wake-up cycles, {labels}: device memory in use", labels=labels),
        "pause": text("Pauses with a weight update, {labels}: device memory in use", labels=labels),
        "weight_update": text("Weight updates, {labels}: device memory in use", labels=labels),
    }
    return Section(titles[kind], columns, rows, notes)


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
        *("-" if size is None else f"{size / MIB:+.1f}" if size else "0" for size in residues),
        _YES if cycle.emptied else _NO,
    ]
