"""What a sample does, counted: its time is measured by scripts/bench_sample.py."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.unit.capture.test_sampler import Device, new, output
from vllm_memprof.capture import sample_files, sampler
from vllm_memprof.capture.hooks.table import HOOKS
from vllm_memprof.capture.observer import Observer
from vllm_memprof.capture.probe import BACKENDS, Backend, HostMemory, Probe, host_rss_bytes
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.capture.sampler import Every, Sampler
from vllm_memprof.record.schema import ENV_SAMPLE

ROWS = {hook.id: hook for hook in HOOKS}
#: Python functions of memprof that a sampled step enters: the wrappers' halves, the reading, the
#: line. With one more here, a sample costs 0.1 to 0.5 µs more.
MOST_FUNCTIONS = 25


class Runner:
    encoder_cache: ClassVar[dict[str, Any]] = {}

    def execute_model(self, scheduler_output: Any) -> None:
        pass

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self


@pytest.fixture
def runner(tmp_path: Path) -> Any:
    device = Device()
    device.take(100)
    recorder = Recorder(tmp_path)
    recorder.probe.backend, recorder.probe.device = backend(device), 0
    recorder.sampler = Sampler(tmp_path, recorder.probe, Every(steps=1), recorder.writer)
    recorder.notes.serving = True
    observer = Observer(recorder, ())
    bound = type(
        "Bound",
        (Runner,),
        {
            "execute_model": observer.wrap(ROWS["s.execute"], Runner.execute_model),
            "sample_tokens": observer.wrap(ROWS["s.sample_tokens"], Runner.sample_tokens),
        },
    )()
    bound.sampler = recorder.sampler
    return bound


def backend(device: Device, **changed: Any) -> Backend:
    fields: dict[str, Any] = {
        "name": "npu",
        "is_ready": lambda: True,
        "is_capturing": lambda: False,
        "current_device": lambda: 0,
        "stats": device.stats,
        "mem_info": lambda index: (0, 0),
        "segments": None,
        "device_name": lambda index: None,
    }
    return Backend(**{**fields, **changed})


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
    assert calls["_read"] == 1
    assert sum(calls.values()) <= MOST_FUNCTIONS, calls
    assert runner.sampler.step == 2


def test_a_process_that_is_killed_has_lost_no_sample(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from vllm_memprof.capture.sample_files import SampleFiles\n"
        "files = SampleFiles(Path(sys.argv[1]))\n"
        "for step in range(1, 38):\n"
        "    files.sample('sample', step, step, 1, ('reserved_bytes',), (step,))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode < 0
    [level] = tmp_path.rglob("0-0.jsonl")
    assert level.read_bytes().count(b"\n") == 37
    [folded] = tmp_path.rglob("1-0.jsonl")
    assert folded.read_bytes().count(b"\n") == 37 // sample_files.FOLD


def test_the_allocators_own_call_is_looked_up_once_and_again_for_another_device(
    tmp_path: Path,
) -> None:
    device, looked_up = Device(), []

    def bare() -> Any:
        looked_up.append(None)
        return device.stats

    ready = [False]
    probe = Probe(backend=backend(device, is_ready=lambda: ready[0], bare_stats=bare))
    read = Sampler(tmp_path, probe, Every(steps=1)).read
    probe.device = 0
    assert read() is None
    assert looked_up == []
    ready[0] = True
    for _ in range(3):
        device.take(10)
        found = read()
    assert found is not None
    assert (found.allocated, found.allocated_peak, found.total) == (30, 30, 30)
    assert len(looked_up) == 1
    probe.device = 1
    read()
    assert len(looked_up) == 2
    probe.backend = None
    assert read() is None


@pytest.mark.parametrize(
    ("name", "package", "function"),
    [("npu", "torch_npu", "_npu_memoryStats"), ("cuda", "torch", "_cuda_memoryStats")],
)
def test_the_bare_call_is_the_one_under_the_usual_one(
    name: str, package: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = {"allocated_bytes": {"all": {"current": 7}}}
    module = SimpleNamespace(_C=SimpleNamespace(**{function: lambda device: stats}))
    monkeypatch.setitem(sys.modules, package, module)  # type: ignore[arg-type]
    found = BACKENDS[name].bare_stats
    assert found is not None
    assert found()(0) is stats


def test_host_memory_is_of_this_moment_and_this_process() -> None:
    with HostMemory() as host:
        before, _ = host.read()
        held = bytearray(64 << 20)
        held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
        (after, shared), again = host.read(), host_rss_bytes()
        assert before is not None
        assert after is not None
        assert again is not None
        assert after - before > 48 << 20
        assert abs(again - after) < 16 << 20
        with mmap.mmap(-1, 32 << 20) as pages:  # shared, as those of a simulated device are
            pages[:: 1 << 12] = b"x" * len(pages[:: 1 << 12])
            of_both = host.read()[1]
        assert shared is not None
        assert of_both is not None
        assert 28 << 20 < of_both - shared < 36 << 20
        del held
    assert host.read() == (None, None)  # closed


def test_a_forked_child_opens_its_own_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_SAMPLE, "1")
    recorder = Recorder(tmp_path)
    assert recorder.sampler is not None
    of_parent = recorder.sampler._host
    assert None not in of_parent.read()
    recorder.after_fork()
    assert of_parent.read() == (None, None)
    assert None not in recorder.sampler._host.read()
