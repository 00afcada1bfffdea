"""What files of other tools say of a rank's device: a table per file and kind of rows."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.readings.counters import APP
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.document import Section
from vllm_memprof.record.memory_files import FileRow
from vllm_memprof.report.sections.base import Paper, Sheet, draw, sentences_of
from vllm_memprof.tables import UNKNOWN
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import known_items

#: Owner by frames -> what the engine prints of it.
_ENGINES_OWN = {"weights": "weights_bytes", "kv_cache": "kv_cache_bytes", "graph": "graph_bytes",
                "activation": "peak_activation_bytes"}  # fmt: skip


def memory_files(
    sheet: Sheet | Paper, rank: RankReport, most: int = 12, without: str = ""
) -> Iterator[Section]:
    """Return the tables of each file, ``most`` rows of each, but for one."""

    def engines_own(row: FileRow) -> int | None:
        return rank.figure(_ENGINES_OWN.get(row.name, "")) if row.table == "owners" else None

    for file in rank.files:
        for table, title in TITLES["file_tables"].items():
            listed = [row for row in file.rows if row.table == table]
            if not listed or table == without:
                continue
            figures = {
                "what": title,
                "file": file.name,
                "by": TITLES["file_kinds"].get(file.kind, UNKNOWN),
                "timed": any(row.peak_s is not None for row in listed),
                table: True,
            }
            yield draw(
                sheet, "memory_file", listed, figures, most=most, engine_bytes=engines_own,
                titled=lambda row: TITLES["file_rows"].get(row.name, row.name),
            )  # fmt: skip


def said_of_files(report: Report) -> Text | None:
    """Return what the files of the fullest device have, in a sentence; None: there are none."""

    def figures_of(rank: RankReport) -> dict[str, object]:
        reads = (vars(span.after) for span in rank.phases if span.phase == "memory_file")
        figures = {name: each for read in reads for name, each in known_items(read).items()}
        rows = {(row.table, row.name): row for file in rank.files for row in file.rows}
        free = [row for (table, _), row in rows.items() if table == "free"]
        modules = [each for (table, name), each in rows.items() if table == "modules" and name != APP]
        peak = rows.get(("pools", "PTA"))
        return figures | {
            "idle": sum(row.bytes or 0 for row in free) if free else None,
            "pieces": sum(row.count or 0 for row in free),
            "largest": max((row.largest_bytes or 0 for row in free), default=0),
            "peak": None if peak is None else peak.peak_bytes,
            "seconds": None if peak is None else peak.peak_s,
            "modules": join(", ", (text("{name} {bytes:size}", row) for row in modules[:4])) or None,
        }

    ranks = [rank for rank in report.ranks if rank.files]
    told = [figures_of(rank) for rank in ranks]
    most = max(told, key=lambda each: each.get("reserved_bytes") or 0, default=None)
    return None if most is None else sentences_of("memory_files", most, ", ") or None
