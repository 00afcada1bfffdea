"""Writes the report files of a run folder: whole or not at all, readable by their owner alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vllm_memprof.accounting.model import Report
from vllm_memprof.files import write_atomically
from vllm_memprof.record.codec import to_json
from vllm_memprof.record.schema import REPORT_JSON, REPORT_MD
from vllm_memprof.report.documents.first_screen import FirstScreen
from vllm_memprof.report.json_text import LEVELS, json_pieces
from vllm_memprof.report.markdown import render_markdown


def report_json(*reports: Report) -> Iterator[str]:
    """Yield a report as JSON text, one phase at a time; of several reports a list.

    Raises:
        ValueError: a figure that JSON cannot hold (NaN).
    """
    each = [
        {
            **to_json(replace(one, ranks=[])),
            "ranks": (
                {
                    **to_json(replace(rank, phases=[])),
                    "phases": map(to_json, rank.phases),
                }
                for rank in one.ranks
            ),
        }
        for one in reports
    ]
    return json_pieces(each[0]) if len(each) == 1 else json_pieces(each, LEVELS + 1)


def write_reports(report: Report, run_dir: Path) -> None:
    """Writes ``report.json`` and ``report.md``, each replaced in one step, mode 0600.

    Raises:
        MemprofError: the folder cannot be written to.
    """
    screen = render_markdown(FirstScreen((report,), run_dir.name))
    for name, text in ((REPORT_JSON, report_json(report)), (REPORT_MD, [screen])):
        write_atomically(run_dir / name, text)
