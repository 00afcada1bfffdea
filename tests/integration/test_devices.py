"""Every kind of simulated device starts on a stack whose vllm-ascend was built for another."""

from __future__ import annotations

import pytest

from tests.support.engine import OLD_STACK, STACK, require_stack
from vllm_memprof.sim.profiles import load_profile

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]

#: --device -> device type, as vllm-ascend spells it.
TYPES = {"sim:a3": "A3", "sim:310p": "_310P"}


@pytest.mark.parametrize(
    ("stack", "device", "ranks"),
    [
        (STACK, "sim:a3", 2),
        (STACK, "sim:310p", 1),
        pytest.param(OLD_STACK, "sim:a3", 1, marks=pytest.mark.full),
        pytest.param(OLD_STACK, "sim:310p", 1, marks=pytest.mark.full),
    ],
)
def test_a_plan_on_a_device_of_another_type(run_memprof, stack, device, ranks):
    """A worker of its own, where there are two, and the driver's process, where there is one, are
    both told; each checks its type against the device (check_ascend_device_type)."""
    run = run_memprof(
        *("plan", "memprof/tiny", "--device", device, "--stack", require_stack(stack)),
        *("--ranks=all", f"--tensor-parallel-size={ranks}", "--enforce-eager"),
        "--max-model-len=4096",
    )
    assert run.returncode == 0, run.output + run.engine_log[-3000:]
    assert run.info["env"]["MEMPROF_SIM_DEVICE_TYPE"] == TYPES[device]
    assert [note for note in run.info["notes"] if f"built for {TYPES[device]};" in note]
    soc = load_profile(device.removeprefix("sim:")).device.soc_name
    workers = [event for event in run.events() if event["kind"] == "identity" and event["soc"]]
    assert {event["soc"] for event in workers} == {soc}
    assert len(run.report["ranks"]) == ranks
    assert run.report["ranks"][0]["kv"]["tokens"] > 0
