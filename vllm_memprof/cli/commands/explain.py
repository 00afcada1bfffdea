"""``memprof explain``: the report of a run from nothing but its log."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_memprof.cli.show import (
    Full,
    Lang,
    List,
    Output,
    SectionNames,
    check_format,
    command_app,
    draw,
    render,
    section_names,
    shown,
    write_out,
)
from vllm_memprof.errors import RunRecordError, UsageError
from vllm_memprof.sources import chosen, numbered

if TYPE_CHECKING:
    from vllm_memprof.accounting.model import Report


def explain(
    logs: Annotated[
        list[str],
        typer.Argument(metavar="LOG...", help="Logs of vLLM, vLLM-Ascend, SGLang; - is stdin."),
    ],
    format_name: Annotated[
        str,
        typer.Option("--format", metavar="F", help="table, markdown, html, json, csv."),
    ] = "table",
    full: Full = False,
    section: SectionNames = None,
    names: List = False,
    lang: Lang = "en",
    output: Output = None,
) -> None:
    """Print what a log of an engine tells: what failed and why, or what fits; from its text alone.

    Reads logs of vLLM and vLLM-Ascend of any version, of SGLang, out-of-memory messages of torch
    and torch_npu, and npu-smi tables, as printed or as pasted into an issue; plain or packed with
    gzip, bzip2, xz, zstandard or zip. Each file of an archive is a log. A figure that a log does
    not print stays unknown, and each is exact to its last printed digit only.

    Keys, tokens and passwords in the log are replaced by *** before it is read.

    Of several starts, the first screen has a table, and the last of them; --full has them all, json
    is an array of them, html and csv are one file. LOG#2 is the second start of a log alone. There
    is no --format trace, because a log has no times.

    A log of a start or server that failed is answered with the cause, also where it has no figure:
    what failed first, the line that tells, and what to change.

    Exit status 0: at least one log holds a figure or a failure. 3: none does, or one cannot be
    read.
    """
    if format_name == "trace":
        raise UsageError(
            "--format trace needs a recorded run: a log tells of no moments in time",
            hint="--format csv",
        )
    check_format(format_name, output, lang=lang)
    reports = read_reports(logs)
    texts: Iterable[str]
    to_file = output is not None
    drawn = format_name in ("table", "markdown") and not full
    if names:
        texts = [section_names(reports[-1])]
    elif drawn:
        where = " ".join("standard input" if name == "-" else name for name in logs)
        found = shown(reports, where, names=section)
        texts = ["\n".join(draw(each, format_name, to_file, lang) for each in found)]
    elif format_name == "html":
        from vllm_memprof.report.html import render_html

        texts = [render_html(*reports, lang=lang)]
    elif format_name == "csv":
        from vllm_memprof.frames.csv import report_csv

        texts = report_csv(*reports)
    elif format_name == "markdown" and len(reports) > 1:
        from vllm_memprof.report.markdown import render_markdown_starts

        texts = [render_markdown_starts(reports, lang)]
    else:
        texts = [render(report, format_name, to_file, lang) for report in reports]
        if format_name == "json" and len(reports) > 1:
            array = ",\n".join(content.rstrip("\n") for content in texts)
            texts = [f"[\n{array}\n]\n"]
        elif len(reports) > 1:
            from vllm_memprof.report.sections.starts import starts_document

            table = draw(partial(starts_document, reports), format_name, to_file, lang)
            texts = ["\n".join([table, *texts])]
    write_out(texts, output)


app = command_app(explain)


def read_reports(logs: list[str]) -> list[Report]:
    """Return one report per engine start, log by log; name those without either on stderr.

    Raises:
        RunRecordError: none of the logs holds a line about memory, one cannot be read, or has no
            start of that number.
    """
    from vllm_memprof.accounting.build import build_report
    from vllm_memprof.logs.to_record import LOOKED_FOR, NoMemoryLines, read_log

    reports, empty = [], []
    for name in logs:
        path, number = numbered(name)
        if path == "-" and sys.stdin.isatty():
            typer.echo(
                "memprof: paste a log, then end it with Ctrl-D on a line of its own", err=True
            )
        try:
            reports += [build_report(run) for run in chosen(path, number, read_log(path))]
        except NoMemoryLines as error:
            empty.append(error)
    if not reports:
        if len(empty) == 1:
            raise empty[0]
        raise RunRecordError(
            f"no line about memory in any of {len(empty)} logs; looked for {LOOKED_FOR}",
            hint=empty[0].hint,
        )
    for blank in empty:
        typer.echo(f"memprof: {blank.message}", err=True)
    return reports
