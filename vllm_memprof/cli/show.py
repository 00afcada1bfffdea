"""Shared by commands that read runs: which one a person means, and writing what its options say."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from vllm_memprof.errors import MemprofError, RunRecordError, UsageError, nearest, require_known
from vllm_memprof.files import from_here, write_atomically
from vllm_memprof.launch.folder import DEFAULT_PARENT
from vllm_memprof.record.deployment import run_folders
from vllm_memprof.record.loader import load_info
from vllm_memprof.redact import redact_command
from vllm_memprof.sources import numbered
from vllm_memprof.text import plain

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, ProgressColumn

    from vllm_memprof.accounting.model import Report
    from vllm_memprof.cli.arguments import SplitArguments
    from vllm_memprof.document import Document
    from vllm_memprof.report.documents import Found as Drawable

Found = TypeVar("Found")

#: Width of a table that goes into a file, or into a pipe where COLUMNS does not say how wide it is.
FILE_WIDTH = 120


def say(text: str) -> None:
    """Print a line of memprof's own on stderr."""
    print(f"memprof: {plain(text)}", file=sys.stderr, flush=True)


def typed_command() -> list[str]:
    """Return the command of this process as it was typed, without secrets."""
    return redact_command(["memprof", *sys.argv[1:]])


def printed(drawn: RenderableType, to_file: bool = False) -> str:
    """Return what rich draws: as wide as the terminal or COLUMNS, else ``FILE_WIDTH``; no colour
    but on a terminal.
    """
    from rich.console import Console

    to_terminal = not to_file and sys.stdout.isatty()
    width = None if to_terminal else file_width(to_file)
    console = Console(width=width, force_terminal=to_terminal or None)
    with console.capture() as capture:
        console.print(drawn)
    text = capture.get()
    return text if to_terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def can_repaint() -> bool:
    """Return True where stderr is a terminal whose lines can be repainted."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def progress_bar(live: bool, *columns: ProgressColumn | str) -> Progress:
    """Return a bar on stderr, started, below which nothing stays; not live it shows nothing."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    bar = Progress(*columns, console=console, transient=True, disable=not live)
    bar.start()
    return bar


