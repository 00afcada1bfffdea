"""The tracer of allocations that stay, with a fake history of torch and with tracemalloc."""

from __future__ import annotations

import json
import pickle
import stat
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_memprof.capture import tracing
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.capture.tracing import Host, LiveBlocks, Source, Tracer
from vllm_memprof.record.allocations import AllocationTrace
from vllm_memprof.record.codec import from_json
from vllm_memprof.record.schema import ENV_TRACE_ALLOCATIONS

MIB = 1 << 20
LEAK = [{"filename": "/app/leak.py", "line": 12, "name": "keep"}]


class History:
    """A history of torch whose blocks a test sets."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.blocks: list[tuple[int, list[dict[str, Any]]]] = []
        self.device = 0

    def _record_memory_history(self, enabled: str | None, **kwargs: Any) -> None:
        self.calls.append((enabled, kwargs))

    def _snapshot(self) -> dict[str, Any]:
        blocks = [
            {"size": size, "state": "active_allocated", "frames": frames}
            for size, frames in self.blocks
        ]
        blocks.append({"size": 99, "state": "inactive", "frames": LEAK})
        elsewhere = [{"size": 77, "state": "active_allocated", "frames": LEAK}]
        return {
            "segments": [
                {"device": self.device, "blocks": blocks},
                {"device": 5, "blocks": elsewhere},
            ],
            "device_traces": [],
        }


def tracer_of(
    asked: int, memory: str, source: Callable[[], Source | str]
) -> tuple[Tracer, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    recorder: Any = SimpleNamespace(
        trace_allocations=asked,
        emit=lambda kind, **fields: events.append(json.loads(json.dumps(fields))),
    )
    return Tracer(recorder, memory, source), events


def trace(tmp_path: Path, history: History, asked: int) -> tuple[Tracer, list[dict[str, Any]]]:
    return tracer_of(asked, "device", lambda: LiveBlocks(history, 0, tmp_path / "allocations"))


def test_what_stays_is_written_by_stack_after_the_requests(tmp_path: Path) -> None:
    history = History()
    history.blocks = [(9, [])]
    tracer, events = trace(tmp_path, history, 4)
    for number in range(6):
        tracer.request_ended()
        if number < 4:
            history.blocks.append((MIB, LEAK))
    [event] = events
    first, last = history.calls
    assert first[0] == "all"
    assert first[1]["max_entries"] == tracing.MOST_ENTRIES
    assert first[1]["stacks"] == "python"
    assert last == (None, {"context": None})  # and never again, whatever comes after
    read = from_json(AllocationTrace, event)
    assert (read.requests, read.half_requests, read.untraced_bytes) == (4, 2, 9)
    [stack] = read.stacks
    assert stack.frames == [["/app/leak.py", 12, "keep"]]
    assert (stack.blocks, stack.bytes) == (4, 4 * MIB)
    assert (stack.half_blocks, stack.half_bytes) == (2, 2 * MIB)
    assert read.snapshot is not None
    file = tmp_path / read.snapshot
    assert pickle.loads(file.read_bytes()).keys() == {"segments", "device_traces"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_process_that_ends_before_writes_what_it_knows(tmp_path: Path) -> None:
    history = History()
    tracer, events = trace(tmp_path, history, 100)
    for _ in range(11):
        tracer.request_ended()
    history.blocks = [(MIB, LEAK)]
    tracer.close()
    tracer.close()
    [event] = events
    read = from_json(AllocationTrace, event)
    assert (read.asked, read.requests, read.half_requests) == (100, 10, None)
    assert read.stacks[0].bytes == MIB


def test_a_process_without_a_request_says_so(tmp_path: Path) -> None:
    history = History()
    tracer, events = trace(tmp_path, history, 100)
    tracer.close()
    assert history.calls == []
    assert events[0]["reason"] == "no request had ended when the process did"


def test_stacks_are_bounded_and_the_rest_is_added_up(tmp_path: Path) -> None:
    history = History()
    tracer, events = trace(tmp_path, history, 1)
    tracer.request_ended()
    many = tracing.MOST_STACKS + 6
    history.blocks = [(10 + at, [{**LEAK[0], "line": at}] * 40) for at in range(many)]
    tracer.request_ended()
    [event] = events
    assert len(event["stacks"]) == tracing.MOST_STACKS
    assert event["stacks"][0]["bytes"] == 10 + many - 1
    assert len(event["stacks"][0]["frames"]) == tracing.MOST_FRAMES
    assert event["other_bytes"] == sum(10 + at for at in range(6))


def test_a_torch_without_history_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(npu=SimpleNamespace(memory=SimpleNamespace()))
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setenv(ENV_TRACE_ALLOCATIONS, "1")
    recorder = Recorder(tmp_path)
    recorder.probe.backend = "npu"
    tracing.trace_device(recorder)
    recorder.sampler.on_request_end()
    [*_, event] = map(json.loads, recorder.writer.path.read_text().splitlines())
    assert (event["memory"], event["requests"]) == ("device", 0)
    assert event["reason"] == "torch has no memory history for this device"


def test_python_memory_that_stays_is_named_by_its_line() -> None:
    tracer, events = tracer_of(8, "host", Host)
    kept = []
    for _ in range(9):
        tracer.request_ended()
        kept.append(bytearray(MIB))
    assert not tracemalloc.is_tracing()
    [event] = events
    read = from_json(AllocationTrace, event)
    assert read.memory == "host"
    top = read.stacks[0]
    assert top.frames[0][0] == __file__
    assert 8 * MIB <= top.bytes < 8 * MIB + 4096
    assert top.bytes - top.half_bytes == pytest.approx(4 * MIB, rel=0.01)
    assert all("tracemalloc" not in str(frame[0]) for each in read.stacks for frame in each.frames)


def test_the_user_s_own_tracing_goes_on() -> None:
    tracemalloc.start()
    try:
        tracer, _ = tracer_of(1, "host", Host)
        tracer.request_ended()
        tracer.request_ended()
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()
