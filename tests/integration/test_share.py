"""``share A -- B``: its flags start both on one simulated device, and a step more does not."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.engine import OLD_STACK, STACK, finish, require_stack, start_memprof
from vllm_memprof.errors import LaunchError
from vllm_memprof.plans.model import Plan
from vllm_memprof.plans.runner import PlanRunner
from vllm_memprof.plans.share import DeviceShare, Flags, InstanceStart, SharingPlan
from vllm_memprof.plans.share_starts import Instance, ShareJob, beside, compute, start_all
from vllm_memprof.plans.store import Store
from vllm_memprof.record.codec import from_json
from vllm_memprof.sim.runtime import ENV_STATE
from vllm_memprof.units import GIB

pytestmark = [pytest.mark.sim, pytest.mark.timeout(1800)]
# CI: plans/test_share.py on figures, engines/test_hold.py; each of these starts up to a dozen engines
full = pytest.mark.full

#: One step more of the device, bytes; of it a block and the rounding to hundredths may be missing.
STEP_BYTES, ROUNDING = 0.02 * 60.96 * GIB, 0.01 * 60.96 * GIB
ARGS = {
    "A": ["--enforce-eager", "--max-model-len", "4096"],
    "B": ["--enforce-eager", "--max-model-len", "2048"],
}
MODELS = {"A": "memprof/tiny", "B": "memprof/tiny-moe"}


def share(folder: Path, stack: str, *own: str, status: int = 0, second: bool = True) -> DeviceShare:
    command = ["share", MODELS["A"], *ARGS["A"]]
    command += ["--", MODELS["B"], *ARGS["B"]] if second else []
    command += ["--device", "sim:910b", "--stack", stack, *own]
    run = finish(start_memprof(command, folder), folder, 1500)
    assert run.returncode == status, run.output[-4000:]
    return from_json(DeviceShare, json.loads((folder / "share.json").read_text()))


def job_of(stack: str) -> ShareJob:
    """The same division as ``share`` asks for."""
    own = {"device": "sim:910b", "stack": stack, "until": "ready"}
    instances = [Instance(name, Plan(MODELS[name], ARGS[name], own=own)) for name in "AB"]
    return ShareJob(instances, 0, 0)


def runner_of(folder: Path) -> PlanRunner:
    """Makes the plans of a division, which may have been made."""
    (folder / "plans").mkdir(parents=True, exist_ok=True)
    return PlanRunner(folder, store=Store())


def with_more(
    job: ShareJob, folder: Path, way: SharingPlan, more: Flags, utilization: float | None = None
) -> InstanceStart:
    """Start all with the flags of a way, one of them a step higher; that one last."""
    share = utilization or round(more.gpu_memory_utilization + 0.02, 2)
    flags = [
        replace(each, gpu_memory_utilization=share) if each.name == more.name else each
        for each in way.flags
    ]
    order = way.order or sorted((each.name for each in way.flags), key=more.name.__eq__)
    runner = runner_of(folder / f"{more.name}-{share}")
    return start_all(job, "1", flags, order, "served", runner)


@full
def test_flags_of_e4_start_both_in_either_order_and_a_step_more_does_not(tmp_path: Path) -> None:
    found = share(tmp_path / "run", require_stack(STACK))
    assert (found.equation, found.found) == ("E4", True)
    (way,) = found.ways
    assert [start.order for start in way.starts] == [["A", "B"], ["B", "A"]]
    flags = {each.name: each for each in way.flags}
    for start in way.starts:
        assert start.passes
        assert 0 < (start.least_free_bytes or 0) < ROUNDING + GIB // 2
        for result in start.results:  # what was computed, to the byte
            each, plan = flags[result.value], result.plan
            assert (plan.kv_cache_bytes, plan.tokens) == (each.kv_cache_bytes, each.tokens)
    for more in way.flags:
        start = with_more(job_of(STACK), tmp_path, way, more)
        assert not start.passes
        assert "less than desired GPU memory utilization" in (start.results[-1].plan.reason or "")


@full
def test_flags_of_e2_start_both_in_their_order_and_blocks_in_any(tmp_path: Path) -> None:
    found = share(tmp_path / "run", require_stack(OLD_STACK))
    assert (found.equation, found.found) == ("E2", True)
    none, first_a, first_b, blocks = found.ways
    assert (none.flags, first_a.order, first_b.order) == ([], ["A", "B"], ["B", "A"])
    assert (blocks.order, blocks.holds) == (None, True)
    for way in (first_a, first_b):
        assert [start.neighbours for start in way.starts] == ["served", "ready"]
        for start in way.starts:
            assert start.passes
            assert 0 < (start.least_free_bytes or 0) < ROUNDING + GIB // 2
            for each, result in zip(way.flags, start.results, strict=True):
                # a further context is smaller than the first, which the alone plan has
                assert (
                    0 <= (result.plan.kv_cache_bytes or 0) - (each.kv_cache_bytes or 0) < GIB // 2
                )
    for start in blocks.starts:
        by_name = {result.value: result.plan for result in start.results}
        for each in blocks.flags:
            plan = by_name[each.name]
            assert (plan.kv_cache_bytes, plan.tokens) == (each.kv_cache_bytes, each.tokens)


@full
def test_a_step_more_under_e2_is_paid_by_the_later_one_or_is_not_there(tmp_path: Path) -> None:
    require_stack(OLD_STACK)
    job = job_of(OLD_STACK)
    _, way, *_ = compute(job, runner_of(tmp_path))[0].ways
    earlier, later = way.flags
    start = with_more(job, tmp_path, way, earlier)
    assert start.passes  # and the report says why
    before, after = way.flags[1].kv_cache_bytes or 0, start.results[1].plan.kv_cache_bytes or 0
    assert before - STEP_BYTES <= after < before - STEP_BYTES + GIB // 2
    assert (
        later.gpu_memory_utilization + 0.02 > 1
    )  # refused by the engine's own check of its arguments
    start = with_more(job, tmp_path, way, later)
    assert not start.passes
    assert "gpu_memory_utilization" in (start.results[-1].plan.reason or "")
    start = with_more(job, tmp_path, way, later, 1.0)
    assert not start.passes  # ATB's pool finds no room, which torch_npu does not call an OOM


@full
def test_memory_of_a_process_that_is_no_engine(tmp_path: Path) -> None:
    """A single instance, and 20 GiB of a trainer: with headroom for 10 GiB that come later."""
    own = ["--beside", "20GiB", "--headroom", "10GiB", "--want", "tokens=10000000"]
    found = share(tmp_path / "run", require_stack(STACK), *own, second=False)
    (way,) = found.ways
    assert way.holds
    (start,) = way.starts
    assert 10 * GIB <= (start.least_free_bytes or 0) < 10 * GIB + ROUNDING + GIB // 2
    none = share(
        tmp_path / "none", STACK, "--beside", "50GiB", "--want", "kv-cache=20GiB",
        second=False, status=1,
    )  # fmt: skip
    assert not none.found
    assert none.ways[0].short_bytes == pytest.approx(9.6 * GIB, abs=GIB // 4)


@pytest.mark.parametrize("stack", [STACK, OLD_STACK])
def test_memory_beside_is_on_the_device(stack: str, tmp_path: Path) -> None:
    require_stack(stack)
    state = {**os.environ, ENV_STATE: str(tmp_path / "devices")}
    first = replace(job_of(stack), beside=20 * GIB)
    with beside(first, state) as in_use:
        assert 20 * GIB <= in_use < 20 * GIB + (4 << 20)
        with beside(replace(first, beside=30 * GIB), state) as both:  # 10 GiB beside the first
            assert 30 * GIB <= both < 30 * GIB + (4 << 20)
        with (
            pytest.raises(LaunchError, match=r"--beside: aclrtMallocAlign32 failed"),
            beside(replace(first, beside=90 * GIB), state),
        ):
            pass
    with beside(replace(first, beside=2 * GIB), state) as in_use:  # and gone with its process
        assert in_use < 3 * GIB
