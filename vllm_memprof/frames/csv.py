"""Write reports as tidy csv, one figure per row, from the same DataFrames as the Python API.

Columns: run, host, rank, label, phase, order, edge, seconds, kind, component, bytes, how, source,
part_of. ``seconds`` counts from the start of the run; ``bytes`` is an integer, an empty cell where
the figure is unknown. The kinds of rows:

- ``owner``: of device memory at an edge of a phase. All owners of one (label, order, edge) add up
  to the device's total, the row ``unexplained`` included.
- ``part``: held by the owners that ``part_of`` names, so it is not added to them.
- ``reading``: a field of the snapshot that the owners were made of.
- ``budget``, ``term``, ``not_subtracted``: figures of the rank's KV-cache equation, its terms, and
  what it does not subtract; phase, order and edge are empty.
- ``term_part``: held by the term above it, so it is not added to it.
- ``audit``, ``audit_difference``: memprof's reading of a figure of the engine, and the engine's
  figure less it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vllm_memprof.accounting.model import Report
from vllm_memprof.frames import tables
from vllm_memprof.record.schema import SNAPSHOT_FIELDS
from vllm_memprof.text import csv_cell

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    *tables.WHO,
    "phase",
    "order",
    "edge",
    "seconds",
    "kind",
    "component",
    "bytes",
    "how",
    "source",
    "part_of",
)
READINGS = tuple(name for name in SNAPSHOT_FIELDS if name.endswith("_bytes"))
#: Columns of texts, which a record may have from anybody.
_TEXTS = ("run", "host", "label", "phase", "component", "source", "part_of")
#: Ranks whose frames are in memory at a time.
_AT_A_TIME = 32


def report_csv(*reports: Report) -> Iterator[str]:
    """Yield the header, then the rows of some ranks at a time."""
    yield ",".join(COLUMNS) + "\n"
    for report in reports:
        ranks = tables.rank_sources([report])
        for first in range(0, len(ranks), _AT_A_TIME):
            for rows in _tables(report, ranks[first : first + _AT_A_TIME]):
                whole = rows.reindex(columns=COLUMNS)
                for name in _TEXTS:
                    whole[name] = whole[name].map(csv_cell, na_action="ignore")
                text: str = whole.to_csv(index=False, header=False, lineterminator="\n")
                yield text


def _tables(report: Report, ranks: Sequence[tables.RankSource]) -> Iterator[pd.DataFrame]:
    """Yield the rows of some ranks: equation, audit, then owners and their parts, then readings."""
    yield tables.budget(ranks).rename(columns={"name": "component"})
    audited = tables.audit(ranks).rename(columns={"name": "component"})
    yield audited.assign(kind="audit")
    yield audited.assign(kind="audit_difference", bytes=audited["difference_bytes"])
    owners = tables.device_memory(ranks).rename(columns={"time_s": "seconds"})
    owners["kind"] = owners["part_of"].isna().map({True: "owner", False: "part"})
    yield owners
    held = tables.snapshots(ranks).rename(columns={"time_s": "seconds"})
    at = [*tables.WHO, "phase", "order", "edge", "seconds"]
    readings = held.melt(at, list(READINGS), var_name="component", value_name="bytes")
    readings["kind"] = "reading"
    how = {name: tables.reading_how(name, report.run.simulated) for name in READINGS}
    readings["how"] = readings["component"].map(how)
    yield readings
