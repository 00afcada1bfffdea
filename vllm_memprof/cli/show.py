"""Shared by commands that end with a report: write it in a format, to stdout or a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_memprof.errors import MemprofError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from vllm_memprof.accounting.model import Report

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


def _table(report: Report, to_file: bool, lang: str = "en") -> str:
    from vllm_memprof.report.table import render_table

    return printed(render_table(report, lang=lang), to_file)


def _markdown(report: Report, to_file: bool, lang: str = "en") -> str:
    from vllm_memprof.report.markdown import render_markdown

    return render_markdown(report, lang)


def _json(report: Report, to_file: bool) -> Iterator[str]:
    from vllm_memprof.report.files import report_json

    return report_json(report)


def _html(report: Report, to_file: bool) -> str:
    from vllm_memprof.report.html import render_html

    return render_html(report)


def _csv(report: Report, to_file: bool) -> Iterator[str]:
    from vllm_memprof.frames.csv import report_csv

    return report_csv(report)


def _trace(report: Report, to_file: bool) -> Iterator[str]:
    from vllm_memprof.report.trace import report_trace

    return report_trace(report)


#: Format -> renderer: all of the text, or its pieces in their order.
FORMATS: dict[str, Callable[[Report, bool], str | Iterator[str]]] = {
    "table": _table,
    "markdown": _markdown,
    "html": _html,
    "json": _json,
    "csv": _csv,
    "trace": _trace,
}


#: Those that can be had in another language; the keys of the others are names that programs know.
TRANSLATED: dict[str, Callable[[Report, bool, str], str]] = {"table": _table, "markdown": _markdown}
LANGUAGES = ("en", "zh")

#: Formats that are a file for another program: never printed on a terminal.
FILE_FORMATS = ("html", "trace")


def check_format(name: str, output: Path | None = None, printed: bool = False) -> str:
    """The format's name.

    Args:
        name: as typed.
        output: the file that was asked for.
        printed: the command has no -o, it prints.

    Raises:
        UsageError: not a format, or one for a file where none was given.
    """
    if name not in FORMATS:
        raise UsageError(f"--format {name!r} is not known", hint=", ".join(FORMATS))
    if name in FILE_FORMATS and printed:
        raise UsageError(
            f"--format {name} is for a file",
            hint=f"memprof report RUN --format {name} -o FILE afterwards",
        )
    if name in FILE_FORMATS and output is None and sys.stdout.isatty():
        raise UsageError(f"--format {name} is for a file", hint="-o FILE")
    return name


def check_lang(lang: str, format_name: str) -> str:
    """The language's name.

    Raises:
        UsageError: not a language, or a format that there is in English alone.
    """
    if lang not in LANGUAGES:
        raise UsageError(f"--lang {lang!r} is not known", hint=", ".join(LANGUAGES))
    if lang != "en" and format_name not in TRANSLATED:
        raise UsageError(
            f"--lang {lang} is not there for --format {format_name}",
            hint=f"--format {' or '.join(TRANSLATED)}",
        )
    return lang


def render(report: Report, format_name: str, to_file: bool = False, lang: str = "en") -> str:
    """Return the report as text ending in a newline; a file has ``FILE_WIDTH`` and no colour."""
    return "".join(pieces(report, format_name, to_file, lang))


def pieces(
    report: Report, format_name: str, to_file: bool = False, lang: str = "en"
) -> Iterator[str]:
    """The same piece by piece: a report of hundreds of ranks need not be whole in memory.

    Raises:
        MemprofError: the run has nothing that this format shows.
    """
    if check_lang(lang, check_format(format_name)) == "en":
        made = FORMATS[format_name](report, to_file)
    else:
        made = TRANSLATED[format_name](report, to_file, lang)
    if isinstance(made, str):
        return iter([made if made.endswith("\n") else made + "\n"])
    return made


def write_out(text: str | Iterable[str], output: Path | None) -> None:
    """To the file, or to stdout; all of the text, or its pieces in their order.

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
