"""The device by owner."""

from __future__ import annotations

from dataclasses import replace

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.quantities import HOW_TITLES
from vllm_memprof.record.spans import ComponentRow, DeviceMemory, device_after
from vllm_memprof.report.document import (
    MUTED,
    NOT_MEASURED,
    PLAIN,
    TOTAL,
    Column,
    Row,
    Section,
)
from vllm_memprof.report.sections.base import (
    BYTES,
    GIB,
    SHOWN_GROUPS,
    group_ranks,
    labels_of,
)
from vllm_memprof.text import text
from vllm_memprof.units import format_bytes, format_gib

#: Moments at which a reader wants the whole device: the latest of them that a rank reached.
_DEVICE_MOMENTS = ("warm_up", "kv_cache_alloc", "profile_run", "weight_load", "device_init")
#: Parts of torch's segments, which two rows divide in another way.
_SEGMENTS = "allocated and reserved_not_allocated"
_READINGS = {
    "components": text("the runtime's counters"),
    "processes": text("the driver's list of processes"),
}


def device_sections(report: Report, wide: bool) -> list[Section]:
    """Return the device by owner at the end of the start-up, or as far as a rank got.

    Owners without bytes are in a note.
    """
    moments: dict[str, tuple[str, DeviceMemory]] = {}
    for rank in report.ranks:
        for phase in _DEVICE_MOMENTS:
            if (memory := device_after(rank.phases, phase)) is not None:
                moments[rank.label] = phase, memory
                break
    known = [rank for rank in report.ranks if rank.label in moments]
    columns = [
        Column(text("Owner"), right=False),
        Column(GIB),
        Column(BYTES),
        Column(text("How"), right=False),
        *([Column(text("Read from"), right=False)] if wide else []),
    ]
    found = []
    for members in group_ranks(known, lambda rank: repr(moments[rank.label]))[:SHOWN_GROUPS]:
        phase, memory = moments[members[0].label]
        title = text(
            "Device memory after {phase}, {labels}", phase=phase, labels=labels_of(members)
        )
        rows = [replace(row, cells=row.cells[: len(columns)]) for row in _rows(memory)]
        found.append(Section(title, columns, rows, _notes(memory, members)))
    return found


def _rows(memory: DeviceMemory) -> list[Row]:
    """Return the owners that hold something, with their parts; all but the parts add up."""
    rows = []
    for row in memory.rows:
        if row.bytes:
            rows.append(_row(row))
        parts = [part for part in memory.parts if part.bytes and part.part_of == row.component]
        rows += [_row(part) for part in parts if part.bytes != row.bytes]
        if row.component == "reserved_not_allocated":
            rows += [
                _row(part) for part in memory.parts if part.bytes and part.part_of == _SEGMENTS
            ]
    rest = memory.unexplained_bytes
    total = None
    if rest is not None:
        total = sum(row.bytes for row in memory.rows if row.bytes is not None) + rest
    how = HOW_TITLES.get(memory.unexplained_how, memory.unexplained_how) if rest is not None else ""
    source = text("every remainder together")
    cells = [text("unexplained"), format_gib(rest, 4), format_bytes(rest), how, source]
    return [
        *rows,
        Row(cells, style=MUTED),
        *(_row(part) for part in memory.remainders() if part.bytes),
        Row(
            [text("device total"), format_gib(total, 4), format_bytes(total), "", ""],
            style=TOTAL,
            mark="=",
        ),
    ]


def _row(row: ComponentRow) -> Row:
    is_part = row.part_of is not None
    title = text("of which {name}", name=row.component) if is_part else row.component
    cells = [
        title,
        format_gib(row.bytes, 4),
        format_bytes(row.bytes),
        HOW_TITLES.get(row.how, row.how),
        row.source,
    ]
    return Row(cells, int(is_part), MUTED if is_part else PLAIN)


def _notes(memory: DeviceMemory, members: list[RankReport]) -> list[str]:
    listed = [*memory.rows, *(part for part in memory.parts if part.part_of == "allocated")]
    empty = [row.component for row in listed if row.bytes == 0]
    unknown = [row.component for row in listed if row.bytes is None]
    notes: list[str] = []
    if empty:
        notes.append(text("0 bytes: {owners}", owners=", ".join(empty)))
    if unknown:
        notes.append(
            text("{not_measured}: {what}", not_measured=NOT_MEASURED, what=", ".join(unknown))
        )
    notes += [
        text(
            "{title}: {not_measured} ({reason})",
            title=_READINGS.get(what, what),
            not_measured=NOT_MEASURED,
            reason=why,
        )
        for what, why in members[0].unread.items()
    ]
    return notes
