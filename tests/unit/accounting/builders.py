"""Snapshots, spans, processes and runs by hand, for the tests of the ledger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_memprof.record.loader import Identity, ProcessRecord, Run, load_run
from vllm_memprof.record.schema import RunInfo, Snapshot
from vllm_memprof.record.spans import ComponentRow, DeviceMemory, Span

DATA = Path(__file__).parents[2] / "data"
TOTAL = 65_452_113_920
SECOND = 10**9


def gib(value: float) -> int:
    return round(value * 2**30)


def snapshot(**values: int | None) -> Snapshot:
    return Snapshot(t_ns=0, **values)  # type: ignore[arg-type]


def span(
    phase: str, before: Snapshot | None, after: Snapshot | None, order: int = 0, **values: Any
) -> Span:
    defaults = {
        "id": order + 1,
        "parent": None,
        "depth": 0,
        "start_t_ns": 0,
        "end_t_ns": SECOND,
    }
    return Span(phase=phase, order=order, before=before, after=after, **{**defaults, **values})


def process(phases: list[Span], figures: dict[str, Any] | None = None, **who: Any) -> ProcessRecord:
    who = {
        "role": "worker",
        "roles": frozenset({"worker"}),
        "rank": 0,
        "label": "TP0",
        "pid": 1,
        "host": "h",
        **who,
    }
    return ProcessRecord(
        file="h-1.jsonl",
        identity=Identity(**who),
        versions={"vllm": "0.23.0", "vllm_ascend": "0.23.0"},
        phases=phases,
        figures=figures or {},
        kv_plan=None,
        hooks={},
        errors=[],
        ready_t_ns={},
        last_t_ns=None,
    )


def run_of(*processes: ProcessRecord, **info: Any) -> Run:
    values = {
        "id": "r",
        "mode": "offline",
        "model": "m",
        "command": ["memprof"],
        "status": "ok",
        **info,
    }
    return Run(folder=Path("r"), info=RunInfo(**values), processes=list(processes))


def device_memory(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the edges of a rank of a parsed report.json, each with its phase, order and side.

    The rows of the divided device are ``owners``.
    """
    return [
        {
            **{name: phase[name] for name in ("phase", "order")},
            "edge": side,
            **phase[side],
            **memory,
            "owners": memory["rows"],
        }
        for phase in rank["phases"]
        for side, memory in phase["owners"].items()
    ]


def recorded(name: str, **info: Any) -> Run:
    """A run of tests/data, with fields of its run.json replaced."""
    run = load_run(DATA / name)
    return replace(run, info=replace(run.info, **info))


def divided_rows(memory: DeviceMemory) -> list[ComponentRow]:
    """Return the owners of a divided device and the remainders that are unexplained."""
    return [*memory.rows, *memory.remainders()]


def rest_of(memory: DeviceMemory) -> int | None:
    """Return the device total less all owners and all other remainders, with its sign."""
    return next(part.bytes for part in memory.remainders() if part.component == "rest")


def remainders_in(memory: dict[str, Any]) -> dict[str, int | None]:
    """Return the remainders of an edge of a parsed report.json, by their names."""
    parts = [part for part in memory["parts"] if part.get("part_of") == "unexplained"]
    return {part["component"]: part["bytes"] for part in parts}
