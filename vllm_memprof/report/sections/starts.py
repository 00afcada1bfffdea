"""The table that compares several engine starts: a row each, before their reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.document import BAD, PLAIN, Document, Section
from vllm_memprof.report.sections.base import draw, least_grant
from vllm_memprof.tables import Paper
from vllm_memprof.text import text

#: Starts that have a row.
LISTED_STARTS = 60
#: Width of a line from which on the terms have columns.
_WIDE = 100


class _EngineStart(NamedTuple):
    """An engine start, with its rank with the least KV cache."""

    report: Report
    rank: RankReport | None


def starts_section(reports: Sequence[Report], width: int) -> Section:
    """Return a row per engine start, of its rank with the least KV cache.

    Args:
        reports: of the starts, in their order.
        width: characters that a line has; narrow tables leave out the terms.
    """
    files = {report.run.id.rpartition("#")[0] or report.run.id for report in reports}

    def name(start: _EngineStart) -> str:
        run = start.report.run.id
        return f"#{run.rpartition('#')[2]}" if len(files) == 1 else run

    def look(start: _EngineStart) -> str:
        well = start.report.run.status in ("ok", "truncated") or start.rank is None
        return PLAIN if well else BAD

    def result(start: _EngineStart) -> str:
        """Return how it ended, in a few words; of one that did not fail, its equation."""
        run = start.report.run
        if run.status == "oom":
            return text("out of memory")
        if run.status in ("failed", "terminated"):
            return run.exit_reason or text("failed")
        results = {rank.budget.balanced for rank in start.report.ranks}
        if False in results:
            return text("equation differs")
        return text("equation equal") if results == {True} else text("not recomputed")

    more = max(0, len(reports) - LISTED_STARTS) or None
    rows = [
        _EngineStart(each, least_grant(each.ranks) or next(iter(each.ranks), None))
        for each in reports[:LISTED_STARTS]
    ]
    figures = {"count": len(reports), "more": more}
    lines = Paper(width >= _WIDE)
    return draw(lines, "starts", rows, figures, look=look, name=name, result=result)


def starts_document(reports: Sequence[Report], width: int) -> Document:
    """Return the table that the reports of several engine starts follow."""
    section = starts_section(reports, width)
    return Document(kind="starts", title=section.title, head=[], sections=[section])
