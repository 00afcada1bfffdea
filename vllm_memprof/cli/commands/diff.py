"""``memprof diff``: why two runs have another KV cache, term by term."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_memprof.cli import complete
from vllm_memprof.cli.runs import Run, find_run, run_before
from vllm_memprof.cli.show import DRAWN, Lang, Output, check_format, command_app, write_result
from vllm_memprof.sources import read_report

FORMATS = (*DRAWN, "json")


def diff(
    a: Run = None,
    b: Annotated[
        str | None,
        typer.Argument(
            metavar="B",
            help="The run to compare with it. One run alone is compared with the newest before it.",
            autocompletion=complete.runs,
            show_default=False,
        ),
    ] = None,
    format_name: Annotated[
        str, typer.Option("--format", metavar="F", help="table, markdown, html, json.")
    ] = "table",
    lang: Lang = "en",
    output: Output = None,
) -> None:
    """Show why the KV cache of two runs differs: causes, largest first; they add up to it.

    RUN and B are run folders, report.json files, or logs as explain reads them; a folder that holds
    run folders, or a quoted glob, is one deployment on several hosts. FILE#2 is the second
    engine start of a log, or the second report of a JSON array.

    Both budgets are written in the same quantities, so that releases with different equations can
    be compared. A quantity that both equations subtract is a cause by the difference of its size,
    one that a single equation subtracts by its whole size. Every difference is
    the second run minus the first; of one run alone, that run minus the one before it. Figures of
    logs are exact to their last printed digit, and the report says so.

    Exit status 0: compared, whatever differs. 2: a wrong argument. 3: a run cannot be read.
    """
    check_format(format_name, output, lang=lang, formats=FORMATS)
    from vllm_memprof.compare.diff import diff_reports
    from vllm_memprof.compare.document import diff_document

    first = find_run(a)
    first, second = (run_before(first), first) if b is None else (first, find_run(b))
    found = diff_reports(read_report(first), read_report(second))
    write_result(found, diff_document, format_name, output, lang)


app = command_app(diff)
