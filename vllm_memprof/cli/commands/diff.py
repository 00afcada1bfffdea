"""``memprof diff``: why two runs have another KV cache, term by term."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_memprof.cli.show import DRAWN, Lang, Output, check_format, command_app, write_result
from vllm_memprof.sources import read_report

FORMATS = (*DRAWN, "json")


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="The run to start from.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The run to compare with it.")],
    format_name: Annotated[
        str, typer.Option("--format", metavar="F", help="table, markdown, html, json.")
    ] = "table",
    lang: Lang = "en",
    output: Output = None,
) -> None:
    """Show why the KV cache of B differs from that of A: causes, largest first; they add up to it.

    A and B are run folders, report.json files, or logs as explain reads them; a folder that holds
    run folders, or a quoted glob, is one deployment on several hosts. FILE#2 is the second
    engine start of a log, or the second report of a JSON array.

    Both budgets are written in the same quantities, so that releases with different equations can
    be compared. A quantity that both equations subtract is a cause by the difference of its size,
    one that a single equation subtracts by its whole size. Every difference is B - A. Figures of
    logs are exact to their last printed digit, and the report says so.

    Exit status 0: compared, whatever differs. 2: a wrong argument. 3: a run cannot be read.
    """
    check_format(format_name, output, lang=lang, formats=FORMATS)
    from vllm_memprof.compare.diff import diff_reports

    write_result(diff_reports(read_report(a), read_report(b)), format_name, output, lang)


app = command_app(diff)
