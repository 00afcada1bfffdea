"""Tokens that requests can hold at once: memprof's figure against an engine that is filled until its first preemption.

The prompts of a job enter one engine of the simulated device at once; nothing is shared between
them. What its scheduler's requests have computed before the first preemption is what they hold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import OLD_STACK, STACK, RunResult, require_stack, run_script

pytestmark = [pytest.mark.sim, pytest.mark.timeout(400)]

FILL = """
import json, sys
import torch
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    job = json.loads(sys.argv[2])
    llm = LLM(sys.argv[1], load_format="dummy", enforce_eager=True, enable_prefix_caching=False, **job["engine"])
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    sampling = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False, **job["sampling"])
    for name, length in enumerate(job["prompts"]):
        engine.add_request(str(name), {"prompt_token_ids": [100 + (7 * name + at) % 800 for at in range(length)]}, sampling)
    torch.npu.reset_peak_memory_stats()  # by this program: nothing of memprof does
    most, finished, preempted, requests, before = 0, [], False, 0, torch.npu.memory_allocated()
    for step in range(job["most_steps"]):
        finished += [each.request_id for each in engine.step() if each.finished]
        known = list(scheduler.requests.values())
        if preempted := any(each.num_preemptions for each in known):
            break
        if not known:
            break
        most = max(most, sum(each.num_computed_tokens for each in scheduler.running))
        requests = max(requests, len(scheduler.running))
    print("RESULT " + json.dumps({
        "held": most, "finished": finished, "preempted": preempted, "requests": requests, "steps": step + 1,
        "bytes": torch.npu.max_memory_allocated() - before,
    }), flush=True)
