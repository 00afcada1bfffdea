"""What the first line of an event file says about its process."""

from __future__ import annotations

import json
import sys

from vllm_memprof.capture.recorder import Recorder


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
