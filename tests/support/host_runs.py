"""Run folders of a deployment on two hosts, made of a recorded run of two ranks on one host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "data" / "recorded_023_tp2"
#: Wall time of the first event of the recording, where it has none, s.
_WALL = 1_790_000_000.0


def part(**fields: object) -> dict[str, object]:
    """Return the place of a run in a deployment, as ``run.json`` has it."""
    place: dict[str, object] = {
        "deployment": "10.0.0.5:29500",
        "source": "arguments",
        "group": None,
        "headless": False,
        "nodes": 2,
        "node_rank": 0,
        "dp_size": 1,
        "dp_start": 0,
        "dp_local": 1,
        "world_size": 2,
    }
    return place | fields


def write_hosts(
    folder: Path,
    *,
    ahead_s: float = 0.0,
    booted_s: float = 1000.0,
    second: Mapping[str, Any] | None = None,
) -> tuple[Path, Path]:
    """Write one run folder per host: the first has the engine core and TP0, the second TP1.

    Args:
        folder: gets ``node-a`` and ``node-b``.
        ahead_s: by which the wall clock of the second host is ahead.
        booted_s: by which its monotonic clock is ahead, besides.
        second: fields of ``run.json`` that the second host has otherwise.

    Returns:
        Both folders.
    """
    engine_core, *workers = sorted((SOURCE / "events").glob("*.jsonl"))
    by_rank = sorted(workers, key=_rank_in)
    first = write_host(folder / "node-a", "node-a", [engine_core, by_rank[0]], {"part": part()})
    given = {"id": "second", "part": part(node_rank=1, headless=True), **(second or {})}
    shift = (booted_s + ahead_s, ahead_s)
    return first, write_host(folder / "node-b", "node-b", [by_rank[1]], given, *shift)


def write_host(
    folder: Path,
    host: str,
    events: list[Path],
    given: Mapping[str, Any],
    clock_s: float = 0.0,
    wall_s: float = 0.0,
    identity: Mapping[str, Any] | None = None,
) -> Path:
    """Write the run folder of one host, its clocks ahead by so much."""
    (folder / "events").mkdir(parents=True)
    info = json.loads((SOURCE / "run.json").read_text()) | {"host": host} | dict(given)
    info["start_t_ns"] = (info.get("start_t_ns") or 0) + round(clock_s * 1e9)
    (folder / "run.json").write_text(json.dumps(info))
    for path in events:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for event in lines:
            if event["kind"] == "process":
                event["wall"] = _WALL + event["t_ns"] / 1e9 + wall_s
                event["host"] = host
            if event["kind"] == "identity" and identity is not None:
                event.update(identity)
        shifted = [_shifted(event, round(clock_s * 1e9)) for event in lines]
        pid = next(event["pid"] for event in lines if event["kind"] == "process")
        (folder / "events" / f"{host}-{pid}.jsonl").write_text(
            "".join(f"{json.dumps(event)}\n" for event in shifted)
        )
    return folder


def _shifted(value: Any, by: int) -> Any:
    if isinstance(value, dict):
        return {
            key: inner + by
            if key.endswith("t_ns") and isinstance(inner, int)
            else _shifted(inner, by)
            for key, inner in value.items()
        }
    return [_shifted(inner, by) for inner in value] if isinstance(value, list) else value


def _rank_in(path: Path) -> int:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return next(event["rank"] for event in events if event["kind"] == "identity")
