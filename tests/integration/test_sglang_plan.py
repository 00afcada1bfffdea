"""``memprof plan --engine sglang``: the unmodified SGLang up to its KV cache, on the simulated device.

The stack takes minutes to set up (make sim-every): no part of CI.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_sglang import ARGS, STACK, TINY
from tests.support.engine import (
    RunResult,
    assert_nothing_left,
    engine_pids,
    finish,
    require_stack,
    start_memprof,
)

pytestmark = [pytest.mark.sim, pytest.mark.full, pytest.mark.timeout(600)]

#: Of the device and its allocator, at an edge of a phase.
READINGS = (
    "device_total_bytes",
    "device_free_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "non_torch_bytes",
)
BAD = {"missing", "never_called", "error", "overwritten"}


@pytest.fixture(autouse=True)
def stack() -> str:
    return require_stack(STACK)


def run(mode: str, run_dir: Path, *args: str) -> RunResult:
    made = finish(start_memprof([mode, *args], run_dir), run_dir)
    assert_nothing_left(engine_pids(run_dir))
    return made


def after_the_pools(rank: dict[str, Any]) -> dict[str, int]:
    (phase,) = (each for each in rank["phases"] if each["phase"] == "kv_cache_alloc")
    return {name: phase["after"][name] for name in READINGS}


def assert_planned(plan: RunResult, ranks: int) -> None:
    """All ranks up to their KV cache: recomputed to the byte, and nothing said of what follows."""
    assert plan.returncode == 0, plan.output[-3000:]
    report = plan.report
    assert (report["run"]["engine"], report["run"]["mode"]) == ("sglang", "plan")
    assert report["run"]["ranks"]["run"] == list(range(ranks))
    assert len(report["ranks"]) == ranks
    printed = {int(found) for found in re.findall(r"#tokens: (\d+),", plan.engine_log)}
    for rank in report["ranks"]:
        budget, kv = rank["budget"], rank["kv"]
        assert budget["equation"] == "S1"
        assert budget["residual_bytes"] == 0
        assert {kv["tokens"]} == printed
        assert budget["engine_kv_cache_bytes"] == kv["tokens"] * kv["bytes_per_token"]
        assert budget["headroom_bytes"] is None
        assert budget["fits_device_bytes"] is None
        phases = {phase["phase"] for phase in rank["phases"]}
        assert {"weight_load", "kv_cache_sizing", "kv_cache_alloc", "request_pool"} <= phases
        assert not phases & {"warm_up", "graph_capture", "request"}
    assert not [event for event in plan.events() if event["kind"] == "error"]
    hooks = [event for event in plan.events() if event["kind"] == "hook"]
    assert not [hook for hook in hooks if hook["need"] == "required" and hook["state"] in BAD]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_has_the_figures_of_a_whole_start(tmp_path: Path, ranks: int) -> None:
    args = [*TINY, "--tp-size", str(ranks), "--disable-cuda-graph"]
    plan = run("plan", tmp_path / "plan", *args)
    assert_planned(plan, ranks)
    whole = run("offline", tmp_path / "whole", *args)
    assert whole.returncode == 0, whole.output[-3000:]
    for planned, served in zip(plan.report["ranks"], whole.report["ranks"], strict=True):
        assert planned["kv"]["tokens"] == served["kv"]["tokens"]
        assert after_the_pools(planned) == after_the_pools(served)
        for name in ("kv_cache_bytes", "engine_kv_cache_bytes", "terms"):
            assert planned["budget"][name] == served["budget"][name]


def test_a_model_of_two_ranks(tmp_path: Path) -> None:
    plan = run("plan", tmp_path / "plan", "Qwen/Qwen3-8B", *ARGS, "--tp-size", "2")
    assert_planned(plan, 2)
    assert "of the device to graphs and steps, which a plan does not run" in " ".join(
        plan.output.split()
    )


def test_pools_of_several_kinds(tmp_path: Path) -> None:
    """Sliding windows: of what was profiled, SGLang makes two pools; its tokens are as printed."""
    plan = run("plan", tmp_path / "plan", "openai/gpt-oss-20b", *ARGS)
    assert plan.returncode == 0, plan.output[-3000:]
    (rank,) = plan.report["ranks"]
    (printed,) = re.findall(r"full_layer_tokens=(\d+)", plan.engine_log)
    assert rank["kv"]["tokens"] == int(printed)
    assert rank["budget"]["residual_bytes"] == 0
    assert rank["budget"]["engine_kv_cache_bytes"] == rank["budget"]["kv_cache_bytes"] > 0


def test_weights_that_leave_no_room_end_the_plan_with_the_engine_s_reason(tmp_path: Path) -> None:
    plan = run("plan", tmp_path / "plan", *TINY, "--mem-fraction-static", "0.0001")
    assert plan.returncode not in (0, 2)
    assert plan.info["status"] == "failed"
    assert plan.info["exit_reason"].startswith("TP0 failed in kv_cache_sizing")
    assert "Raise --mem-fraction-static" in plan.info["exit_reason"]


def test_more_ranks_than_devices_are_a_wrong_argument(tmp_path: Path) -> None:
    plan = run("plan", tmp_path / "plan", *TINY, "--tp-size", "16")
    assert plan.returncode == 2
    assert "16 ranks, and this machine has 8 devices" in plan.info["exit_reason"]


def test_a_sweep_has_a_row_for_each_share(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "vllm_memprof", "sweep", *TINY, "--no-cache", "--format", "json",
            "--over", "mem-fraction-static=0.4,0.8", "-o", str(tmp_path / "sweep"),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    small, large = json.loads(done.stdout)["rows"]
    assert (small["status"], large["status"]) == ("ok", "ok")
    assert large["tokens"] > 1.9 * small["tokens"]
    assert {row["headroom_bytes"] for row in (small, large)} == {None}
    assert {row["devices"] for row in (small, large)} == {1}
    assert {row["equation"] for row in (small, large)} == {"S1"}
