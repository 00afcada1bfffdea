"""Two more releases on the simulated device: every phase seen, the budget recomputed to the byte,
the audit agreed. The environments take minutes to set up (make sim-every): no part of CI."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import require_stack

pytestmark = [pytest.mark.sim, pytest.mark.full, pytest.mark.timeout(600)]

STACK_018, STACK_030 = "vllm-ascend-0.18.0", "vllm-ascend-0.30.0rc2"
#: Phases of every start-up with graphs; and what a release adds.
PHASES = {
    "device_init",
    "hccl_init",
    "weight_load",
    "profile_run",
    "kv_cache_alloc",
    "graph_capture",
    "atb_warm_up",
    "warm_up",
    "shutdown",
}
V2_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def offline(run_memprof: Any, stack: str, model: str, *args: str, **kwargs: Any) -> Any:
    command = ("offline", model, "--device", "sim:910b", "--stack", require_stack(stack), *args)
    run = run_memprof(*command, timeout_s=500, **kwargs)
    assert run.returncode == 0, run.output[-3000:]
    return run


def assert_reconciled(run: Any, ranks: int, phases: set[str]) -> None:
    report = run.report
    assert len(report["ranks"]) == ranks
    for rank in report["ranks"]:
        budget = rank["budget"]
        assert (budget["equation"], budget["residual_bytes"]) == ("E4", 0)
        assert budget["kv_cache_bytes"] == budget["engine_kv_cache_bytes"] > 0
        disagree = [
            row
            for row in budget["audit"]
            if row["difference_bytes"] is not None
            and abs(row["difference_bytes"]) > row["tolerance_bytes"]
        ]
        assert not disagree
        assert [check for check in rank["kv"]["checks"] if check["ok"] is not True] == []
        assert phases <= {phase["phase"] for phase in rank["phases"]}
    assert report["not_measured"] == []
    hooks = [event for event in run.events() if event["kind"] == "hook"]
    wrong = [
        event
        for event in hooks
        if event["state"] in ("stale", "error", "overwritten", "missing", "never_called")
        and event["need"] == "required"
    ]
    assert not wrong
    assert not [event for event in run.events() if event["kind"] == "error"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("stack", "env", "more"),
    [
        (STACK_018, {}, set()),
        (STACK_030, {}, {"kernel_warm_up"}),
        (STACK_030, V2_RUNNER, {"kernel_warm_up"}),
    ],
    ids=["0.18.0", "0.30.0rc2", "0.30.0rc2-v2"],
)
def test_every_phase_and_every_byte(
    run_memprof: Any, stack: str, env: dict[str, str], more: set[str], tp: int
) -> None:
    run = offline(run_memprof, stack, "memprof/tiny", f"-tp={tp}", env=env)
    assert_reconciled(run, tp, PHASES | more)
