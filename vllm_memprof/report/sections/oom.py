"""The runtime's counters at the moment an allocation failed."""

from __future__ import annotations

from vllm_memprof.accounting.model import Report
from vllm_memprof.report.document import Column, Row, Section
from vllm_memprof.report.sections.base import BYTES, GIB, SHOWN_GROUPS, group_ranks, labels_of
from vllm_memprof.text import text
from vllm_memprof.units import format_bytes, format_gib


def oom_sections(report: Report) -> list[Section]:
    """Return the counters of each rank that ran out of memory, as far as they were recorded."""
    counters = {
        rank.label: rank.oom.components
        for rank in report.ranks
        if rank.oom is not None and rank.oom.components
    }
    ranks = [rank for rank in report.ranks if rank.label in counters]
    columns = [
        Column(text("Module"), right=False),
        Column(GIB),
        Column(BYTES),
        Column(text("peak, GiB")),
    ]
    note = text(
        "APP: torch, operator workspace, ATB and all else that this process asked ACL for; "
        "HCCL: communicators"
    )
    found = []
    for members in group_ranks(ranks, lambda rank: repr(counters[rank.label]))[:SHOWN_GROUPS]:
        rows = [
            Row(
                [
                    name,
                    format_gib(row["bytes"], 4),
                    format_bytes(row["bytes"]),
                    format_gib(row["peak_bytes"], 4),
                ]
            )
            for name, row in sorted(
                counters[members[0].label].items(), key=lambda entry: -entry[1]["bytes"]
            )
        ]
        title = text(
            "Device memory when an allocation failed, by the runtime's counters, {labels}",
            labels=labels_of(members),
        )
        found.append(Section(title, columns, rows, [note]))
    return found
