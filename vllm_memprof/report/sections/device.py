"""The device by owner."""

from __future__ import annotations

from vllm_memprof.ledger.model import DeviceMemory, RankReport, Report
from vllm_memprof.report.sections.base import MUTED, SHOWN_GROUPS, TOTAL, Column, Row, Section, group_ranks, labels_of
from vllm_memprof.units import format_bytes, format_gib

#: Moments at which a reader wants the whole device: the latest of them that a rank reached.
_DEVICE_MOMENTS = ("warm_up", "kv_cache_alloc", "profile_run", "weight_load", "device_init")


def device_sections(report: Report) -> list[Section]:
    """The device by owner at the end of the start-up, or as far as a rank got."""
    found = []
    known = [(rank, memory) for rank in report.ranks if (memory := _device_moment(rank)) is not None]
    moments = {rank.label: memory for rank, memory in known}
    groups = group_ranks([rank for rank, _ in known], lambda rank: repr(moments[rank.label]))
    for members in groups[:SHOWN_GROUPS]:
        memory = moments[members[0].label]
        rows = [Row([row.component, format_gib(row.bytes, 4), format_bytes(row.bytes), row.how]) for row in memory.rows]
        unaccounted = memory.unaccounted_bytes
        rows.append(Row(["unaccounted", format_gib(unaccounted, 4), format_bytes(unaccounted), ""], style=MUTED))
        total = None
        if unaccounted is not None:
            total = sum(row.bytes for row in memory.rows if row.bytes is not None) + unaccounted
        rows.append(Row(["= device total", format_gib(total, 4), format_bytes(total), ""], style=TOTAL))
        columns = [Column("Owner", right=False), Column("GiB"), Column("bytes"), Column("how", right=False)]
        title = f"Device memory {memory.edge} {memory.phase}, {labels_of(members)}"
        left = [rank.headroom_bytes for rank in members if rank.headroom_bytes is not None]
        notes = [f"headroom at the worst moment seen: {format_gib(min(left), 4)} GiB"] if left else []
        found.append(Section(title, columns, rows, notes))
    return found


def _device_moment(rank: RankReport) -> DeviceMemory | None:
    for phase in _DEVICE_MOMENTS:
        for memory in reversed(rank.device_memory):
            if memory.phase == phase and memory.edge == "after" and memory.unaccounted_bytes is not None:
                return memory
    return None
