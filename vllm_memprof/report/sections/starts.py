"""The table that compares several engine starts: a row each, before their reports."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.document import BAD, PLAIN, Head, Row, Section
from vllm_memprof.report.sections.base import least_grant, number
from vllm_memprof.text import text
from vllm_memprof.units import format_bytes, format_gib

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
    wide = width >= _WIDE
    files = {report.run.id.rpartition("#")[0] or report.run.id for report in reports}
    rows = [_row(report, len(files) == 1, wide) for report in reports[:LISTED_STARTS]]
    columns = [
        Head(text("Start"), right=False),
        Head(text("Utilization")),
        *([Head(text("Requested")), Head(text("Weights"))] if wide else []),
        *([Head(text("Graphs"))] if wide else []),
        Head(text("KV cache")),
        Head(text("KV tokens")),
        Head(text("Equation"), right=False),
        Head(text("Result"), right=False),
    ]
    notes: list[str] = [text("GiB; of several ranks, the one with the least KV cache")]
    if (more := len(reports) - LISTED_STARTS) > 0:
        notes.append(text("{count} more engine starts", count=more))
    return Section(text("{count} engine starts", count=len(reports)), columns, rows, notes)


def _row(report: Report, one_file: bool, wide: bool) -> Row:
    rank = least_grant(report.ranks) or next(iter(report.ranks), None)
    name = f"#{report.run.id.rpartition('#')[2]}" if one_file else report.run.id
    if rank is None:
        return Row([name, "-", *(["-", "-", "-"] if wide else []), "-", "-", "-", _result(report)])
    budget = rank.budget
    terms = (budget.requested_bytes, _figure(rank, "weights"), _figure(rank, "graph"))
    failed = report.run.status not in ("ok", "truncated")
    cells = [
        name,
        number(budget.gpu_memory_utilization),
        *([format_gib(size) for size in terms] if wide else []),
        format_gib(budget.engine_kv_cache_bytes),
        format_bytes(rank.kv.tokens),
        budget.equation or "-",
        _result(report),
    ]
    return Row(cells, style=BAD if failed else PLAIN)


def _figure(rank: RankReport, name: str) -> int | None:
    value = rank.figures.get(f"{name}_bytes")
    return None if value is None else int(value)


def _result(report: Report) -> str:
    """Return how a start ended, in a few words; of one that did not fail, its equation."""
    if report.run.status == "oom":
        return text("out of memory")
    if report.run.status == "failed":
        return report.run.exit_reason or text("failed")
    results = {rank.budget.balanced for rank in report.ranks}
    if False in results:
        return text("equation differs")
    if results == {True}:
        return text("equation equal")
    return text("not recomputed")
