"""Communicators: who they connect, what sizes their buffers, when they came and what came with them."""

from __future__ import annotations

from vllm_memprof.accounting.communicators import CommunicatorUse, communicators_of
from vllm_memprof.accounting.model import Report
from vllm_memprof.report.sections.base import (
    MODELLED_MARK,
    SHOWN_GROUPS,
    Column,
    Row,
    Section,
    group_ranks,
    labels_of,
)
from vllm_memprof.units import MIB, format_mib

#: Ranks of a communicator that are listed one by one.
_LISTED_RANKS = 4


def communicator_sections(report: Report) -> list[Section]:
    """Communicators by rank, in the order of their first collectives; ranks that have the same share a table."""
    known = [rank for rank in report.ranks if communicators_of(rank)]
    groups = group_ranks(known, lambda rank: repr(communicators_of(rank)))
    found = []
    for members in groups[:SHOWN_GROUPS]:
        rows = [_row(each) for each in communicators_of(members[0])]
        columns = [
            Column("Group", right=False),
            Column("Ranks", right=False),
            Column("Buffers", right=False),
        ]
        columns += [Column("by", right=False), Column("First used in", right=False)]
        columns += [Column(f"Seen, MiB{f' {MODELLED_MARK}' if report.run.simulated else ''}")]
        found.append(Section(f"Communicators, {labels_of(members)}", columns, rows))
    return found


def _row(each: CommunicatorUse) -> Row:
    buffers = "-" if each.buffer_bytes is None else f"2 x {each.buffer_bytes // 2 // MIB} MiB"
    by = {"default": "HCCL's default", None: "-"}.get(each.buffer_source, each.buffer_source or "-")
    place = each.phase or "-"
    return Row([" ".join(each.names) or "-", _ranks(each.ranks), buffers, by,
                f"{place}, {each.op}" if each.op else place, format_mib(each.seen_bytes) or "0"])  # fmt: skip


def _ranks(ranks: list[int] | None) -> str:
    if ranks is None:
        return "-"
    if len(ranks) <= _LISTED_RANKS:
        return ",".join(str(rank) for rank in ranks)
    return f"{ranks[0]}..{ranks[-1]} ({len(ranks)})"
