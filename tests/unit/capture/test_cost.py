"""What a sample does, counted: its time is measured by scripts/bench_sample.py."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.unit.capture.conftest import fake_torch
from tests.unit.capture.test_sampler import Device, new, output
from vllm_memprof.capture import sample_files, sampler
from vllm_memprof.capture.hooks.table import HOOKS
from vllm_memprof.capture.observer import Observer
from vllm_memprof.capture.probe import Probe, host_memory
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.capture.sampler import Pace, Sampler

ROWS = {hook.id: hook for hook in HOOKS}
#: Python functions of memprof that a sampled step enters: the wrappers' halves, the reading, the
#: line. With one more here, a sample costs 0.1 to 0.5 µs more.
MOST_FUNCTIONS = 49


class Runner:
    encoder_cache: ClassVar[dict[str, Any]] = {}

    def execute_model(self, scheduler_output: Any) -> None:
        pass

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    device = Device()
    device.take(100)
    fake_torch(monkeypatch, device.stats)
    recorder = Recorder(tmp_path)
    recorder.probe.backend, recorder.probe.device = "npu", 0
    recorder.sampler = Sampler(tmp_path, recorder.probe, Pace(steps=1), recorder.writer)
    recorder.serving = True
    observer = Observer(recorder, ())
    return type(
        "Bound",
        (Runner,),
        {
            "execute_model": observer.wrap(ROWS["s.execute"], Runner.execute_model),
            "sample_tokens": observer.wrap(ROWS["s.sample_tokens"], Runner.sample_tokens),
        },
    )()


def serve(runner: Any, scheduled: Any) -> None:
    runner.execute_model(scheduled)
    runner.sample_tokens(None)


def test_a_sampled_step_reads_once_writes_once_and_enters_few_functions(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(runner, output({"a": 4}, new=(new("a"),)))
    calls: Counter[str] = Counter()
    ours = str(Path(sampler.__file__).parent)

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            calls[frame.f_code.co_name] += 1
        elif event == "c_call" and argument is os.write:
            calls["os.write"] += 1

    sys.setprofile(note)
    try:
        serve(runner, output({"a": 1}))
    finally:
        sys.setprofile(None)
    assert calls.pop("os.write") == 1
    assert calls["counters"] == 1
    assert sum(calls.values()) <= MOST_FUNCTIONS, calls


def test_a_process_that_is_killed_has_lost_no_sample(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from vllm_memprof.capture.sample_files import SampleFiles\n"
        "from vllm_memprof.capture.writer import EventWriter\n"
        "files = SampleFiles(Path(sys.argv[1]), EventWriter(Path(sys.argv[1])), list)\n"
        "for step in range(1, 38):\n"
        "    files.sample('sample', step, step, 1, {'reserved_bytes': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode < 0
    [level] = tmp_path.rglob("0-0.jsonl")
    assert level.read_bytes().count(b"\n") == 37
    [folded] = tmp_path.rglob("1-0.jsonl")
    assert folded.read_bytes().count(b"\n") == 37 // sample_files.FOLD


@pytest.mark.parametrize(("name", "package"), [("npu", "torch_npu"), ("cuda", "torch")])
def test_counters_come_from_the_c_function_of_the_device(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    device.take(30)
    runtime = fake_torch(monkeypatch, device.stats, name=name, package=package)
    probe = Probe(name)
    found = probe.counters()
    assert (found["allocated_bytes"], found["allocated_total_bytes"]) == (30, 30)
    runtime.is_initialized = lambda: False
    assert not probe.is_ready()
    assert probe.snapshot()["allocated_bytes"] is None


def test_host_memory_is_of_this_moment() -> None:
    before, _ = host_memory()
    held = bytearray(64 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    after, shared = host_memory()
    assert before is not None
    assert after is not None
    assert after - before > 48 << 20
    with mmap.mmap(-1, 32 << 20) as pages:  # shared, as those of a simulated device are
        pages[:: 1 << 12] = b"x" * len(pages[:: 1 << 12])
        of_both = host_memory()[1]
    assert shared is not None
    assert of_both is not None
    assert 28 << 20 < of_both - shared < 36 << 20
    del held
