"""``memprof report``: a recorded run, printed or written again in any format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_memprof.cli.show import build, check_format, render, write_out

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    format_name: Annotated[
        str,
        typer.Option("--format", metavar="F", help="table, markdown, json, html; csv and trace are not available yet."),
    ] = "table",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to a file instead of stdout.")
    ] = None,
) -> None:
    """Print the report of a recorded run."""
    check_format(format_name, output)
    text = render(build(run_dir), format_name, to_file=output is not None)
    write_out(text, output)
