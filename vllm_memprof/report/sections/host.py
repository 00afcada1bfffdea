"""Host memory by owner, by phase, and its limits."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.model import HostMemory, RankReport
from vllm_memprof.accounting.titles import TITLES, how_title
from vllm_memprof.document import Section
from vllm_memprof.report.sections.base import Sheet, draw
from vllm_memprof.text import join
from vllm_memprof.units import minus

_TITLES = TITLES["host_owners"]


def of_worker(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return the host memory of a worker, by owner and by phase."""
    yield from _owners(sheet, rank.host_memory)
    if rows := [span for span in rank.phases if span.after and span.after.host_shared_bytes]:
        yield draw(sheet, "host_phases", rows)


def of_host(sheet: Sheet) -> Iterator[Section]:
    """Return the memory of each host, all processes, its limits, and what is asked for."""
    for memory in sheet.report.host_memory:
        yield from _owners(sheet, memory)
        yield draw(sheet, "host_limits", memory.limits)
        if memory.asks:
            yield draw(sheet, "host_asks", memory.asks, title=lambda ask: _TITLES[ask.owner])


def _owners(sheet: Sheet, memory: HostMemory) -> Iterator[Section]:
    if memory.rows:
        figures = {**vars(memory), "unexplained_bytes": memory.unexplained_bytes}
        yield draw(
            sheet,
            "host_memory",
            sorted(memory.rows, key=lambda row: -row.bytes),
            figures,
            title=lambda row: join(": ", map(_TITLES.get, row.owner.split(":"))),
            rounding=lambda row: row.tensor_bytes and minus(row.bytes, row.tensor_bytes),
            how_read=how_title,
        )
