"""Writes a report as tidy csv: one figure per row. A ``Report`` enters, lines leave one at a time.

Columns: run, host, rank, label, phase, order, edge, seconds, kind, component, bytes, how, source, part_of. ``bytes``
is an integer, an empty cell where the figure is unknown. What a row is, by ``kind``:

- ``owner``: of device memory at an edge of a phase. All owners of one (label, order, edge) add up to the device's
  total, the row ``unaccounted`` included.
- ``part``: held by the owners that ``part_of`` names, so it is not added to them.
- ``reading``: a figure of the snapshot that the owners were made of, by its name in ``report.json``.
- ``budget``: of the rank's KV-cache equation; phase, order and edge are empty.
- ``term``, ``not_subtracted``: the terms of the equation, and what it does not charge.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

from vllm_memprof.accounting.clock import host_starts
from vllm_memprof.accounting.model import (
    INFERRED,
    MEASURED,
    MODELLED,
    Budget,
    RankReport,
    Report,
)
from vllm_memprof.record.schema import SNAPSHOT_FIELDS
from vllm_memprof.record.spans import edges_of

COLUMNS = (
    "run",
    "host",
    "rank",
    "label",
    "phase",
    "order",
    "edge",
    "seconds",  # since the run's start
    "kind",
    "component",
    "bytes",
    "how",
    "source",
    "part_of",
)
_READINGS = tuple(name for name in SNAPSHOT_FIELDS if name.endswith("_bytes"))
#: Readings of memory outside torch's segments, which a simulated device's profile sets.
_OUTSIDE_TORCH = {
    "npu_workspace_bytes": MEASURED,
    "non_torch_bytes": INFERRED,
    "process_bytes": MEASURED,
    "other_processes_bytes": MEASURED,
}
_BUDGET = (
    "requested_bytes",
    "kv_cache_bytes",
    "engine_kv_cache_bytes",
    "fits_request_kv_cache_bytes",
    "residual_bytes",
)


def render_csv(*reports: Report) -> str:
    """All rows under one header."""
    return "".join(report_csv(*reports))


def report_csv(*reports: Report) -> Iterator[str]:
    """The header, then the rows of a report at a time, rank by rank, in the order of the phases."""
    yield _lines([COLUMNS])
    for report in reports:
        starts = host_starts(report)
        for rank in report.ranks:
            rows = _rank_rows(rank, starts.get(rank.host, 0), report.run.simulated)
            yield _lines([report.run.id, rank.host, rank.rank, rank.label, *row] for row in rows)


def _lines(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _rank_rows(rank: RankReport, start: int, simulated: bool) -> Iterator[list[Any]]:
    """Rows from ``phase`` on."""
    for kind, component, size, how in _budget_rows(rank, rank.budget):
        yield ["", "", "", "", kind, component, size, how, "", ""]
    for span, edge in edges_of(rank.phases):
        memory, snapshot = edge.owners, edge.snapshot
        if memory is None:
            continue
        seconds = (snapshot.t_ns - start) / 1e9 if snapshot.t_ns else None
        at = [span.phase, span.order, edge.side, seconds]
        for row in memory.rows:
            yield [*at, "owner", row.component, row.bytes, row.how, row.source, row.part_of]
        yield [
            *at,
            "owner",
            "unaccounted",
            memory.unaccounted_bytes,
            INFERRED,
            "total less the other owners",
            "",
        ]
        for row in memory.parts:
            yield [*at, "part", row.component, row.bytes, row.how, row.source, row.part_of]
        for name in _READINGS:
            yield [*at, "reading", name, getattr(snapshot, name), _how(name, simulated), "", ""]


def _budget_rows(rank: RankReport, budget: Budget) -> Iterator[tuple[str, str, int | None, str]]:
    yield "budget", "device_total_bytes", rank.device_total_bytes, ""
    yield "budget", "initial_free_bytes", rank.initial_free_bytes, ""
    for name in _BUDGET:
        yield "budget", name, getattr(budget, name), ""
    yield "budget", "spare_bytes", rank.spare_bytes, ""
    for term in budget.terms:
        yield "term", term.name, term.bytes, ""
    for item in budget.not_subtracted:
        yield "not_subtracted", item.name, item.bytes, item.how


def _how(name: str, simulated: bool) -> str:
    if name not in _OUTSIDE_TORCH:
        return MEASURED
    return MODELLED if simulated else _OUTSIDE_TORCH[name]
