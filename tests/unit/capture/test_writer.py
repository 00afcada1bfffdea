"""The first line of an event file, and what is left of it when it cannot be written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_memprof.capture import writer
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.capture.sample_files import SampleFiles
from vllm_memprof.capture.writer import EventWriter
from vllm_memprof.record.lines import parse_event
from vllm_memprof.record.loader import Run, load_run


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


#: A process whose file may not grow beyond a size, and then may again. Python ignores SIGXFSZ.
LIMITED = """
import resource, sys, time
from pathlib import Path
from vllm_memprof.capture import writer as module
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.capture.sample_files import SampleFiles

module._RETRY_NS = 50_000_000
recorder = Recorder(Path(sys.argv[1]))
recorder.emit("ready", what="model")
size = recorder.writer.path.stat().st_size
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (size + int(sys.argv[2]), hard))
for number in range(5):
    recorder.emit("error", where="test", message=f"lost {number} " + 100 * "x")
if "recover" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    time.sleep(0.06)
    recorder.emit("ready", what="server")
    recorder.emit("ready", what="plan")
"""


def limited(run_dir: Path, *options: str) -> tuple[list[dict[str, Any]], Run, str]:
    """Return the whole lines of the process that ``LIMITED`` is, its run, and its messages."""
    (run_dir / "run.json").write_text(
        json.dumps({"schema": "memprof.run/1", "id": "r", "mode": "serve", "model": "m",
                    "command": [], "status": "ok"})
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(run_dir), *options],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    [path] = (run_dir / "events").glob("*.jsonl")
    events = [parse_event(line) for line in path.read_bytes().split(b"\n")]
    return [event for event in events if event is not None], load_run(run_dir), done.stderr


@pytest.mark.parametrize("room", ["0", "30"], ids=["at-a-line", "within-a-line"])
def test_a_full_disk_leaves_the_moment_since_when_nothing_is_recorded(tmp_path, room):
    events, run, said = limited(tmp_path, room)
    assert [event["kind"] for event in events] == ["process", "lost", "ready"]
    [loss] = run.processes[0].losses
    assert events[2]["t_ns"] <= loss.since_t_ns <= events[2]["t_ns"] + 60_000_000_000
    assert (loss.until_t_ns, loss.events, loss.reason) == (None, None, "File too large")
    assert run.truncated
    assert said.count("records nothing until it can; the engine goes on") == 1


@pytest.mark.parametrize("room", ["0", "30"], ids=["at-a-line", "within-a-line"])
def test_writing_goes_on_when_there_is_space_again(tmp_path, room):
    events, run, _ = limited(tmp_path, room, "recover")
    kinds = [event["kind"] for event in events]
    assert kinds == ["process", "lost", "ready", "lost", "ready", "ready"]
    assert events[-2]["what"] == "server"
    [loss] = run.processes[0].losses
    assert loss.events == 5
    assert loss.until_t_ns is not None
    assert loss.since_t_ns < loss.until_t_ns <= events[-2]["t_ns"] + 1_000_000_000
    assert run.processes[0].dropped_lines == (room == "30")


def test_a_process_that_never_wrote_its_first_line_says_nothing_false(tmp_path, monkeypatch):
    """A first line is whole or absent: what follows it could not be read without it."""
    real = os.write

    def refuse(fd: int, data: bytes) -> int:
        if len(data) > 40:
            return real(fd, data[:40])
        raise OSError(errno.ENOSPC, "No space left on device")

    recorder = Recorder(tmp_path)
    monkeypatch.setattr("vllm_memprof.capture.writer.os.write", refuse)
    recorder.emit("ready", what="model")
    [path] = (tmp_path / "events").glob("*.jsonl")
    assert path.read_bytes() == b""
    monkeypatch.setattr("vllm_memprof.capture.writer.os.write", real)
    monkeypatch.setattr("vllm_memprof.capture.writer._RETRY_NS", 0)
    recorder.writer._retry_ns = 0
    recorder.emit("ready", what="server")
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["process", "lost", "ready"]


def test_a_forked_child_does_not_take_over_a_loss(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.emit("ready", what="model")
    recorder.writer._lose(OSError(errno.ENOSPC, "full"), 0)
    recorder.after_fork()
    assert recorder.writer.loss is None


def test_lines_of_other_files_are_counted_with_the_events(tmp_path, monkeypatch):
    """Samples go to files of their own; what is lost of them is told in the same place."""
    recorder = Recorder(tmp_path)
    recorder.emit("ready", what="model")
    writer = recorder.writer
    files = SampleFiles(tmp_path, writer, list)
    files.sample("sample", 1, 1, 1, {"tokens": 1})
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("vllm_memprof.capture.sample_files._Ring.write", refusing(full))
    for step in range(2, 6):
        files.sample("sample", step, step, 1, {"tokens": 1})
    recorder.emit("ready", what="server")  # not tried meanwhile: counted
    assert writer.loss is not None
    monkeypatch.undo()
    writer._retry_ns = 0
    files.sample("sample", 6, 6, 1, {"tokens": 1})
    assert writer.loss is None
    kinds = [json.loads(line)["kind"] for line in writer.path.read_text().splitlines()]
    assert kinds == ["process", "lost", "ready", "lost"]
    last = json.loads(writer.path.read_text().splitlines()[-1])
    assert (last["events"], last["reason"]) == (5, "No space left on device")
    (level,) = (tmp_path / "samples").rglob("0-*.jsonl")
    assert [json.loads(line)["step"] for line in level.read_text().splitlines()] == [1, 6]


def refusing(error: OSError) -> Any:
    def write(self: Any, kind: str, line: bytes) -> None:
        raise error

    return write


def test_the_file_has_a_bound_and_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "EVENTS_BYTES", 40_000)
    monkeypatch.setattr(writer, "_RESERVE_BYTES", 10_000)
    events = EventWriter(tmp_path)
    for _ in range(500):
        events.emit("phase", phase="empty_cache", detail="x" * 100)
    events.emit("phase", phase="oom")
    text = events.path.read_text()
    assert 29_000 < len(text) <= 40_000
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[-1]["phase"] == "oom"
    said = [line["kinds"]["phase"] for line in lines if line["kind"] == "dropped"]
    written = sum(line.get("phase") == "empty_cache" for line in lines)
    assert said[-1] <= 500 - written < 2 * said[-1]
