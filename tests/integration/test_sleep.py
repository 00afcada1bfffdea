"""Sleep mode and weight updates on the real engine: cycles that leave nothing, and cycles with a leak planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine import RunResult, run_script
from tests.support.planted import plant
from tests.unit.accounting.builders import device_memory, remainders_in
from vllm_memprof.units import MIB

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]

ARGS = ["memprof/tiny", "--device", "sim:910b", "--enforce-eager", "--max-model-len", "2048"]
ARGS += ["--gpu-memory-utilization", "0.4", "--prompt", "hi"]
#: vllm-ascend wakes up only where weights are kept in the plain format.
SLEEP = ["--sleep-cycles", "5", "--additional-config", '{"weight_nz_mode": 0}']
CYCLE_FINDINGS = {"residue-per-cycle", "reserved-grows-without-empty-cache"}
LEAK_BYTES = 240 * MIB

#: A worker that keeps a tensor with each wake-up.
LEAK = f"""
def register():
    def then(worker):
        def make(original):
            def wake_up(self, tags=None):
                import torch
                original(self, tags)
                self.kept = getattr(self, "kept", [])
                self.kept.append(torch.empty({LEAK_BYTES}, dtype=torch.uint8, device=self.device))
            return wake_up
        wrap(worker, "wake_up", make)
    when_worker_is_there(then)
"""


def found(run: RunResult) -> set[str]:
    return {finding["id"] for finding in run.report["findings"]} & CYCLE_FINDINGS


@pytest.mark.full  # CI: cycles of which each leaves something, by the same rule
def test_five_clean_cycles_leave_nothing(run_memprof) -> None:
    run = run_memprof("offline", *ARGS, *SLEEP)
    assert run.returncode == 0, run.output[-3000:]
    assert found(run) == set()
    [rank] = run.report["ranks"]
    cycles = rank["cycles"]
    assert [cycle["number"] for cycle in cycles] == [1, 2, 3, 4, 5]
    granted = rank["budget"]["engine_kv_cache_bytes"]
    assert (
        cycles[0]["residue_bytes"] <= 0
    )  # the first sleep gives back what the request before it had cached
    assert [cycle["residue_bytes"] for cycle in cycles[1:]] == [0] * 4
    for cycle in cycles:
        assert (
            cycle["used_bytes"] - cycle["asleep_used_bytes"] >= granted - 64 * MIB
        )  # KV cache and weights were gone
        assert cycle["emptied"] is True  # by the pool, each time that it sleeps
    for phase in rank["phases"]:
        for edge in ("before", "after"):
            non_torch = (phase[edge] or {}).get("non_torch_bytes")
            assert non_torch is None or non_torch >= 0, phase["phase"]
    asleep = next(phase["after"] for phase in rank["phases"] if phase["phase"] == "sleep")
    assert asleep["unmapped_bytes"] > granted - 64 * MIB
    assert asleep["unmapped_bytes"] == cycles[0]["used_bytes"] - cycles[0]["asleep_used_bytes"]
    for memory in device_memory(rank):
        if memory["phase"] in ("sleep", "wake_up"):
            known = sum(row["bytes"] for row in memory["owners"] if row["bytes"] is not None)
            assert known + memory["unexplained_bytes"] == rank["device_total_bytes"]
            assert remainders_in(memory)["rest"] == 0
    assert "Sleep and wake-up cycles" in run.output


def test_a_leak_of_every_cycle_is_found_and_priced(run_memprof, tmp_path: Path) -> None:
    env = plant(tmp_path / "plugin", LEAK)
    run = run_memprof("offline", *ARGS, *SLEEP, env=env)
    assert run.returncode == 0, run.output[-3000:]
    assert found(run) == {"residue-per-cycle"}
    [leak] = [finding for finding in run.report["findings"] if finding["id"] == "residue-per-cycle"]
    lost = (
        LEAK_BYTES + 2 * MIB
    )  # torch_npu adds 32 bytes to the block, and the segment is a multiple of 2 MiB
    assert leak["bytes"] == lost
    [rank] = run.report["ranks"]
    assert leak["kv_tokens"] == lost // rank["kv"]["bytes_per_block"] * rank["kv"]["block_size"]
    assert "allocated +240.0 MiB x 4" in leak["evidence"]
    assert [cycle["residue_bytes"] for cycle in rank["cycles"]][1:] == [lost] * 4


#: Weight updates as trainers do them, by the engine's own three calls; the transfer hands the model
#: its own weights. With ``growing`` each update needs a larger buffer than the one before, which no
#: block in the cache can hold.
UPDATE = """
import sys
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

