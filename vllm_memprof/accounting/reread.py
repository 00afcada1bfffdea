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
    ComponentRow,
    Correction,
    DeviceMemory,
    Finding,
    Kv,
    KvGroup,
    NotMeasured,
    NotSubtracted,
    PhaseRow,
    RankReport,
    Report,
    RunSummary,
    TermRow,
)
from vllm_memprof.accounting.reclaim import Cycle, EmptyCacheCall, ReclaimSummary
from vllm_memprof.record.loader import PhaseSpan
from vllm_memprof.record.schema import REPORT_SCHEMA, Snapshot

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
    phases = [_phase(phase) for phase in row["phases"]]
    unknown = dict.fromkeys(("host", "dp_rank", "pp_rank", "tp_rank", "ep_rank"))
    reclaim = row.get("empty_cache_summary")
    return _make(
        RankReport,
        {**unknown, **row},
        phases=phases,
        device_memory=[_memory(memory) for memory in row["device_memory"]],
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
        spans=[_span(phase) for phase in phases],
    )


def _phase(row: _Data) -> PhaseRow:
    before, after = (
        None if row[edge] is None else Snapshot.from_json(dict(row[edge]))
        for edge in ("before", "after")
    )
    defaults: dict[str, Any] = {
        "depth": 0,
        "parent": None,
        "open": False,
        "error": None,
        "detail": {},
    }
    return _make(PhaseRow, {**defaults, **row}, before=before, after=after)


def _span(row: PhaseRow) -> PhaseSpan:
    ends = None if row.open else 0  # a report keeps how long a phase was, not when
    return PhaseSpan(
        phase=row.phase,
        order=row.order,
        id=row.order,
        parent=row.parent,
        depth=row.depth,
        hook=None,
        before=row.before,
        after=row.after,
        start_t_ns=None,
        end_t_ns=ends,
        error=row.error,
        detail=row.detail,
    )


def _memory(row: _Data) -> DeviceMemory:
    rows, parts = (
        [_make(ComponentRow, owner) for owner in row.get(name, [])] for name in ("rows", "parts")
    )
    return _make(DeviceMemory, {"order": 0, **row}, rows=rows, parts=parts)


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
