"""``memprof report``: a recorded run, printed or written again in any format."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_memprof.cli import complete
from vllm_memprof.cli.runs import find_run
from vllm_memprof.cli.show import (
    Full,
    Lang,
    List,
    Output,
    SectionNames,
    check_format,
    command_app,
    pieces,
    section_names,
    shown,
    write_out,
)
from vllm_memprof.sources import build_runs


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="A run folder, or a part of its name in reports/; those of a deployment, a folder "
            "that contains them, or a quoted glob. Default: the newest run in reports/.",
            autocompletion=complete.runs,
            show_default=False,
        ),
    ] = None,
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
    full: Full = False,
    section: SectionNames = None,
    names: List = False,
    lang: Lang = "en",
    output: Output = None,
) -> None:
    """Print the report of a recorded run, or one report of the runs of a deployment.

    The first screen has the answer: what fits, what failed, where the memory is, what to do. --full
    has every section, --section NAME one of them.

    A deployment on several hosts leaves a run folder per host. Their clocks are brought onto that
    of the first host, and a host whose folder is missing or cannot be read is named.

    html is one self-contained page. csv has one row per rank, phase, edge and component. trace
    opens in Perfetto (ui.perfetto.dev): phases as slices, owners of device memory as counters, one
    process per rank.
    """
    check_format(format_name, output, lang=lang)
    folders = runs if runs and len(runs) > 1 else [find_run(runs[0] if runs else None)]
    found = build_runs(folders, deployment)
    if names:
        write_out(section_names(found), output)
        return
    screen = shown([found], " ".join(folders), full, section)
    write_out(pieces(found, format_name, output is not None, lang, screen), output)


app = command_app(report)
