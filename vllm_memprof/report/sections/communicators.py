"""Communicators: their ranks, their buffers, their first use and the growth at it."""

from __future__ import annotations

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.owners.outside_torch import CommunicatorUse, communicators_of
from vllm_memprof.document import Section
from vllm_memprof.tables import Column, alike, grown_mib, table
from vllm_memprof.text import text
from vllm_memprof.units import MIB

#: Ranks of a communicator that are listed one by one.
_LISTED_RANKS = 4


def _ranks(ranks: list[int] | None) -> str:
    if ranks is None:
        return "-"
    if len(ranks) <= _LISTED_RANKS:
        return ",".join(map(str, ranks))
    return f"{ranks[0]}..{ranks[-1]} ({len(ranks)})"


def _source(each: CommunicatorUse) -> str | None:
    return text("HCCL's default") if each.buffer_source == "default" else each.buffer_source or None


def _buffers(size: int | None) -> str:
    return "-" if size is None else f"2 x {size // 2 // MIB} MiB"


_COMMUNICATORS = (
    Column("Group", lambda each: " ".join(each.names) or "-"),
    Column("Ranks", "ranks", _ranks, right=False),
    Column("Buffers", "buffer_bytes", _buffers, right=False),
    Column("Size set by", _source),
    Column("First used in", lambda each: ", ".join(filter(None, (each.phase or "-", each.op)))),
    Column("Growth at first use, MiB", "seen_bytes", grown_mib, marked=True),
)


def communicator_sections(report: Report) -> list[Section]:
    """Return communicators by rank, in the order of their first collectives.

    Ranks that have the same share a table.
    """

    def draw(rank: RankReport, labels: str) -> list[Section]:
        title = text("Communicators, {labels}", labels=labels)
        rows = communicators_of(rank)
        return [table(title, _COMMUNICATORS, rows, simulated=report.run.simulated)]

    known = [rank for rank in report.ranks if communicators_of(rank)]
    return alike(known, draw, lambda rank: repr(communicators_of(rank)))
