"""A record read without the loader, for tests that compare a report with what was written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]


@dataclass
class Worker:
    """The event file of one rank: passages of phases in their order, and its last figures."""

    label: str
    phases: list[dict[str, Json]] = field(default_factory=list)  # edge -> its event
    figures: Json = field(default_factory=dict)


def read_record(folder: Path) -> tuple[dict[str, Worker], Json]:
    """Return the workers of a run by label, and the engine's KV plan (empty without one)."""
    workers, plan = {}, {}
    for path in sorted((folder / "events").glob("*.jsonl")):
        events = []
        for line in path.read_text().splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # the last line of a process that was killed
        plan = next((event for event in events if event["kind"] == "kv_plan"), plan)
        ranks = [event for event in events if event["kind"] == "identity" and "rank" in event]
        if not ranks:
            continue
        worker = workers[ranks[0]["label"]] = Worker(ranks[0]["label"])
        passages: dict[int, dict[str, Json]] = {}
        for event in events:
            if event["kind"] == "phase":
                passages.setdefault(event["id"], {})[event["edge"]] = event
            elif event["kind"] == "figures":
                known = {name: size for name, size in event["values"].items() if size is not None}
                worker.figures |= known
        worker.phases = list(passages.values())
    return workers, plan
