"""Write reports as tidy csv, one figure per row, from the same DataFrames as the Python API.

Columns: run, host, rank, label, phase, order, edge, seconds, kind, component, bytes, how, source,
part_of. ``seconds`` counts from the start of the run; ``bytes`` is an integer, an empty cell where
the figure is unknown. The kinds of rows:

- ``owner``: of device memory at an edge of a phase. All owners of one (label, order, edge) add up to
  the device's total, the row ``unaccounted`` included.
- ``part``: held by the owners that ``part_of`` names, so it is not added to them.
- ``reading``: a field of the snapshot that the owners were made of.
- ``budget``, ``term``, ``not_subtracted``: figures of the rank's KV-cache equation, its terms, and
  what it does not subtract; phase, order and edge are empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.frames import tables
from vllm_memprof.record.schema import SNAPSHOT_FIELDS

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
#: Ranks whose frames are in memory at a time.
_AT_A_TIME = 32


def render_csv(*reports: Report) -> str:
    """Return all rows under one header."""
    return "".join(report_csv(*reports))


def report_csv(*reports: Report) -> Iterator[str]:
    """Yield the header, then the rows of some ranks at a time, rank by rank."""
    yield ",".join(COLUMNS) + "\n"
    for report in reports:
        for first in range(0, len(report.ranks), _AT_A_TIME):
            ranks = report.ranks[first : first + _AT_A_TIME]
            text: str = _rows(report, ranks).to_csv(index=False, header=False, lineterminator="\n")
            yield text


def _rows(report: Report, ranks: Sequence[RankReport]) -> pd.DataFrame:
    import pandas as pd

    budget = tables.budget([report], ranks).rename(columns={"name": "component"})
    owners = tables.device_memory([report], ranks).rename(columns={"time_s": "seconds"})
    owners["kind"] = owners["part_of"].isna().map({True: "owner", False: "part"})
    held = tables.snapshots([report], ranks).rename(columns={"time_s": "seconds"})
    at = [*tables.WHO, "phase", "order", "edge", "seconds"]
    readings = held.melt(at, list(READINGS), var_name="component", value_name="bytes")
    readings["kind"] = "reading"
    how = {name: tables.reading_how(name, report.run.simulated) for name in READINGS}
    readings["how"] = readings["component"].map(how)
    whole = pd.concat([part.reindex(columns=COLUMNS) for part in (budget, owners, readings)])
    whole["order"] = whole["order"].astype("Int64")  # the budget has none: floats otherwise
    ordered: pd.DataFrame = whole.sort_values(
        ["rank", "label", "order"], kind="stable", na_position="first"
    )
    return ordered
