"""``memprof report``: a recorded run, printed or written again in any format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_memprof.cli.show import Lang, check_format, pieces, write_out
from vllm_memprof.sources import build_run

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    format_name: Annotated[
        str,
        typer.Option("--format", metavar="F", help="table, markdown, html, json, csv, trace."),
    ] = "table",
    lang: Lang = "en",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write to a file instead of stdout."),
    ] = None,
) -> None:
    """Print the report of a recorded run.

    html is one self-contained page. csv has one row per rank, phase, edge and component. trace
    opens in Perfetto (ui.perfetto.dev): phases as slices, owners of device memory as counters, one
    process per rank.
    """
    check_format(format_name, output, lang=lang)
    write_out(
        pieces(build_run(run_dir), format_name, to_file=output is not None, lang=lang), output
    )
