"""Shared by commands that end with a report: write it in a format, to stdout or a file."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from vllm_memprof.cli.help import HelpCommand
from vllm_memprof.errors import MemprofError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from vllm_memprof.accounting.model import Report
    from vllm_memprof.document import Document
    from vllm_memprof.report.documents import Found as Drawable

Found = TypeVar("Found")

#: Width of a table that goes into a file, or into a pipe where COLUMNS does not say how wide it is.
FILE_WIDTH = 120


def printed(drawn: RenderableType, to_file: bool = False) -> str:
    """Return what rich draws: as wide as the terminal or COLUMNS, else ``FILE_WIDTH``; no colour
    but on a terminal.
    """
    from rich.console import Console

    to_terminal = not to_file and sys.stdout.isatty()
    console = Console(
        width=None if to_terminal else file_width(to_file), force_terminal=to_terminal or None
    )
    with console.capture() as capture:
        console.print(drawn)
    text = capture.get()
    return text if to_terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def can_repaint() -> bool:
    """Return True where stderr is a terminal whose lines can be repainted."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def file_width(to_file: bool = False) -> int:
    """Return how wide a table is that goes into a pipe, or with -o into a file."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) > 0 and not to_file else FILE_WIDTH


#: What a document is drawn as, for any command; these can be had in every language.
DRAWN = ("table", "markdown", "html")
#: Formats of a report; the keys of json, csv and trace are names that programs know.
FORMATS = (*DRAWN, "json", "csv", "trace")
#: Those that are a file for another program: never printed on a terminal.
FILE_FORMATS = ("html", "trace")
LANGUAGES = ("en", "zh")

Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Write to a file instead of stdout."),
]
Lang = Annotated[
    str,
    typer.Option(
        "--lang", metavar="L", help="Language of table, markdown and html: en, zh (Chinese)."
    ),
]

Full = Annotated[bool, typer.Option("--full", help="Every section, not the first screen alone.")]
SectionNames = Annotated[
    list[str] | None,
    typer.Option("--section", metavar="NAME", help="This section; repeatable. --list names them."),
]
List = Annotated[bool, typer.Option("--list", help="Print the names of the sections, and exit.")]


def shown(
    reports: Sequence[Report],
    where: str,
    full: bool = False,
    names: Sequence[str] | None = None,
) -> list[Drawable]:
    """Return what a command shows of reports: their first screen, all of them, or some sections.

    Args:
        reports: of a run one, of a log its starts.
        where: the run folder or log, as it is typed.
        full: all.
        names: of sections.

    Raises:
        UsageError: there is no section of that name.
    """
    from vllm_memprof.report.documents.first_screen import FirstScreen
    from vllm_memprof.report.documents.report import NAMES, Parts

    if unknown := [name for name in names or () if name not in NAMES]:
        raise UsageError(f"--section {unknown[0]!r} is not known", hint=", ".join(NAMES))
    if names:
        return [Parts(report, tuple(names)) for report in reports]
    if full:
        return list(reports)
    return [FirstScreen(tuple(reports), where, serve_command(reports[-1]))]


def section_names(report: Report) -> str:
    """Return the sections that a report has, a line each: name, and the titles of its tables."""
    from vllm_memprof.report.documents import document
    from vllm_memprof.report.documents.report import NAMES, Parts

    lines = []
    for name in NAMES:
        page = document(Parts(report, (name,)), FILE_WIDTH)
        titles = list(dict.fromkeys(section.title.partition(",")[0] for section in page.sections))
        if titles or page.head or page.findings:
            lines.append(f"{name:<14}{'; '.join(titles)}".rstrip())
    return "\n".join(lines) + "\n"


def serve_command(report: Report) -> str:
    """Return the command that serves what a plan planned, "" of any other run."""
    import shlex

    from vllm_memprof.cli.arguments import EngineCommand
    from vllm_memprof.engines import row_of_run

    run = report.run
    if run.mode != "plan" or run.command[:2] != ["memprof", "plan"]:
        return ""
    command = typer.main.get_command(import_module("vllm_memprof.cli.commands.plan").app)
    assert isinstance(command, EngineCommand)
    split = command.split(typer.Context(command), run.command[2:])
    engine = "vllm serve"
    if not row_of_run(run.engine).script:
        engine = " ".join(("python", *row_of_run(run.engine).server))
    return " ".join([engine, *map(shlex.quote, [split.model or run.model, *split.engine])])


def command_app(
    function: Callable[..., None], options: Mapping[str, Any] | None = None, **settings: Any
) -> typer.Typer:
    """Return the Typer app of one command.

    Args:
        function: the command.
        options: that it has besides, in ``ctx.params`` or its ``**`` argument: name -> type and
            default.
        settings: of Typer's ``command``.
    """
    if options:
        signature = inspect.signature(function, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        own += [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default
            )
            for name, (kind, default) in options.items()
        ]
        function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(**{"cls": HelpCommand, **settings})(function)
    return app


def check_format(
    name: str,
    output: Path | None = None,
    printed: bool = False,
    lang: str = "en",
    formats: Sequence[str] = FORMATS,
) -> None:
    """Refuse a format or a language before anything is done.

    Args:
        name: the format, as typed.
        output: the file that was asked for.
        printed: the command has no -o, it prints.
        lang: the language, as typed.
        formats: those of the command.

    Raises:
        UsageError: not a format, one for a file where none was given, not a language, or a format
            that there is in English alone.
    """
    if name not in formats:
        raise UsageError(f"--format {name!r} is not known", hint=", ".join(formats))
    if name in FILE_FORMATS and printed:
        raise UsageError(
            f"--format {name} is for a file",
            hint=f"memprof report RUN --format {name} -o FILE afterwards",
        )
    if name in FILE_FORMATS and output is None and sys.stdout.isatty():
        raise UsageError(f"--format {name} is for a file", hint="-o FILE")
    if lang not in LANGUAGES:
        raise UsageError(f"--lang {lang!r} is not known", hint=", ".join(LANGUAGES))
    if lang != "en" and name not in DRAWN:
        raise UsageError(
            f"--lang {lang} is not there for --format {name}: programs know its names",
            hint=f"--format {' or '.join(each for each in DRAWN if each in formats)}",
        )


def draw(found: Drawable, format_name: str, to_file: bool = False, lang: str = "en") -> str:
    """Return a document of any kind as text, in one of the formats of ``DRAWN``.

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


