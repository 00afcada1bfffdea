"""``memprof diff``: why two runs have another KV cache, term by term."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_memprof.cli.show import build, chosen, numbered, printed, write_out
from vllm_memprof.errors import RunRecordError, UsageError

if TYPE_CHECKING:
    from vllm_memprof.accounting.model import Report
    from vllm_memprof.compare.diff import Diff

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

FORMATS = ("table", "markdown", "json")
#: A report.json has up to 150 kB per rank; a log may have any size, and is not to be held in memory.
_LARGEST_JSON = 1 << 28


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
    """Show why B has another KV cache than A: the causes, by bytes, with a sum that is the difference.

    A and B are run folders, report.json files, or logs as explain reads them. FILE#2 is the second engine start of a
    log, or the second report of a JSON array.

    Both budgets are written in the same quantities, so that releases with different equations can be compared: what
    both charge is a cause as far as its size differs, what one of them charges by its whole size. Every difference is
    B less A. Figures of logs count to their last printed digit, and the page says so.

    Exit status 0: compared, whatever differs. 2: a wrong argument. 3: a run cannot be read.
    """
    if format_name not in FORMATS:
        raise UsageError(f"--format {format_name!r} is not known", hint=", ".join(FORMATS))
    from vllm_memprof.compare.diff import diff_reports

    write_out(
        render(diff_reports(read(a), read(b)), format_name, to_file=output is not None), output
    )


def render(found: Diff, format_name: str, to_file: bool = False) -> str:
    """The comparison as text, ending in a newline."""
    from vllm_memprof.report.diff import render_diff_json, render_diff_markdown, render_diff_table

    if format_name == "json":
        return render_diff_json(found)
    if format_name == "markdown":
        return render_diff_markdown(found)
    return printed(render_diff_table(found), to_file)


def read(name: str) -> Report:
    """The report of a run folder, of a ``report.json`` or of a log.

    Raises:
        RunRecordError: it cannot be read, is none of these, or holds several runs and no number says which.
    """
    given, number = numbered(name)
    path = Path(given)
    if path.is_dir():
        return build(path)
    data = _json(path)
    reports = _reports(data, path) if data is not None else _log(path)
    if number is None and len(reports) > 1:
        hint = f"name one of them: {path}#1 to {path}#{len(reports)}"
        raise RunRecordError(f"{path} holds {len(reports)} runs", hint=hint)
    return chosen(path, number, reports)[0]


def _json(path: Path) -> Any:
    """What a JSON file holds; None where it is no JSON, as a log is."""
    try:
        with path.open("rb") as stream:
            if stream.read(256).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"["):
                return None
            stream.seek(0)
            text = stream.read(_LARGEST_JSON)
            return json.loads(text) if len(text) < _LARGEST_JSON else None
    except FileNotFoundError as exc:
        hint = "give a run folder, a report.json, or a log"
        raise RunRecordError(f"there is no run folder and no file {path}", hint=hint) from exc
    except PermissionError as exc:
        raise RunRecordError(
            f"no permission to read {path}", hint="read it as its owner, or chmod it"
        ) from exc
    except OSError as exc:
        raise RunRecordError(f"cannot read {path}: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError):
        return None  # a log may begin with a bracket


def _reports(data: Any, path: Path) -> list[Report]:
    from vllm_memprof.accounting.reread import report_from_json

    try:
        return [report_from_json(row) for row in (data if isinstance(data, list) else [data])]
    except ValueError as exc:
        hint = "give the run folder, or the report.json in it"
        raise RunRecordError(f"{path} is not a report of memprof: {exc}", hint=hint) from exc


def _log(path: Path) -> list[Report]:
    from vllm_memprof.accounting.build import build_report
    from vllm_memprof.logs.to_record import read_log

    return [build_report(run) for run in read_log(str(path))]
