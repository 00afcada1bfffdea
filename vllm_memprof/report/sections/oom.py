"""Who held the device when an allocation failed, by the runtime's counters."""

from __future__ import annotations

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.report.sections.base import (
    SHOWN_GROUPS,
    Column,
    Row,
    Section,
    group_ranks,
    labels_of,
)
from vllm_memprof.units import format_bytes, format_gib


def oom_sections(report: Report) -> list[Section]:
    """The counters of each rank that ran out of memory, as far as they were read or written."""
    failed = [rank for rank in report.ranks if rank.oom is not None and rank.oom.components]
    groups = group_ranks(failed, lambda rank: repr(rank.oom and rank.oom.components))
    return [_section(members) for members in groups[:SHOWN_GROUPS]]


def _section(members: list[RankReport]) -> Section:
    assert members[0].oom is not None
    counters = members[0].oom.components or {}
    rows = [
        Row(
            [
                name,
                format_gib(row["bytes"], 4),
                format_bytes(row["bytes"]),
                format_gib(row["peak_bytes"], 4),
            ]
        )
        for name, row in sorted(counters.items(), key=lambda entry: -entry[1]["bytes"])
    ]
    columns = [Column("Module", right=False), Column("GiB"), Column("bytes"), Column("peak, GiB")]
    notes = [
        "APP: torch, operator workspace, ATB and all else that this process asked ACL for; HCCL: communicators"
    ]
    return Section(
        f"At the OOM, by the runtime's counters, {labels_of(members)}", columns, rows, notes
    )
