"""The device by owner."""

from __future__ import annotations

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.record.spans import ComponentRow, DeviceMemory, device_after
from vllm_memprof.report.sections.base import (
    MUTED,
    NOT_MEASURED,
    PLAIN,
    SHOWN_GROUPS,
    TOTAL,
    Column,
    Row,
    Section,
    group_ranks,
    labels_of,
)
from vllm_memprof.units import format_bytes, format_gib

#: Moments at which a reader wants the whole device: the latest of them that a rank reached.
_DEVICE_MOMENTS = ("warm_up", "kv_cache_alloc", "profile_run", "weight_load", "device_init")


#: Parts of torch's segments, which two rows divide in another way.
_SEGMENTS = "allocated and cached"
_READINGS = {"components": "the runtime's counters", "processes": "the driver's list of processes"}


def device_sections(report: Report, wide: bool) -> list[Section]:
    """The device by owner at the end of the start-up, or as far as a rank got; owners without bytes in a note."""
    found = []
    moments: dict[str, tuple[str, DeviceMemory]] = {}
    for rank in report.ranks:
        found_at = ((phase, device_after(rank.phases, phase)) for phase in _DEVICE_MOMENTS)
        for phase, memory in found_at:
            if memory is not None:
                moments[rank.label] = phase, memory
                break
    known = [rank for rank in report.ranks if rank.label in moments]
    groups = group_ranks(known, lambda rank: repr(moments[rank.label]))
    for members in groups[:SHOWN_GROUPS]:
        phase, memory = moments[members[0].label]
        columns = [
            Column("Owner", right=False),
            Column("GiB"),
            Column("bytes"),
            Column("how", right=False),
        ]
        columns += [Column("from", right=False)] if wide else []
        title = f"Device memory after {phase}, {labels_of(members)}"
        found.append(Section(title, columns, _rows(memory, wide), _notes(memory, members)))
    return found


def _rows(memory: DeviceMemory, wide: bool) -> list[Row]:
    """Owners that hold something, with what they are made of; the books are closed by the last two rows."""
    rows = []
    for row in memory.rows:
        if row.bytes:
            rows.append(_row(row, wide))
        parts = [part for part in memory.parts if part.bytes and part.part_of == row.component]
        rows += [_row(part, wide) for part in parts if len(parts) > 1]
        if row.component == "cached":
            rows += [
                _row(part, wide)
                for part in memory.parts
                if part.bytes and part.part_of == _SEGMENTS
            ]
    unaccounted = memory.unaccounted_bytes
    blank = [""] if wide else []
    rows.append(
        Row(
            ["unaccounted", format_gib(unaccounted, 4), format_bytes(unaccounted), "", *blank],
            style=MUTED,
        )
    )
    total = None
    if unaccounted is not None:
        total = sum(row.bytes for row in memory.rows if row.bytes is not None) + unaccounted
    rows.append(
        Row(["= device total", format_gib(total, 4), format_bytes(total), "", *blank], style=TOTAL)
    )
    return rows


def _row(row: ComponentRow, wide: bool) -> Row:
    is_part = row.part_of is not None
    title = f"of which {row.component}" if is_part else row.component
    cells = [
        title,
        format_gib(row.bytes, 4),
        format_bytes(row.bytes),
        row.how,
        *([row.source] if wide else []),
    ]
    return Row(cells, int(is_part), MUTED if is_part else PLAIN)


def _notes(memory: DeviceMemory, members: list[RankReport]) -> list[str]:
    empty = [row.component for row in memory.rows if row.bytes == 0]
    unknown = [row.component for row in memory.rows if row.bytes is None]
    notes = [f"0 bytes: {', '.join(empty)}"] if empty else []
    notes += [f"{NOT_MEASURED}: {', '.join(unknown)}"] if unknown else []
    notes += [
        f"{_READINGS.get(what, what)}: {NOT_MEASURED} ({why})"
        for what, why in members[0].unread.items()
    ]
    left = [rank.spare_bytes for rank in members if rank.spare_bytes is not None]
    return notes + (
        [f"headroom at the worst moment seen: {format_gib(min(left), 4)} GiB"] if left else []
    )
