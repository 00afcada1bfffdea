"""The device by owner."""

from __future__ import annotations

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.readings.quantities import HOW_TITLES
from vllm_memprof.document import MUTED, NOT_MEASURED, TOTAL, Row, Section
from vllm_memprof.record.spans import ComponentRow, DeviceMemory, device_after
from vllm_memprof.tables import COUNT, GIB4, SIZES, Column, Look, alike, table, wide_only
from vllm_memprof.text import text

#: Moments at which a reader wants the whole device: the latest of them that a rank reached.
_DEVICE_MOMENTS = ("warm_up", "kv_cache_alloc", "profile_run", "weight_load", "device_init")
#: Parts of torch's segments, which two rows divide in another way.
_SEGMENTS = "allocated and reserved_not_allocated"
_READINGS = {
    "components": text("the runtime's counters"),
    "processes": text("the driver's list of processes"),
}


_DEVICE = (
    Column(
        "Owner",
        lambda row: text("of which {name}", name=row.component) if row.part_of else row.component,
    ),
    *SIZES[1:],
    Column("How", lambda row: HOW_TITLES.get(row.how, row.how)),
    Column("Read from", "source", when=wide_only),
)


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

    def draw(rank: RankReport, labels: str) -> list[Section]:
        phase, memory = moments[rank.label]
        title = text("Device memory after {phase}, {labels}", phase=phase, labels=labels)
        rows, notes = _rows(memory, wide), _notes(memory, rank)

        def look(row: ComponentRow) -> Look:
            return Look() if row.part_of is None else Look(MUTED, indent=1)

        return [table(title, _DEVICE, rows, notes, wide, look=look)]

    known = [rank for rank in report.ranks if rank.label in moments]
    return alike(known, draw, lambda rank: repr(moments[rank.label]))


def _rows(memory: DeviceMemory, wide: bool) -> list[ComponentRow | Row]:
    """Return the owners that hold something, with their parts; all but the parts add up."""
    rows: list[ComponentRow | Row] = []
    for row in memory.rows:
        if row.bytes:
            rows.append(row)
        parts = [part for part in memory.parts if part.bytes]
        rows += [
            each for each in parts if each.part_of == row.component and each.bytes != row.bytes
        ]
        if row.component == "reserved_not_allocated":
            rows += [part for part in parts if part.part_of == _SEGMENTS]
    rest = memory.unexplained_bytes
    total = None
    if rest is not None:
        total = sum(row.bytes for row in memory.rows if row.bytes is not None) + rest
    how = HOW_TITLES.get(memory.unexplained_how, memory.unexplained_how) if rest is not None else ""
    source = [text("every remainder together")] if wide else []
    return [
        *rows,
        Row([text("unexplained"), GIB4(rest), COUNT(rest), how, *source], style=MUTED),
        *(part for part in memory.remainders() if part.bytes),
        Row(
            [text("device total"), GIB4(total), COUNT(total), "", *[""] * wide],
            style=TOTAL,
            mark="=",
        ),
    ]


def _notes(memory: DeviceMemory, rank: RankReport) -> list[str]:
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
        for what, why in rank.unread.items()
    ]
    return notes