"""


@dataclass
class Filled:
    """What an engine held before its first preemption, and what the report says of it."""

    run: RunResult
    seen: dict[str, Any]

    @property
    def kv(self) -> dict[str, Any]:
        return self.run.report["ranks"][0]["kv"]

    @property
    def findings(self) -> dict[str, Any]:
        return {each["id"]: each for each in self.run.report["findings"]}

    def assert_proven(self) -> None:
        """Hold the usable tokens against those held, within one block a request."""
        assert self.seen["preempted"], self.seen
        slack = self.seen["requests"] * self.kv["block_size"]
        assert abs(self.kv["usable_tokens"] - self.seen["held"]) <= slack, (self.seen, self.kv)


def fill(
    stack: str,
    folder: Path,
    prompts: list[int],
    new_tokens: int = 400,
    most_steps: int = 400,
    model: str = "memprof/tiny",
    env: dict[str, str] | None = None,
    sampling: dict[str, Any] | None = None,
    **engine: Any,
) -> Filled:
    job = {
        "sampling": sampling or {},
        "engine": engine,
        "prompts": prompts,
        "new_tokens": new_tokens,
        "most_steps": most_steps,
    }
    run = run_script(require_stack(stack), folder, FILL, json.dumps(job), model=model, env=env)
    lines = [line for line in run.engine_log.splitlines() if "RESULT {" in line]
    assert lines, run.engine_log[-3000:]
    return Filled(run, json.loads(lines[0].partition("RESULT ")[2]))


@pytest.mark.full
def test_uneven_stages_are_filled_until_the_first_preemption(tmp_path: Path) -> None:
    """The stage with three of four layers has a third of the other's blocks."""
    found = fill(
        STACK,
        tmp_path,
        [1270] * 12,  # each is eleven steps before its next block
        hf_overrides={"num_hidden_layers": 4},
        env={"VLLM_PP_LAYER_PARTITION": "3,1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
        pipeline_parallel_size=2,
        max_model_len=2048,
        max_num_seqs=16,
        kv_cache_memory_bytes=16 << 20,
    )
    print(found.seen, found.kv)
    found.assert_proven()


@pytest.mark.full
@pytest.mark.parametrize("stack", [STACK, OLD_STACK])
def test_a_cache_is_filled_until_the_first_preemption(stack: str, tmp_path: Path) -> None:
    found = fill(
        stack,
        tmp_path,
        [1100] * 9,
        max_model_len=2048,
        max_num_seqs=16,
        num_gpu_blocks_override=64,
    )
    print(found.seen, found.kv)
    found.assert_proven()
    assert found.kv["usable_tokens"] == 63 * 128


def test_a_prompt_that_waits_for_ever_is_named_before_it_does(tmp_path: Path) -> None:
    """The engine starts: a request of 2,048 tokens fits into its blocks, one of which is empty."""
    found = fill(
        STACK,
        tmp_path,
        [1921, 1920],
        new_tokens=1,
        most_steps=12,
        max_model_len=2048,
        max_num_seqs=16,
        num_gpu_blocks_override=16,
    )
    assert found.kv["longest_tokens"] == 1920
    finding = found.findings["kv-out-of-reach"]
    title = "A prompt of 1,921 tokens waits for ever: it needs 16 blocks on TP0, which has 15"
    assert (finding["severity"], finding["title"]) == ("error", title)
    assert found.seen["finished"] == []  # the first waits, and the other behind it


@pytest.mark.full
def test_the_longest_prompt_that_does_not_wait(tmp_path: Path) -> None:
    engine = {"max_model_len": 2048, "max_num_seqs": 16, "num_gpu_blocks_override": 16}
    found = fill(STACK, tmp_path, [1920], new_tokens=1, most_steps=12, **engine)
    assert found.seen["finished"] == ["0"]


#: Four layers of a hybrid: one of attention, three of states.
HYBRID = {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 2}


@pytest.mark.full
def test_a_hybrid_is_filled_until_the_first_preemption(tmp_path: Path) -> None:
    """States take blocks of the pool, and a block of each group stays free: two requests of eleven
    blocks each cannot grow to a twelfth, for which three blocks are free."""
    found = fill(
        STACK,
        tmp_path,
        [11_200] * 2,
        new_tokens=900,
        most_steps=200,
        model="Qwen/Qwen3-Next-80B-A3B-Instruct",
        hf_overrides=HYBRID,
        max_model_len=12_288,
        max_num_seqs=16,
        num_gpu_blocks_override=32,
    )
    print(found.seen, found.kv)
    assert [group["type"] for group in found.kv["groups"]] == [
        "FullAttentionSpec",
        *["MambaSpec"] * 3,
    ]
    found.assert_proven()
    assert found.kv["usable_tokens"] == 22 * 1024
    assert 0 <= found.kv["usable_tokens"] - found.seen["held"] <= 2  # either's last token


@pytest.mark.full
def test_log_probabilities_of_a_prompt_take_what_was_not_profiled(tmp_path: Path) -> None:
    """Logits of all its tokens, in the dtype of the model and in float32, where the profile run
    had eight rows of them."""
    engine = {"max_model_len": 2048, "max_num_seqs": 8, "gpu_memory_utilization": 0.3}
    asked = {"prompt_logprobs": 1}
    found = fill(STACK, tmp_path, [2000], 1, 4, "Qwen/Qwen3-0.6B", sampling=asked, **engine)
    [step] = [each for each in found.kv["steps"] if each["largest"] == 2047]
    peak = found.run.report["ranks"][0]["figures"]["peak_activation_bytes"]
    print(found.seen, step, peak)
    assert found.seen["finished"] == ["0"]
    logits = 2000 * found.kv["vocab_size"] * (2 + 4)
    assert found.seen["bytes"] >= logits
    assert found.seen["bytes"] - peak >= step["bytes"] > 0


@pytest.mark.full
def test_kernels_with_offsets_of_32_bits(run_memprof: Any, sim_stack: str) -> None:
    """Few layers leave each a pool beyond what DeepSeek-V4's attention addresses."""
    few = json.dumps({"num_hidden_layers": 4})
    run = run_memprof(
        "plan", "deepseek-ai/DeepSeek-V4-Flash", "--device", "sim:910b", "--enforce-eager",
        "--tensor-parallel-size=8", "--ranks=one", "--max-model-len=65536", f"--hf-overrides={few}",
    )  # fmt: skip
    kv = run.report["ranks"][0]["kv"]
    print(json.dumps({name: each for name, each in kv.items() if name != "checks"}))
    names = [each["name"] for each in kv["limits"]]
    assert "dsv4-page-offsets" in names
    assert not {"flex-attention", "triton-mla"}.intersection(names)
