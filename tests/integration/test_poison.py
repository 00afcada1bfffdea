"""The host reads nothing of a tiny model that the device never computed: poison mode finds it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.engine import OLD_STACK, STACK, require_stack, run_in_engine
from vllm_memprof.sim.poison import (
    ANSWERED,
    CALL_SITE_DIR,
    UNWRITTEN,
    load_poisoned_reads,
    poison_env,
)
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.runtime import prepare_runtime
from vllm_memprof.sim.selftest import run_selftest

SCRIPT = Path(__file__).parent / "load_drafter.py"

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]


@pytest.mark.parametrize("stack", [STACK, pytest.param(OLD_STACK, marks=pytest.mark.full)])
def test_a_tiny_model_reads_what_was_written(stack):
    reads = run_selftest(require_stack(stack), "memprof/tiny", "910b")
    assert [read for read in reads if read.kind == UNWRITTEN] == []
    # Its weights are zeros instead of random numbers, so its tokens are answers.
    tokens = [read for read in reads if read.kind == ANSWERED]
    assert {read.left_by for read in tokens} == {"aclnnInplaceUniform"}


#: DeepSeek's attention and its layer for drafts, with an output head above what computes (1 MiB).
WITH_DRAFTER = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 8192,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 8,
    "moe_layer_freq": 1,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 10000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@pytest.mark.full
@pytest.mark.parametrize(("without", "kind"), [("", ANSWERED), ("equal", UNWRITTEN)])
def test_whether_a_drafter_shares_the_head_is_no_unwritten_value(tmp_path, without, kind):
    """The engine gives the drafter's head up where ``torch.equal`` says so: 2 MiB here."""
    runtime = prepare_runtime("910b", require_stack(STACK))
    folder, reads = tmp_path / "model", tmp_path / "reads.jsonl"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(WITH_DRAFTER))
    model = resolve_model(str(folder), [])
    env = {**poison_env(reads), "MEMPROF_SIM_STATE": str(tmp_path / "devices")}
    env |= {"PYTHONPATH": f"{CALL_SITE_DIR}{os.pathsep}{runtime.env['PYTHONPATH']}"}
    env["MEMPROF_SIM_WITHOUT"] = without
    run_in_engine(runtime, SCRIPT, model.path, **{**model.env, **env})
    found = load_poisoned_reads(reads)
    shared = [read for read in found if "_maybe_share_lm_head" in read.call_site]
    assert {(read.kind, read.left_by) for read in shared} == {(kind, "aclnnEqual")}
    assert all("llm_base_proposer.py" in read.call_site for read in shared)
    # nothing else of the loading is unwritten
    assert [read for read in found if read.kind == UNWRITTEN and read not in shared] == []
