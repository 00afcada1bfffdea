"""Writes the report files of a run folder: whole or not at all, readable by their owner alone."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from vllm_memprof.errors import MemprofError
from vllm_memprof.ledger.model import Report
from vllm_memprof.record.schema import REPORT_JSON, REPORT_MD
from vllm_memprof.report.markdown import render_markdown


def render_json(report: Report) -> str:
    """``memprof.report/1`` as text; figures that JSON cannot hold (NaN) are refused rather than written."""
    return json.dumps(report.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_reports(report: Report, run_dir: Path) -> None:
    """Writes ``report.json`` and ``report.md``, each replaced in one step, mode 0600.

    Raises:
        MemprofError: the folder cannot be written to.
    """
    for name, text in ((REPORT_JSON, render_json(report)), (REPORT_MD, render_markdown(report))):
        write_atomically(Path(run_dir) / name, text)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file; a reader sees the old one or the new one. Mode 0600.

    Raises:
        MemprofError: the file cannot be written; nothing is left behind.
    """
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # made with mode 0600
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except OSError as exc:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise MemprofError(f"cannot write {path}: {exc.strerror}", hint="is the disk full, the folder yours?") from exc
