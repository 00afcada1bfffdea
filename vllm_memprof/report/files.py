"""Writes the report files of a run folder: whole or not at all, readable by their owner alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_memprof.accounting.model import Report
from vllm_memprof.errors import MemprofError
from vllm_memprof.record.codec import to_json
from vllm_memprof.record.schema import REPORT_JSON, REPORT_MD
from vllm_memprof.report.json_text import json_pieces
from vllm_memprof.report.markdown import render_markdown


def render_json(report: Report) -> str:
    """``memprof.report/1`` as text; figures that JSON cannot hold (NaN) are refused rather than written."""
    return "".join(report_json(report))


def report_json(report: Report) -> Iterator[str]:
    """The same piece by piece, one rank at a time: for files."""
    return json_pieces(to_json(report, lazy=("ranks",)))


def write_reports(report: Report, run_dir: Path) -> None:
    """Writes ``report.json`` and ``report.md``, each replaced in one step, mode 0600.

    Raises:
        MemprofError: the folder cannot be written to.
    """
    for name, text in ((REPORT_JSON, report_json(report)), (REPORT_MD, [render_markdown(report)])):
        write_atomically(Path(run_dir) / name, text)


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Replaces a file; a reader sees the old one or the new one. Mode 0600.

    Args:
        path: the file.
        text: all of it, or its pieces in their order.

    Raises:
        MemprofError: the file cannot be written; nothing is left behind.
    """
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(
            prefix=f".{path.name}.", dir=path.parent
        )  # made with mode 0600
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.writelines([text] if isinstance(text, str) else text)
        os.replace(temporary, path)
    except OSError as exc:
        raise MemprofError(
            f"cannot write {path}: {exc.strerror}", hint="is the disk full, the folder yours?"
        ) from exc
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)  # after a failure; replaced, it is gone
