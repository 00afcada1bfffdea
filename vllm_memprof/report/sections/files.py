"""What files of other tools say of a rank's device: a table per file and kind of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.readings.counters import APP
from vllm_memprof.accounting.titles import TITLES, title_in
from vllm_memprof.document import Section
from vllm_memprof.record.memory_files import FileRow
from vllm_memprof.report.sections.base import draw, sentences_of
from vllm_memprof.tables import UNKNOWN, Paper
from vllm_memprof.text import Text
from vllm_memprof.units import known_items

TABLES = TITLES["file_tables"]
#: Owner by frames -> what the engine prints of it.
_ENGINES_OWN = {"weights": "weights_bytes", "kv_cache": "kv_cache_bytes", "graph": "graph_bytes",
                "activation": "peak_activation_bytes"}  # fmt: skip


def memory_files(
    sheet: Paper, rank: RankReport, most: int = 12, names: Iterable[str] = TABLES
) -> Iterator[Section]:
    """Return the tables of each file of these names, ``most`` rows of each."""

    def engines_own(row: FileRow) -> int | None:
        return rank.figure(_ENGINES_OWN.get(row.name, "")) if row.table == "owners" else None

    for file in rank.files:
        for table in names:
            listed = [row for row in file.rows if row.table == table]
            if not listed:
                continue
            figures = {
                "what": TABLES[table],
                "file": file.name,
                "by": TITLES["file_kinds"].get(file.kind, UNKNOWN),
                "timed": any(row.peak_s is not None for row in listed),
                table: True,
            }
            yield draw(
                sheet, "memory_file", listed, figures, most=most, engine_bytes=engines_own,
                titled=lambda row: title_in("file_rows", row.name),
            )  # fmt: skip


def said_of_files(report: Report) -> Text | None:
    """Return what the files of the fullest device have, in a sentence; None: there are none."""
    told: list[dict[str, Any]] = []
    for rank in (rank for rank in report.ranks if rank.files):
        figures: dict[str, Any] = {}
        for span in rank.phases:
            figures |= known_items(vars(span.after)) if span.phase == "memory_file" else {}
        # APP has torch's segments
        for row in (row for file in rank.files for row in file.rows if row.name != APP):
            for key, value in ((row.table, row.bytes), (f"{row.table}_count", row.count)):
                figures[key] = figures.get(key, 0) + (value or 0)
            largest = f"{row.table}_largest"
            figures[largest] = max(figures.get(largest, 0), row.largest_bytes or 0)
        told.append(figures)
    most = max(told, key=lambda each: each.get("reserved_bytes") or 0, default=None)
    return None if most is None else sentences_of("memory_files", most, ", ")
