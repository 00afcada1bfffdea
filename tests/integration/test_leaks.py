"""Leaks planted in the real engine: found, priced, named by process and by line of code."""

from __future__ import annotations

import json
import pickle
import subprocess
from pathlib import Path

import pytest

from tests.support.engine import STACK, RunResult
from tests.support.planted import plant
from vllm_memprof.units import MIB

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]

#: One token each: the shortest request that an engine serves.
ARGS = ["memprof/tiny", "--device", "sim:910b", "--enforce-eager", "--max-model-len", "2048"]
ARGS += ["--gpu-memory-utilization", "0.4", "--max-tokens", "1"]
NAME = "growth-while-serving"

#: A worker that keeps a tensor of 1 MiB for every request that has ended.
DEVICE_LEAK = """
def keep(runner, count):
    import torch
    kept = runner.kept = getattr(runner, "kept", [])
    for _ in range(count):
        kept.append(torch.empty(1 << 20, dtype=torch.uint8, device=runner.device))  # the leak

def register():
    def then(worker):
        def make(original):
            def execute_model(self, scheduler_output, *args, **kwargs):
                keep(self.model_runner, len(scheduler_output.finished_req_ids))
                return original(self, scheduler_output, *args, **kwargs)
            return execute_model
        wrap(worker, "execute_model", make)
    when_worker_is_there(then)
"""

#: An engine core that keeps 1 MiB of its own memory for every request.
HOST_LEAK = """
KEPT = []

def register():
    from vllm.v1.core.sched.scheduler import Scheduler

    def make(original):
        def _free_request(self, *args, **kwargs):
            KEPT.append(bytearray(b"x" * (1 << 20)))  # the leak
            return original(self, *args, **kwargs)
        return _free_request
    wrap(Scheduler, "_free_request", make)
"""


def prompts(folder: Path, count: int) -> list[str]:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"request {n}"}) + "\n" for n in range(count)))
    return ["--prompts", str(path)]


def line_of_leak(folder: Path) -> str:
    lines = (folder / "planted.py").read_text().splitlines()
    [number] = [at for at, line in enumerate(lines, 1) if "# the leak" in line]
    return f"planted.py:{number}"


def found(run: RunResult) -> list[dict]:
    return [finding for finding in run.report["findings"] if finding["id"] == NAME]


@pytest.mark.full
def test_a_leak_of_each_request_is_found_and_its_line_is_named(run_memprof, tmp_path: Path) -> None:
    """200 requests: the slope within a tenth of 1 MiB, and with tracing the line that allocates."""
    env = plant(tmp_path / "plugin", DEVICE_LEAK)
    args = [*ARGS, *prompts(tmp_path, 200), "--trace-allocations", "100"]
    run = run_memprof("offline", *args, env=env)
    assert run.returncode == 0, run.output[-3000:]
    [leak] = found(run)
    assert leak["label"] == "TP0"
    [rank] = run.report["ranks"]
    growth = {row["owner"]: row for row in rank["growth"]}
    row = growth["allocated"]
    assert row["verdict"] == "growing"
    assert row["bytes_per_request"] == pytest.approx(MIB, rel=0.1)
    assert row["bytes_per_request_low"] < MIB + 512 < row["bytes_per_request_high"]
    assert row["requests_until_full"] > 1000
    assert f"grew most while traced: {line_of_leak(tmp_path / 'plugin')}" in leak["evidence"]
    [traced] = [one for one in run.report["allocations"] if one["memory"] == "device"]
    assert (traced["asked"], traced["requests"], traced["half_requests"]) == (100, 100, 50)
    site = traced["sites"][0]
    assert site["site"] == line_of_leak(tmp_path / "plugin")
    assert site["function"] == "keep"
    assert 99 <= site["blocks"] <= 101
    assert site["grown_bytes"] == pytest.approx(50 * MIB, rel=0.03)
    assert_opens_in_the_viewer(run.run_dir / traced["snapshot"])


def assert_opens_in_the_viewer(path: Path) -> None:
    """PyTorch's own functions of the same stack read the snapshot, and find the leak in it."""
    from vllm_memprof.sim.runtime import prepare_runtime

    script = """
import pickle, sys
from torch.cuda import _memory_viz as viz
snapshot = pickle.load(open(sys.argv[1], "rb"))
assert "keep" in viz.memory(snapshot), "no frame of the leak"
assert "alloc" in viz.trace(snapshot)
assert "active" in viz.segsum(snapshot).lower()
for plot in (viz.trace_plot, viz.segment_plot):
    assert len(plot(snapshot)) > 1000
"""
    python = prepare_runtime("910b", STACK).python
    done = subprocess.run([str(python), "-c", script, str(path)], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert pickle.loads(path.read_bytes())["device_traces"]
