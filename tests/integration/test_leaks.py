"""Leaks planted in the real engine: found, priced, named by process and by line of code."""

from __future__ import annotations

import json
import pickle
import pickletools
from pathlib import Path

import pytest

from tests.support.engine import STACK, RunResult, run_in_engine
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
        kept.append(torch.empty(1 << 20, dtype=torch.uint8, device=runner.device))  # device leak

def leak_in_worker():
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

def leak_in_engine_core():
    from vllm.v1.core.sched.scheduler import Scheduler

    def make(original):
        def _free_request(self, *args, **kwargs):
            KEPT.append(bytearray(b"x" * (1 << 20)))  # host leak
            return original(self, *args, **kwargs)
        return _free_request
    wrap(Scheduler, "_free_request", make)
"""

REGISTER_HOST = """
def register():
    leak_in_engine_core()
"""
BOTH = """
def register():
    leak_in_engine_core()
    leak_in_worker()
"""


def prompts(folder: Path, count: int) -> list[str]:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"request {n}"}) + "\n" for n in range(count)))
    return ["--prompts", str(path)]


def line_of_leak(folder: Path, memory: str) -> str:
    lines = (folder / "planted.py").read_text().splitlines()
    [number] = [at for at, line in enumerate(lines, 1) if f"# {memory} leak" in line]
    return f"planted.py:{number}"


def found(run: RunResult) -> list[dict]:
    return [finding for finding in run.report["findings"] if finding["id"] == NAME]


def test_a_leak_of_each_request_is_found_and_its_line_is_named(run_memprof, tmp_path: Path) -> None:
    """On the device and in the engine core at once: the slope, the process, the line of code."""
    env = plant(tmp_path / "plugin", DEVICE_LEAK + HOST_LEAK + BOTH)
    args = [*ARGS, *prompts(tmp_path, 180), "--trace-allocations", "20"]
    run = run_memprof("offline", *args, env=env)
    assert run.returncode == 0, run.output[-3000:]
    leaks = {leak["title"].rpartition(": ")[2]: leak for leak in found(run)}
    [host] = run.report["growth"]
    [rank] = run.report["ranks"]
    process = f"host memory of worker + engine core TP0, pid {rank['pid']}"
    assert leaks.keys() == {"allocated by tensors", process}

    device = next(row for row in rank["growth"] if row["owner"] == "allocated")
    assert device["verdict"] == "growing"
    assert device["bytes_per_request"] == pytest.approx(MIB, rel=0.1)
    assert device["bytes_per_request_low"] <= MIB + 512 <= device["bytes_per_request_high"]
    assert device["requests_until_full"] > 1000
    assert [row["owner"] for row in rank["growth"] if row["verdict"] == "growing"] == ["allocated"]
    assert host["roles"] == ["worker", "engine_core"]
    # of the whole process: the little that an engine's memory grows by besides is in it
    assert host["growth"]["bytes_per_request"] == pytest.approx(MIB, rel=0.1)

    folder = tmp_path / "plugin"
    traced = {one["memory"]: one for one in run.report["allocations"]}
    for memory, name, mark in (
        ("device", "allocated by tensors", "device"),
        ("host", process, "host"),
    ):
        one, line = traced[memory], line_of_leak(folder, mark)
        assert (one["asked"], one["requests"], one["half_requests"]) == (20, 20, 10)
        site = one["sites"][0]
        assert site["site"] == line
        assert site["bytes"] == pytest.approx(20 * MIB, rel=0.06)
        assert site["grown_bytes"] == pytest.approx(10 * MIB, rel=0.11)
        assert f"grew most while traced: {line}," in leaks[name]["evidence"]
    assert traced["device"]["sites"][0]["function"] == "keep"
    assert_opens_in_the_viewer(run.run_dir / traced["device"]["snapshot"])


@pytest.mark.full
def test_the_engine_core_is_named_where_it_is_a_process_of_its_own(
    run_memprof, tmp_path: Path
) -> None:
    env = plant(tmp_path / "plugin", HOST_LEAK + REGISTER_HOST)
    run = run_memprof("offline", *ARGS, "-tp", "2", *prompts(tmp_path, 200), env=env)
    assert run.returncode == 0, run.output[-3000:]
    [leak] = found(run)
    growing = [row for row in run.report["growth"] if row["growth"]["verdict"] == "growing"]
    assert [row["process"] for row in growing] == ["engine_core"]
    assert f"host memory of engine core, pid {growing[0]['pid']}" in leak["title"]
    assert growing[0]["growth"]["bytes_per_request"] == pytest.approx(MIB, rel=0.1)


@pytest.mark.full
def test_a_thousand_clean_requests_have_no_such_finding(run_memprof, tmp_path: Path) -> None:
    run = run_memprof("offline", *ARGS, *prompts(tmp_path, 1000), timeout_s=400)
    assert run.returncode == 0, run.output[-3000:]
    assert found(run) == []
    [rank] = run.report["ranks"]
    verdicts = {row["owner"]: row["verdict"] for row in rank["growth"]}
    assert verdicts["allocated"] == "steady"  # looked at, and found steady
    assert "too_short" not in verdicts.values()
    assert "allocations" not in run.report


#: What the viewer's own reader of pickles knows (pytorch ``torch/utils/viz/MemoryViz.js::unpickle``).
VIEWER_OPCODES = """
PROTO APPEND APPENDS LIST TUPLE NEWFALSE NEWTRUE NONE BINGET BININT BININT1 BININT2 EMPTY_DICT
EMPTY_LIST FRAME LONG1 LONG_BINGET MARK MEMOIZE BINPUT LONG_BINPUT SETITEMS SETITEM DICT
SHORT_BINUNICODE BINUNICODE STOP EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 BINFLOAT
"""

VIEW = """
import json, pickle, sys
from torch.cuda import _memory_viz as viz
snapshot = pickle.load(open(sys.argv[1], "rb"))
seen = {
    "trace": "entries" in viz.trace(snapshot),
    "segments": "Summary of segments" in viz.segsum(snapshot),
    "plots": all(len(plot(snapshot)) > 1000 for plot in (viz.trace_plot, viz.segment_plot)),
}
print("RESULT", json.dumps(seen))
"""


def assert_opens_in_the_viewer(path: Path) -> None:
    """PyTorch's own functions of the same stack read the snapshot, and find the leak in it.

    The viewer is JavaScript, with a reader of pickles of its own.
    """
    from vllm_memprof.sim.runtime import prepare_runtime

    script = path.with_suffix(".py")
    script.write_text(VIEW)
    seen, _ = run_in_engine(prepare_runtime("910b", STACK), script, str(path))
    assert seen == {"trace": True, "segments": True, "plots": True}
    data = path.read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= set(VIEWER_OPCODES.split())
    assert data[1] <= 4  # the protocol
    snapshot = pickle.loads(data)
    assert any(0 < len(trace) <= 20_000 for trace in snapshot["device_traces"])
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    leaked = [each for each in blocks if each["frames"] and each["frames"][0]["name"] == "keep"]
    assert {block["requested_size"] for block in leaked} == {MIB}
