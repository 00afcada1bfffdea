"""Communicators: their ranks, their buffers, their first use and the growth at it."""

from __future__ import annotations

from vllm_memprof.accounting.communicators import CommunicatorUse, communicators_of
from vllm_memprof.accounting.model import Report
from vllm_memprof.report.document import Column, Row, Section
from vllm_memprof.report.sections.base import SHOWN_GROUPS, group_ranks, labels_of, modelled
from vllm_memprof.text import text
from vllm_memprof.units import MIB, format_mib

#: Ranks of a communicator that are listed one by one.
_LISTED_RANKS = 4


def communicator_sections(report: Report) -> list[Section]:
    """Return communicators by rank, in the order of their first collectives.

    Ranks that have the same share a table.
    """
    known = [rank for rank in report.ranks if communicators_of(rank)]
    columns = [
        Column(text("Group"), right=False),
        Column(text("Ranks"), right=False),
        Column(text("Buffers"), right=False),
        Column(text("Size set by"), right=False),
        Column(text("First used in"), right=False),
        Column(modelled(text("Growth at first use, MiB"), report.run.simulated)),
    ]
    return [
        Section(
            text("Communicators, {labels}", labels=labels_of(members)),
            columns,
            [_row(each) for each in communicators_of(members[0])],
        )
        for members in group_ranks(known, lambda rank: repr(communicators_of(rank)))[:SHOWN_GROUPS]
    ]


def _row(each: CommunicatorUse) -> Row:
    ranks = each.ranks
    if ranks is None:
        listed = "-"
    elif len(ranks) <= _LISTED_RANKS:
        listed = ",".join(map(str, ranks))
    else:
        listed = f"{ranks[0]}..{ranks[-1]} ({len(ranks)})"
    buffers = "-" if each.buffer_bytes is None else f"2 x {each.buffer_bytes // 2 // MIB} MiB"
    source = text("HCCL's default") if each.buffer_source == "default" else each.buffer_source
    place = each.phase or "-"
    used = f"{place}, {each.op}" if each.op else place
    names = " ".join(each.names) or "-"
    return Row([names, listed, buffers, source or "-", used, format_mib(each.seen_bytes) or "0"])
