"""Two runs on one simulated device: the second sees the memory of the first where both share it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.engine import finish, read_events, start_memprof, wait_until
from tests.unit.accounting.builders import device_memory, remainders_in
from vllm_memprof.sim.profiles import load_profile
from vllm_memprof.units import GIB

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]

ARGS = ["--device", "sim:910b", "--enforce-eager", "--max-model-len", "4096"]


@pytest.mark.full  # CI: findings/test_neighbours.py on readings, and the sharing itself in tests/shim
def test_a_plan_sees_another_s_memory_where_both_share_the_device(
    sim_stack, tmp_path, cleanup_processes
):
    """The first plan is stopped (SIGSTOP) right after its weights are loaded, so that both hold memory at once."""
    first_dir, second_dir, alone_dir = (tmp_path / name for name in ("first", "second", "alone"))
    first = start_memprof(
        ["plan", "Qwen/Qwen3-14B", *ARGS, "--gpu-memory-utilization=0.6", "--share-device"],
        first_dir,
    )
    cleanup_processes.append(first)

    def weights_loaded():
        assert first.poll() is None, (tmp_path / "first.out").read_text()[-3000:]
        for event in read_events(first_dir):
            if (
                event["kind"] == "phase"
                and event["phase"] == "weight_load"
                and event["edge"] == "after"
            ):
                pid = int(event["file"].removesuffix(".jsonl").rsplit("-", 1)[1])
                os.kill(pid, signal.SIGSTOP)
                return pid, event["snapshot"]["reserved_bytes"]
        return None

    worker, held = wait_until(weights_loaded, 200, "the first run holds its weights")
    assert held > 27 * GIB
    try:
        small = ["plan", "memprof/tiny", *ARGS, "--gpu-memory-utilization=0.2"]
        second = start_memprof([*small, "--share-device"], second_dir)
        cleanup_processes.append(second)
        report = finish(second, second_dir).report
        seen = report["ranks"][0]
        third = start_memprof(small, alone_dir)
        cleanup_processes.append(third)
        alone = finish(third, alone_dir)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert finish(first, first_dir).returncode == 0
    assert seen["initial_free_bytes"] <= seen["device_total_bytes"] - held
    start = next(
        m for m in device_memory(seen) if (m["phase"], m["edge"]) == ("hccl_init", "before")
    )
    [others] = [row["bytes"] for row in start["owners"] if row["component"] == "other_processes"]
    assert others >= held
    assert remainders_in(start)["rest"] == 0
    findings = {finding["id"]: finding for finding in report["findings"]}
    assert findings["co-tenant"]["bytes"] == others
    assert "the driver's list of processes" in findings["co-tenant"]["evidence"]
    [rank] = alone.report["ranks"]
    own = next(m for m in device_memory(rank) if (m["phase"], m["edge"]) == ("hccl_init", "before"))
    assert {row["component"]: row["bytes"] for row in own["owners"]}["other_processes"] == 0
    # the first context of a device takes more than each further one
    memory = load_profile("910b").memory
    shared = memory.context_bytes - memory.further_context_bytes
    assert rank["initial_free_bytes"] == seen["initial_free_bytes"] + others - shared
    assert not Path(alone.info["env"]["MEMPROF_SIM_STATE"]).exists()
