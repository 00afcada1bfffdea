"""Documents as a file gets them: fixed width, no colour, no blanks at the ends of lines."""

from __future__ import annotations

import io
from functools import partial

from rich.console import Console, RenderableType

from tests.support.page import Page
from vllm_memprof.accounting import Report
from vllm_memprof.check.document import check_document
from vllm_memprof.check.outcomes import CheckResult
from vllm_memprof.compare.diff import Diff
from vllm_memprof.compare.document import diff_document
from vllm_memprof.report.files import report_json
from vllm_memprof.report.html import render_html
from vllm_memprof.report.table import render_table


def table(report: Report, width: int, encoding: str = "utf-8", lang: str = "en") -> str:
    return printed(render_table(report, lang=lang), width, encoding)


def render_json(report: Report) -> str:
    """Return the report as JSON text; refuse figures that JSON cannot hold (NaN)."""
    return "".join(report_json(report))


def diff_table(diff: Diff, width: int, encoding: str = "utf-8") -> str:
    return printed(render_table(partial(diff_document, diff)), width, encoding)


def check_table(result: CheckResult, width: int, encoding: str = "utf-8") -> str:
    return printed(render_table(partial(check_document, result)), width, encoding)


def printed(what: RenderableType, width: int, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=stream, width=width, no_color=True, legacy_windows=False, _environ={})
    console.print(what)
    stream.flush()
    return "".join(line.rstrip() + "\n" for line in raw.getvalue().decode(encoding).splitlines())


def outline(report: Report) -> str:
    """Return the page without its figures: headings, and tables with their columns."""
    return Page(render_html(report)).outline()
