"""``memprof diff``: why two runs have another KV cache, term by term."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_memprof.cli.show import printed, write_out
from vllm_memprof.errors import UsageError
from vllm_memprof.sources import read_report

if TYPE_CHECKING:
    from vllm_memprof.compare.diff import Diff

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

FORMATS = ("table", "markdown", "json")


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="The run to start from.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The run to compare with it.")],
    format_name: Annotated[
        str, typer.Option("--format", metavar="F", help="table, markdown, json.")
    ] = "table",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write to a file instead of stdout."),
    ] = None,
) -> None:
    """Show why the KV cache of B differs from that of A: causes, largest first; they add up to it.

    A and B are run folders, report.json files, or logs as explain reads them. FILE#2 is the second
    engine start of a log, or the second report of a JSON array.

    Both budgets are written in the same quantities, so that releases with different equations can
    be compared. A quantity that both equations subtract is a cause by the difference of its size,
    one that a single equation subtracts by its whole size. Every difference is B - A. Figures of
    logs are exact to their last printed digit, and the report says so.

    Exit status 0: compared, whatever differs. 2: a wrong argument. 3: a run cannot be read.
    """
    if format_name not in FORMATS:
        raise UsageError(f"--format {format_name!r} is not known", hint=", ".join(FORMATS))
    from vllm_memprof.compare.diff import diff_reports

    write_out(
        render(diff_reports(read_report(a), read_report(b)), format_name, output is not None),
        output,
    )


def render(found: Diff, format_name: str, to_file: bool = False) -> str:
    """The comparison as text, ending in a newline."""
    from vllm_memprof.report.diff import render_diff_json, render_diff_markdown, render_diff_table

    if format_name == "json":
        return render_diff_json(found)
    if format_name == "markdown":
        return render_diff_markdown(found)
    return printed(render_diff_table(found), to_file)
