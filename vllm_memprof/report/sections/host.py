"""Host memory by owner, and its limits."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.model import HostMemory, RankReport
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.document import Section
from vllm_memprof.report.sections.base import Sheet, draw
from vllm_memprof.text import Text, join
from vllm_memprof.units import minus


def owner_title(owner: str) -> Text:
    """Return the name of ``kind:owner`` in a report."""
    kind, _, name = owner.partition(":")
    titles = TITLES["host_kinds"].get(kind), TITLES["host_owners"].get(name, name or None)
    return join(": ", titles)


def of_worker(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return the host memory of a worker."""
    yield from _owners(sheet, rank.host_memory, {})
    rows = [span for span in rank.phases if span.after and span.after.host_shared_bytes]
    if rows:
        yield draw(sheet, "host_phases", rows)


def of_host(sheet: Sheet) -> Iterator[Section]:
    """Return the memory of each host, all processes, and its limits with what is asked for."""
    for memory in sheet.report.host_memory:
        yield from _owners(sheet, memory, {"of_host": True, **vars(memory)})
        rows = []
        for limit in memory.limits:
            asks = [ask for ask in memory.asks if limit.kind in ask.limits]
            titles = dict.fromkeys(TITLES["host_owners"].get(ask.owner, ask.owner) for ask in asks)
            asked = sum(ask.bytes for ask in asks) or None
            rows.append({**vars(limit), "asked": asked, "asks": join(", ", titles)})
        yield draw(sheet, "host_limits", [row for row in rows if row["bytes"] is not None])


def _owners(sheet: Sheet, memory: HostMemory, figures: dict[str, object]) -> Iterator[Section]:
    if memory.rows:
        yield draw(
            sheet,
            "host_memory",
            sorted(memory.rows, key=lambda row: -row.bytes),
            figures | {"unexplained_bytes": memory.unexplained_bytes},
            owner=lambda row: owner_title(row.owner),
            rounding=lambda row: minus(row.tensor_bytes and row.bytes, row.tensor_bytes),
            how_read=lambda row: TITLES["how"].get(row.how, row.how),
        )
