"""Cycles of sleep mode, pauses and weight updates, and what each of them left on the device."""

from __future__ import annotations

from vllm_memprof.accounting.model import Cycle, Report
from vllm_memprof.document import Section
from vllm_memprof.tables import GIB4, SECONDS, Column, Shown, alike, number, signed_mib, table
from vllm_memprof.text import text

#: Cycles that are listed from the first on; of the rest the last alone.
_LISTED = 8


def _printed(shown: Shown) -> bool:
    return any(cycle.freed_bytes is not None for cycle in shown.rows)


def _measured(shown: Shown) -> bool:
    return not _printed(shown)


def _asleep(shown: Shown) -> bool:
    return any(cycle.asleep_used_bytes is not None for cycle in shown.rows)


_CYCLES = (
    Column("Cycle", "number", number),
    Column("s", "seconds", SECONDS, _measured),
    Column("Freed,\nGiB", "freed_bytes", GIB4, _printed),
    Column("Asleep,\nGiB", "asleep_used_bytes", GIB4, _asleep),
    Column("Grown,\nMiB", "asleep_residue_bytes", signed_mib, _printed),
    Column("After,\nGiB", "used_bytes", GIB4, _measured),
    Column("Left,\nMiB", "residue_bytes", signed_mib, _measured),
    Column("Allocated", "allocated_residue_bytes", signed_mib, _measured),
    Column("Reserved, not\nallocated", "cached_residue_bytes", signed_mib, _measured),
    Column("Non-torch", "non_torch_residue_bytes", signed_mib, _measured, marked=True),
    Column(
        "empty_cache", lambda cycle: text("yes") if cycle.emptied else text("no"), when=_measured
    ),
)
#: Columns that ranks have to have in common.
_COMPARED = _CYCLES[2:]


def cycle_sections(report: Report) -> list[Section]:
    """Return one table per kind of cycle and per group of ranks that agree."""
    found = []
    for kind in ("sleep", "pause", "weight_update"):
        cycles = {
            rank.label: [cycle for cycle in rank.cycles if cycle.kind == kind]
            for rank in report.ranks
        }
        found += alike(
            [rank for rank in report.ranks if cycles[rank.label]],
            lambda rank, labels: [_section(kind, labels, cycles[rank.label], report)],  # noqa: B023
            lambda rank: repr(
                [[column.cell(each) for column in _COMPARED] for each in cycles[rank.label]]  # noqa: B023
            ),
        )
    return found


def _section(kind: str, labels: str, cycles: list[Cycle], report: Report) -> Section:
    shown = cycles if len(cycles) <= _LISTED + 1 else [*cycles[:_LISTED], cycles[-1]]
    notes: list[str] = [
        text(
            "left: device memory in use after the cycle less that after the cycle before, by owner "
            "in the columns behind it; the first cycle is compared with the moment before it"
        )
        if _measured(Shown(shown, False))
        else text("as the log prints them; grown: in use while asleep − in the sleep before")
    ]
    if len(shown) < len(cycles):
        notes.append(text("{count} more in report.json", count=len(cycles) - len(shown)))
    titles = {
        "sleep": text("Sleep and wake-up cycles, {labels}: device memory in use", labels=labels),
        "pause": text("Pauses with a weight update, {labels}: device memory in use", labels=labels),
        "weight_update": text("Weight updates, {labels}: device memory in use", labels=labels),
    }
    return table(titles[kind], _CYCLES, shown, notes, simulated=report.run.simulated)
