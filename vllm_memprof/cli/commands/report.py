"""``memprof report``: a recorded run, printed or written again in any format."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_memprof.cli.show import Lang, Output, check_format, command_app, pieces, write_out
from vllm_memprof.sources import build_runs


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="The folder of a run; those of a deployment, a folder that holds them, or a glob.",
        ),
    ],
    deployment: Annotated[
        str | None,
        typer.Option(
            "--deployment", metavar="NAME", help="Which one, where the folders are of several."
        ),
    ] = None,
    format_name: Annotated[
        str,
        typer.Option("--format", metavar="F", help="table, markdown, html, json, csv, trace."),
    ] = "table",
    lang: Lang = "en",
    output: Output = None,
) -> None:
    """Print the report of a recorded run, or one report of the runs of a deployment.

    A deployment on several hosts leaves a run folder per host. Their clocks are brought onto that
    of the first host, and a host whose folder is missing or cannot be read is named.

    html is one self-contained page. csv has one row per rank, phase, edge and component. trace
    opens in Perfetto (ui.perfetto.dev): phases as slices, owners of device memory as counters, one
    process per rank.
    """
    check_format(format_name, output, lang=lang)
    found = build_runs(runs, deployment)
    write_out(pieces(found, format_name, output is not None, lang), output)


app = command_app(report)
