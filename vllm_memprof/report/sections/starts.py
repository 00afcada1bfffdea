"""The table that compares several engine starts: a row each, before their reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.document import BAD, PLAIN, Document, Section
from vllm_memprof.report.sections.base import least_grant, words_of
from vllm_memprof.tables import COUNT, GIB, Column, number, table, wide_only
from vllm_memprof.text import text

#: Starts that have a row.
LISTED_STARTS = 60
#: Width of a line from which on the terms have columns.
_WIDE = 100


def starts_section(reports: Sequence[Report], width: int) -> Section:
    """Return a row per engine start, of its rank with the least KV cache.

    Args:
        reports: of the starts, in their order.
        width: characters that a line has; narrow tables leave out the terms.
    """
    files = {report.run.id.rpartition("#")[0] or report.run.id for report in reports}

    def name(report: Report) -> str:
        return f"#{report.run.id.rpartition('#')[2]}" if len(files) == 1 else report.run.id

    def look(report: Report) -> str:
        well = report.run.status in ("ok", "truncated") or not report.ranks
        return PLAIN if well else BAD

    more = max(0, len(reports) - LISTED_STARTS) or None
    title, notes = words_of("starts", {"count": len(reports), "more": more})
    columns = (Column("Start", name), *_STARTS)
    return table(title, columns, reports[:LISTED_STARTS], notes, width >= _WIDE, look=look)


def starts_document(reports: Sequence[Report], width: int) -> Document:
    """Return the table that the reports of several engine starts follow."""
    section = starts_section(reports, width)
    return Document(kind="starts", title=section.title, head=[], sections=[section], verdict="")


def _of_rank(read: Callable[[RankReport], object]) -> Callable[[Report], object]:
    """Return what reads the rank with the least KV cache."""

    def value(report: Report) -> object:
        rank = least_grant(report.ranks) or next(iter(report.ranks), None)
        return None if rank is None else read(rank)

    return value


def _result(report: Report) -> str:
    """Return how a start ended, in a few words; of one that did not fail, its equation."""
    if report.run.status == "oom":
        return text("out of memory")
    if report.run.status == "failed":
        return report.run.exit_reason or text("failed")
    results = {rank.budget.balanced for rank in report.ranks}
    if False in results:
        return text("equation differs")
    return text("equation equal") if results == {True} else text("not recomputed")


_STARTS = (
    Column("Utilization", _of_rank(lambda rank: rank.budget.gpu_memory_utilization), number),
    Column("Requested", _of_rank(lambda rank: rank.budget.requested_bytes), GIB, wide_only),
    Column("Weights", _of_rank(lambda rank: rank.figures.get("weights_bytes")), GIB, wide_only),
    Column("Graphs", _of_rank(lambda rank: rank.figures.get("graph_bytes")), GIB, wide_only),
    Column("KV cache", _of_rank(lambda rank: rank.budget.engine_kv_cache_bytes), GIB),
    Column("KV tokens", _of_rank(lambda rank: rank.kv.tokens), COUNT),
    Column("Equation", _of_rank(lambda rank: rank.budget.equation)),
    Column("Result", _result),
)
