"""Two engine releases on one simulated device: each budget is recomputed to the byte by the equation of its release."""

from __future__ import annotations

import re

import pytest

from tests.support.engine import OLD_STACK, REFERENCE_ARGS, STACK, require_stack
from vllm_memprof.units import GIB

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]

EQUATIONS = {STACK: "E4", OLD_STACK: "E2"}
#: A runtime context of a process on a device, from the profile ascend910b.
FURTHER_CONTEXT_BYTES = 78_993_067


def plan(run_memprof, stack, model, *args):
    run = run_memprof("plan", model, "--device", "sim:910b", "--stack", require_stack(stack), *args)
    assert run.returncode == 0, run.output[-3000:]
    return run


def assert_balanced(run, equation, tp):
    """Every rank's budget, from what was observed, is what its engine granted; every required hook was in place."""
    ranks = run.report["ranks"]
    assert [rank["label"] for rank in ranks] == [f"TP{rank}" for rank in range(tp)]
    for rank in ranks:
        budget = rank["budget"]
        assert budget["equation"] == equation
        assert budget["residual_bytes"] == 0, rank["label"]
        assert budget["kv_cache_bytes"] == budget["engine_kv_cache_bytes"] > 0
    hooks = [event for event in run.events() if event["kind"] == "hook"]
    assert hooks
    assert not [
        event for event in hooks if event["need"] == "required" and event["state"] != "bound"
    ]
    assert not [event for event in hooks if event["state"] in ("stale", "error", "overwritten")]
    assert not [event for event in run.events() if event["kind"] == "error"]


@pytest.mark.parametrize(
    ("tp", "utilization"),
    [
        (2, "0.95"),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in ((1, "0.9"), (1, "0.95"), (2, "0.9"))
        ),
    ],
)
@pytest.mark.parametrize("stack", [OLD_STACK, STACK])
def test_every_rank_balances_to_the_byte(run_memprof, stack, tp, utilization):
    arguments = (
        "--enforce-eager",
        "--max-model-len=4096",
        f"-tp={tp}",
        f"--gpu-memory-utilization={utilization}",
    )
    run = plan(run_memprof, stack, "memprof/tiny", *arguments)

    assert_balanced(run, EQUATIONS[stack], tp)
    granted = [rank["budget"]["engine_kv_cache_bytes"] for rank in run.report["ranks"]]
    requested = [rank["budget"]["requested_bytes"] for rank in run.report["ranks"]]
    assert requested == [pytest.approx(65_452_113_920 * float(utilization), abs=1)] * tp
    if stack == OLD_STACK:  # it prints bytes, on every rank
        printed = [
            int(figure)
            for figure in re.findall(r"Available memory: (\d+), total memory", run.engine_log)
        ]
        assert sorted(printed) == sorted(granted)
    else:
        printed = [
            float(figure)
            for figure in re.findall(r"Available KV cache memory: ([\d.]+) GiB", run.engine_log)
        ]
        assert printed
        assert printed[0] == pytest.approx(granted[0] / GIB, abs=0.005)


@pytest.mark.full  # CI: the rows of test_accuracy.py, two of them of this release
@pytest.mark.parametrize("mode", [["--enforce-eager"], []], ids=["eager", "graphs"])
def test_the_old_release_reproduces_hardware_figures(run_memprof, mode):
    """Qwen3-VL-8B TP=2 by the old method: measured on 2 x Ascend 910B, weights 9.1948 GiB and KV cache 43.40 GiB.

    Its equation has no term for graphs, so the figures of both modes are held against those of the
    run with graphs.
    """
    run = plan(run_memprof, OLD_STACK, "Qwen/Qwen3-VL-8B-Instruct", *REFERENCE_ARGS, *mode)

    assert_balanced(run, "E2", 2)
    ranks = run.report["ranks"]
    for rank in ranks:
        assert rank["budget"]["engine_kv_cache_bytes"] == pytest.approx(43.40 * GIB, rel=0.01)
        assert rank["kv"]["bytes_per_token"] == 73_728
    weights = {
        event["values"]["weights_bytes"] for event in run.events() if event["kind"] == "figures"
    } - {None}
    assert len(weights) == 1
    [weights_bytes] = weights
    assert weights_bytes == pytest.approx(9.1948 * GIB, rel=0.001)
    assert f"Loading model weights took {weights_bytes / GIB:.4f} GB" in run.engine_log
    # Every process of this release imports torch_npu._inductor before it chooses its device, which
    # leaves a context on the first device; the equation charges it to rank 0. (vllm-ascend#7107)
    first, second = [rank["budget"]["engine_kv_cache_bytes"] for rank in ranks]
    assert second - first == pytest.approx(FURTHER_CONTEXT_BYTES, abs=1)
    assert "co-tenant" not in [
        finding["id"] for finding in run.report["findings"]
    ]  # it is one of the run's own