def file_width(to_file: bool = False) -> int:
    """Return how wide a table is that goes into a pipe, or with -o into a file."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) > 0 and not to_file else FILE_WIDTH


def draw(found: Drawable, format_name: str, to_file: bool = False, lang: str = "en") -> str:
    """Return a document of any kind as text, in one of the formats of ``help.DRAWN``.

    A table in a file has ``FILE_WIDTH`` and no colour.
    """
    if format_name == "html":
        from vllm_memprof.report.html import render_html

        return render_html(found, lang=lang)
    if format_name == "markdown":
        from vllm_memprof.report.markdown import render_markdown

        return render_markdown(found, lang)
    from vllm_memprof.report.table import render_table

    return printed(render_table(found, lang=lang), to_file)


def pieces(
    reports: Sequence[Report],
    format_name: str,
    to_file: bool = False,
    lang: str = "en",
    names: Sequence[str] = (),
    screen_of: str | None = None,
) -> Iterable[str]:
    """Return reports as text, piece by piece: one of hundreds of ranks need not be whole in memory.

    Args:
        reports: of a run one, of a log its starts.
        format_name: of ``memprof report``.
        to_file: it goes into a file.
        lang: of a format that is drawn.
        names: of the sections that table and markdown show; none: all.
        screen_of: the run folders or logs, as they are typed: they show the first screen alone.

    Raises:
        UsageError: there is no section of that name.
        MemprofError: the run has nothing that this format shows.
    """
    from vllm_memprof.report.documents.first_screen import FirstScreen
    from vllm_memprof.report.documents.report import NAMES, Excerpt

    for name in names:
        require_known("--section", name, NAMES)
    if format_name == "json":
        from vllm_memprof.report.files import report_json

        return report_json(*reports)
    if format_name == "csv":
        from vllm_memprof.frames.csv import report_csv

        return report_csv(*reports)
    if format_name == "trace":
        from vllm_memprof.report.trace import report_trace

        return report_trace(*reports)
    if format_name == "html":
        from vllm_memprof.report.html import render_html

        return [render_html(*reports, lang=lang)]
    found: Sequence[Drawable] = reports
    if names:
        found = [Excerpt(report, tuple(names)) for report in reports]
    elif screen_of is not None:
        found = [FirstScreen(tuple(reports), screen_of, serve_command(reports[-1]))]
    elif len(reports) > 1 and format_name == "markdown":
        from vllm_memprof.report.markdown import render_markdown_starts

        return [render_markdown_starts(list(reports), lang)]
    elif len(reports) > 1:
        from vllm_memprof.report.sections.starts import starts_document

        found = [partial(starts_document, reports), *reports]
    return ["\n".join(draw(each, format_name, to_file, lang) for each in found)]


def section_names(report: Report) -> str:
    """Return the sections that a report has, a line each: name, and the titles of its tables."""
    from vllm_memprof.report.documents import document
    from vllm_memprof.report.documents.report import NAMES, Excerpt

    lines = []
    for name in NAMES:
        page = document(Excerpt(report, (name,)), FILE_WIDTH)
        titles = list(dict.fromkeys(section.title.partition(",")[0] for section in page.sections))
        if titles or page.head or page.findings:
            lines.append(f"{name:<14}{'; '.join(titles)}".rstrip())
    return "\n".join(lines) + "\n"


def for_the_engine(command: str, words: list[str]) -> SplitArguments:
    """Return the words of a command of memprof that starts an engine, divided."""
    found: Any = typer.main.get_command(import_module(f"vllm_memprof.cli.commands.{command}").app)
    return found.split(typer.Context(found), words)  # type: ignore[no-any-return]


def serve_command(report: Report) -> str:
    """Return the command that serves what a plan planned, "" of any other run."""
    from vllm_memprof.engines import row_of_run

    run = report.run
    if run.mode != "plan" or run.command[:2] != ["memprof", "plan"]:
        return ""
    split = for_the_engine("plan", run.command[2:])
    row = row_of_run(run.engine)
    engine = ["vllm serve"] if row.script else ["python", *row.server]
    return " ".join([*engine, *map(shlex.quote, [split.model or run.model, *split.engine])])


def write_out(text: str | Iterable[str], output: Path | None) -> None:
    """Write all of a text, or its pieces in their order, to the file or to stdout.

    Raises:
        MemprofError: the file cannot be written.
    """
    if output is None:
        sys.stdout.writelines([text] if isinstance(text, str) else text)
        sys.stdout.flush()
        return
    if output.is_dir():
        raise UsageError(f"-o {output} is a folder", "give the name of a file")
    if not output.parent.is_dir():
        raise MemprofError(f"cannot write {output}: {output.parent} is not a folder")
    write_atomically(output, text)


def write_reports(ctx: typer.Context, reports: Sequence[Report], where: list[str]) -> None:
    """Write reports as the options of a command say.

    Args:
        ctx: the command.
        reports: of a run one, of a log its starts.
        where: the run folders or logs, as they are typed; of the newest run nothing.
    """
    asked = ctx.params
    output: Path | None = asked.get("output")
    if asked.get("names"):
        write_out(section_names(reports[-1]), output)
        return
    screen_of = None if asked.get("full") else shlex.join(where)
    text = pieces(reports, asked.get("format_name", "table"), output is not None,
                  asked.get("lang", "en"), asked.get("section") or (), screen_of)  # fmt: skip
    write_out(text, output)


def write_result(
    ctx: typer.Context, found: Found, document: Callable[[Found, int], Document]
) -> None:
    """Write what a command found, as JSON or drawn, as its options say.

    Args:
        ctx: the command; an output that is a folder is not that of the result.
        found: what there is a schema of.
        document: lays it out.
    """
    asked = ctx.params
    output: Path | None = asked.get("output")
    if asked["format_name"] == "json":
        from vllm_memprof.report.json_text import render_result_json

        write_out(render_result_json(found), output)
    else:
        layout = partial(document, found)
        write_out(draw(layout, asked["format_name"], output is not None, asked["lang"]), output)


def recorded() -> list[Path]:
    """Return the run folders below ``reports/``, the newest first."""
    dated = []
    for folder in run_folders(DEFAULT_PARENT) if DEFAULT_PARENT.is_dir() else []:
        try:
            dated.append((load_info(folder).started or "", folder.name, folder))
        except RunRecordError:
            continue  # not one that could be shown
    return [folder for _, _, folder in sorted(dated, reverse=True)]


def find_run(typed: str | None) -> str:
    """Return the path of a run, and say on stderr which one it is if it was not typed.

    Args:
        typed: a path, as ``sources`` reads it; a part of the name of a folder in ``reports/``, of
            which the newest counts; None: the newest of all.

    Raises:
        RunRecordError: there is none.
    """
    if typed is not None and (
        Path(numbered(typed)[0]).exists() or any(mark in typed for mark in "*?[/") or typed == "-"
    ):
        return typed
    runs = recorded()
    found = [run for run in runs if typed is None or typed.lower() in run.name.lower()]
    if not found:
        what = (
            "no run is recorded in reports/"
            if typed is None
            else (
                f"there is no run folder and no file {typed}, and no run in reports/ of that name"
            )
        )
        names = [run.name for run in runs]
        near = nearest(typed or "", names, 3) or names[:3]
        hint = f"in reports/: {', '.join(near)}" if near else "memprof serve, offline or plan MODEL"
        raise RunRecordError(what, hint)
    others = f", the newest of {len(found)}" if len(found) > 1 else ""
    say(f"{from_here(found[0])}{others}")
    return str(found[0])


def run_before(run: str) -> str:
    """Return the newest run before another one in ``reports/``, and say which.

    Raises:
        RunRecordError: it is not one of them, or the first.
    """
    runs = recorded()
    places = [i for i, each in enumerate(runs) if each.resolve() == Path(run).resolve()]
    if not places or places[0] + 1 == len(runs):
        raise RunRecordError(f"no run in reports/ is older than {run}", "memprof diff RUN_A RUN_B")
    before = runs[places[0] + 1]
    say(f"compared with {from_here(before)}, the newest before it")
    return str(before)
