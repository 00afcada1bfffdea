"""What the first line of an event file says about its process."""

from __future__ import annotations

import json
import sys

from vllm_memprof.capture import writer
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.capture.writer import EventWriter


def test_no_secret_of_the_command_line_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["vllm", "serve", "m", "--api-key", "sk-1", "--hf-token=hf_2", "--port", "1"]
    )
    recorder = Recorder(tmp_path)
    recorder.emit("ready", what="model")
    [path] = (tmp_path / "events").glob("*.jsonl")
    text = path.read_text()
    first = json.loads(text.splitlines()[0])
    assert first["kind"] == "process"
    assert first["argv"] == [
        "vllm",
        "serve",
        "m",
        "--api-key",
        "***",
        "--hf-token=***",
        "--port",
        "1",
    ]
    assert "sk-1" not in text
    assert "hf_2" not in text


def test_the_file_has_a_bound_and_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "EVENTS_BYTES", 40_000)
    monkeypatch.setattr(writer, "_RESERVE_BYTES", 10_000)
    events = EventWriter(tmp_path)
    for _ in range(500):
        events.emit("phase", {"phase": "empty_cache", "detail": "x" * 100}, "worker")
    events.emit("phase", {"phase": "oom"}, "worker")
    text = events.path.read_text()
    assert 29_000 < len(text) <= 40_000
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[-1]["phase"] == "oom"
    said = [line["kinds"]["phase"] for line in lines if line["kind"] == "dropped"]
    written = sum(line.get("phase") == "empty_cache" for line in lines)
    assert said[-1] <= 500 - written < 2 * said[-1]
