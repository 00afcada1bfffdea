"""Shared by commands that end with a report: write it in a format, to stdout or a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_memprof.errors import MemprofError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from vllm_memprof.accounting.model import Report
    from vllm_memprof.report.documents import Found
    from vllm_memprof.report.results import Result

#: Width of a table that goes into a file or a pipe, where no terminal says how wide it is.
FILE_WIDTH = 120


def printed(drawn: RenderableType, to_file: bool = False) -> str:
    """Return what rich draws: as wide as the terminal, else ``FILE_WIDTH`` without colour."""
    from rich.console import Console

    to_terminal = not to_file and sys.stdout.isatty()
    console = Console(width=None if to_terminal else FILE_WIDTH, force_terminal=to_terminal or None)
    with console.capture() as capture:
        console.print(drawn)
    text = capture.get()
    return text if to_terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines())


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


def command_app(function: Callable[..., None], **settings: Any) -> typer.Typer:
    """Return the Typer app of one command.

    Args:
        function: the command.
        settings: of Typer's ``command``.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(**settings)(function)
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


def draw(found: Found, format_name: str, to_file: bool = False, lang: str = "en") -> str:
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


def render(report: Report, format_name: str, to_file: bool = False, lang: str = "en") -> str:
    """Return the report as text, ending in a newline."""
    return "".join(pieces(report, format_name, to_file, lang))


def pieces(
    report: Report, format_name: str, to_file: bool = False, lang: str = "en"
) -> Iterator[str]:
    """Return the same piece by piece: a report of hundreds of ranks need not be whole in memory.

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
    return iter([draw(report, format_name, to_file, lang)])


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
    found: Result, format_name: str, output: Path | None = None, lang: str = "en"
) -> None:
    """Write what a command found, as JSON or drawn, to the file or to stdout."""
    if format_name == "json":
        from vllm_memprof.report.results import render_result_json

        write_out(render_result_json(found), output)
    else:
        write_out(draw(found, format_name, output is not None, lang), output)
