"""A phase whose call only queues its work ends when the memory that it takes is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_memprof.capture.probe import Probe
from vllm_memprof.capture.recorder import Recorder

MIB = 1 << 20


class Device:
    """A probe that reads what a test says."""

    backend = "npu"
    non_torch_bytes: int | None = 0

    def snapshot(self, *_: object, **__: object) -> dict[str, Any]:
        known = {"device_total_bytes": 64 << 30, "reserved_bytes": 0}
        return {**Probe("").snapshot(), **known, "non_torch_bytes": self.non_torch_bytes}


@pytest.mark.parametrize(
    ("detail", "readings", "ends_at"),
    [
        ({"buffer_bytes": 400 * MIB}, (0, 4, 478), 478),  # an operator came first
        ({"buffer_bytes": 400 * MIB}, (0, 200, 478), 200),  # one buffer tells that they come
        ({}, (0, 4, 478), 4),
        ({"buffer_bytes": 400 * MIB}, (0, 4, 4), None),
        ({}, (0, None, 478), 478),
    ],
)
def test_it_waits_for_the_buffers(
    tmp_path: Path, detail: dict[str, Any], readings: tuple[int | None, ...], ends_at: int | None
) -> None:
    recorder = Recorder(tmp_path)
    recorder.probe = device = Device()  # type: ignore[assignment]
    opened = recorder.begin("communicator", "hook", detail)
    recorder.end_queued(opened)
    found = None
    for reading in readings:
        device.non_torch_bytes = None if reading is None else reading * MIB
        recorder.settle()
        if not recorder.late and found is None:
            found = reading
    assert found == ends_at
    recorder.settle(force=True)
    [path] = (tmp_path / "events").glob("*.jsonl")
    edges = [json.loads(line) for line in path.read_text().splitlines()]
    last = [edge for edge in edges if edge["kind"] == "phase"][-1]
    assert last["edge"] == "after"
    assert last["snapshot"]["non_torch_bytes"] == (4 if ends_at is None else ends_at) * MIB