@dataclass
class Init(WeightTransferInitInfo):
    pass

@dataclass
class Update(WeightTransferUpdateInfo):
    buffer_mib: int = 0

class Local(WeightTransferEngine):
    init_info_cls, update_info_cls = Init, Update

    def __init__(self, config, parallel_config, model):
        super().__init__(config, parallel_config, model)
        self.weights = model

    def init_transfer_engine(self, init_info):
        pass

    def receive_weights(self, update_info, load_weights):
        buffer = torch.empty(update_info.buffer_mib << 20, dtype=torch.uint8, device="npu")
        load_weights([(name, param.detach()) for name, param in self.weights.named_parameters()])

    def trainer_send_weights(self, *args, **kwargs):
        raise NotImplementedError

    def shutdown(self):
        pass

def empty(worker):
    torch.npu.empty_cache()

def load_directly(worker):
    worker.model_runner.get_model().load_weights(iter([]))

def main():
    from vllm import LLM, SamplingParams
    model, kind = sys.argv[1:]
    WeightTransferEngineFactory.register_engine("local", Local)
    llm = LLM(model, load_format="dummy", enforce_eager=True, max_model_len=2048, gpu_memory_utilization=0.4,
              weight_transfer_config={"backend": "local"})
    sampling = SamplingParams(max_tokens=2, temperature=0)
    for number in range(5):
        llm.start_weight_update(is_checkpoint_format=False)
        llm.update_weights({"update_info": {"buffer_mib": 64 * (number + 1) if kind.startswith("growing") else 64}})
        llm.finish_weight_update()
        if kind == "growing-emptied":
            llm.collective_rpc(empty)
        llm.generate(["hi"], sampling, use_tqdm=False)
    if kind == "steady":
        llm.collective_rpc(load_directly)
    llm.llm_engine.engine_core.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        pytest.param("growing", {"reserved-grows-without-empty-cache"}, marks=pytest.mark.full),
        pytest.param("steady", set(), marks=pytest.mark.full),
        pytest.param("growing-emptied", set(), marks=pytest.mark.full),
    ],
)
def test_weight_updates(sim_stack: str, tmp_path: Path, kind: str, expected: set[str]) -> None:
    run = run_script(sim_stack, tmp_path, UPDATE, kind)
    assert run.info["status"] == "ok", run.engine_log[-3000:]
    [rank] = run.report["ranks"]
    updates = [phase for phase in rank["phases"] if phase["phase"] == "weight_update"]
    by = ["start_weight_update"] * 5 + (["load_weights"] if kind == "steady" else [])
    assert [
        phase["detail"]["by"] for phase in updates
    ] == by  # one from start to finish, whatever lies between
    assert not any(phase["open"] or phase["error"] for phase in updates)
    assert [cycle["kind"] for cycle in rank["cycles"]] == ["weight_update"] * len(by)
    assert found(run) == expected
    if expected:
        [growth] = [finding for finding in run.report["findings"] if finding["id"] in expected]
        reserved = [cycle["reserved_bytes"] for cycle in rank["cycles"]]
        assert (
            reserved[-1] - reserved[0] >= 4 * 64 * MIB
        )  # the last buffer is so much larger than the first
        assert growth["bytes"] == sum(cycle["cached_residue_bytes"] for cycle in rank["cycles"][1:])
        assert "no empty_cache in between" in growth["evidence"]
