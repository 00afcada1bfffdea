"""``memprof.report/1`` back into a ``Report``: what a parsed ``report.json`` holds, no more.

Keys that a report of an older release lacks are unknown. Findings, phases, device memory, budget and KV cache come
back as they were written; the sum of nothing is made anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from vllm_memprof.accounting.model import (
    Budget,
    Check,
    Correction,
    Finding,
    Kv,
    KvGroup,
    NotMeasured,
    NotSubtracted,
    RankReport,
    Report,
    RunSummary,
    TermRow,
)
from vllm_memprof.accounting.reclaim import Cycle, EmptyCacheCall, ReclaimSummary
from vllm_memprof.record.schema import REPORT_SCHEMA, Snapshot
from vllm_memprof.record.spans import AFTER, BEFORE, ComponentRow, DeviceMemory, Edge, Span

_T = TypeVar("_T")
_Data = Mapping[str, Any]


def report_from_json(data: _Data) -> Report:
    """The report that was written.

    Args:
        data: the parsed object.

    Raises:
        ValueError: it is not of the schema, or a field is missing or of another kind.
    """
    if not isinstance(data, Mapping) or data.get("schema") != REPORT_SCHEMA:
        found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
        raise ValueError(f"schema {found!r}, this memprof reads {REPORT_SCHEMA!r}")
    try:
        return Report(
            run=_run(data["run"]),
            ranks=[_rank(row) for row in data["ranks"]],
            findings=[_make(Finding, {"label": None, **row}) for row in data.get("findings", [])],
            not_measured=[_make(NotMeasured, row) for row in data.get("not_measured", [])],
        )
    except KeyError as exc:
        raise ValueError(f"the field {exc} is missing") from exc
    except (TypeError, AttributeError) as exc:
        raise ValueError(f"a field is missing or of another kind: {exc}") from exc


def _make(kind: type[_T], row: _Data, **changed: Any) -> _T:
    """A dataclass from the keys that it has."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{**{name: value for name, value in row.items() if name in names}, **changed})


def _run(row: _Data) -> RunSummary:
    status = "running" if row.get("running") else row["status"]
    given = {"mode": "unknown", "simulated": False, "device_profile": None, **row}
    return _make(RunSummary, given, status=status, eager="--enforce-eager" in row["command"])


def _rank(row: _Data) -> RankReport:
    memories = {(each["order"], each["edge"]): _memory(each) for each in row["device_memory"]}
    unknown = dict.fromkeys(("host", "dp_rank", "pp_rank", "tp_rank", "ep_rank"))
    reclaim = row.get("empty_cache_summary")
    return _make(
        RankReport,
        {**unknown, **row},
        phases=[_span(phase, memories) for phase in row["phases"]],
        budget=_budget(row["budget"], row["device_total_bytes"]),
        kv=_kv(row["kv"]),
        empty_cache=[
            _make(EmptyCacheCall, call, chain=tuple(call.get("chain", ())))
            for call in row["empty_cache"]
        ],
        reclaim=None if reclaim is None else _make(ReclaimSummary, reclaim),
        cycles=[_make(Cycle, cycle) for cycle in row.get("cycles", [])],
        figures=dict(row.get("figures") or {}),
        half_units=dict(row.get("half_units") or {}),
    )


def _span(row: _Data, memories: Mapping[tuple[int, str], DeviceMemory]) -> Span:
    edges = tuple(
        Edge(side, Snapshot.from_json(dict(row[side])), memories.get((row["order"], side)))
        for side in (BEFORE, AFTER)
        if row[side] is not None
    )
    given = {"id": None, "hook": None, "detail": {}, **row}
    return _make(Span, given, edges=edges)


def _memory(row: _Data) -> DeviceMemory:
    rows, parts = (
        [_make(ComponentRow, owner) for owner in row.get(name, [])] for name in ("rows", "parts")
    )
    return _make(DeviceMemory, row, rows=rows, parts=parts)


def _budget(row: _Data, device_total: int | None) -> Budget:
    return _make(
        Budget,
        row,
        device_total_bytes=device_total,
        requested=row.get("requested_exact", row["requested_bytes"]),
        terms=[
            _make(TermRow, {"subtracted": term["name"] != "graph", **term}) for term in row["terms"]
        ],
        checks=[_make(Check, check) for check in row.get("checks", [])],
        not_subtracted=[
            _make(NotSubtracted, {"title": item["name"], **item})
            for item in row.get("not_subtracted", [])
        ],
        corrections=[
            _make(Correction, {**item, "parts": tuple(item.get("parts", ()))})
            for item in row.get("corrections", [])
        ],
    )


def _kv(row: _Data) -> Kv:
    return _make(
        Kv,
        {**row, "override_blocks": row.get("num_gpu_blocks_override")},
        groups=[_make(KvGroup, group) for group in row.get("groups", [])],
        checks=[_make(Check, check) for check in row.get("checks", [])],
        inferred=row.get("how") == "inferred",
    )