def render(
    report: Report,
    format_name: str,
    to_file: bool = False,
    lang: str = "en",
    found: Sequence[Drawable] | None = None,
) -> str:
    """Return the report as text, ending in a newline."""
    return "".join(pieces(report, format_name, to_file, lang, found))


def pieces(
    report: Report,
    format_name: str,
    to_file: bool = False,
    lang: str = "en",
    found: Sequence[Drawable] | None = None,
) -> Iterator[str]:
    """Return the same piece by piece: a report of hundreds of ranks need not be whole in memory.

    Args:
        report: of a run.
        format_name: one of ``FORMATS``.
        to_file: it goes into a file.
        lang: of a format that is drawn.
        found: what table and markdown show of it; None: all.

    Raises:
        MemprofError: the run has nothing that this format shows.
    """
    if format_name == "json":
        from vllm_memprof.report.files import report_json

        return report_json(report)
    if format_name == "csv":
        from vllm_memprof.frames.csv import report_csv

        return report_csv(report)
    if format_name == "trace":
        from vllm_memprof.report.trace import report_trace

        return report_trace(report)
    if found is None or format_name == "html":
        found = [report]
    return iter(["\n".join(draw(each, format_name, to_file, lang) for each in found)])


def write_out(text: str | Iterable[str], output: Path | None) -> None:
    """Write all of a text, or its pieces in their order, to the file or to stdout.

    Raises:
        MemprofError: the file cannot be written.
    """
    if output is None:
        sys.stdout.writelines([text] if isinstance(text, str) else text)
        sys.stdout.flush()
        return
    from vllm_memprof.files import write_atomically

    if output.is_dir():
        raise UsageError(f"-o {output} is a folder", hint="give the name of a file")
    if not output.parent.is_dir():
        raise MemprofError(f"cannot write {output}: {output.parent} is not a folder")
    write_atomically(output, text)


def write_result(
    found: Found,
    document: Callable[[Found, int], Document],
    format_name: str,
    output: Path | None = None,
    lang: str = "en",
) -> None:
    """Write what a command found, as JSON or drawn, to the file or to stdout.

    Args:
        found: what there is a schema of.
        document: lays it out.
        format_name: json, or one of ``DRAWN``.
        output: the file; None: stdout.
        lang: of what is drawn.
    """
    if format_name == "json":
        from vllm_memprof.report.json_text import render_result_json

        write_out(render_result_json(found), output)
    else:
        layout = partial(document, found)
        write_out(draw(layout, format_name, output is not None, lang), output)
