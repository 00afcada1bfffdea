"""Models that nobody has here: presets of every kind, quantized weights, a folder with nothing but a configuration."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from pathlib import Path

import pytest

from tests.support.engine import OLD_STACK, require_stack
from tests.support.layout import count_parameters
from vllm_memprof.layout import list_weights
from vllm_memprof.sim.presets import find_preset, resolve_model
from vllm_memprof.sim.quantization import describe
from vllm_memprof.units import GIB

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]

ONE_RANK = ["--device", "sim:910b", "--ranks", "one", "--max-model-len=32768"]


def assert_planned(run):
    """The books of the rank balance; its KV section has what the engine printed, and none of its checks failed."""
    assert run.returncode == 0, run.output + run.engine_log[-3000:]
    rank = run.report["ranks"][0]
    assert rank["budget"]["residual_bytes"] == 0
    kv = rank["kv"]
    tokens = re.search(r"GPU KV cache size: ([\d,]+) tokens", run.engine_log)
    concurrency = re.search(
        r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x", run.engine_log
    )
    assert kv["tokens"] == int(tokens[1].replace(",", ""))
    assert kv["max_model_len"] == int(concurrency[1].replace(",", ""))
    assert f"{kv['max_concurrency']:.2f}" == concurrency[2]
    checks = {check["name"]: check["ok"] for check in kv["checks"]}
    unknown = [name for name, ok in checks.items() if ok is None]
    assert unknown == [
        "allocated for the KV cache = planned bytes, within 1%"
    ]  # a plan allocates none
    assert all(ok for name, ok in checks.items() if name not in unknown), checks
    return rank


def weights_of(rank):
    return next(term["bytes"] for term in rank["budget"]["terms"] if term["name"] == "weights")


def expected_bytes(config, tensor_parallel, quantized):
    """Bytes of a rank, from the configuration: matrices are divided, vectors and what has few rows are not."""
    types = describe(config) if quantized else {}
    total = 0
    for weight, shape in list_weights(config).items():
        type_ = types.get(re.sub(r"\.experts\.\d+\.", ".experts.0.", weight), "FLOAT")
        whole = len(shape) == 1 or re.search(
            r"mlp\.gate\.|q_a_proj|kv_a_proj|shared_expert_gate", weight
        )
        size = math.prod(shape) * (2 if type_ == "FLOAT" else 1)
        total += size if whole else size / tensor_parallel
    return total


def model_folder(path, config):
    """A folder with a configuration and nothing else."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


HYBRID = ("Qwen/Qwen3-Next-80B-A3B-Instruct", 4)
VISION_EXPERTS = ("Qwen/Qwen3-VL-30B-A3B-Instruct", 2)


@pytest.mark.parametrize(
    ("model", "eager"),
    [
        (HYBRID, True),
        pytest.param(HYBRID, False, marks=pytest.mark.full),
        pytest.param(VISION_EXPERTS, True, marks=pytest.mark.full),
        pytest.param(VISION_EXPERTS, False, marks=pytest.mark.full),
    ],
)
def test_hybrid_and_expert_models(run_memprof, sim_stack, model, eager):
    name, size = model
    mode = ["--enforce-eager"] if eager else []
    run = run_memprof("plan", name, *ONE_RANK, f"--tensor-parallel-size={size}", *mode)
    rank = assert_planned(run)
    assert ("torch.compile took" in run.engine_log) is not eager
    expected = expected_bytes(find_preset(name).config, size, quantized=False)
    assert weights_of(rank) == pytest.approx(expected, rel=0.02)
    kinds = [group["type"] for group in rank["kv"]["groups"]]
    if model is VISION_EXPERTS:
        assert kinds == ["FullAttentionSpec"]
        return
    assert kinds == ["FullAttentionSpec", *["MambaSpec"] * 3]
    # A request of full length takes a block of each group of states, however long it is: tokens are
    # the engine's figure for that length, and no multiple of it holds for another.
    kv = rank["kv"]
    growing = -(-kv["max_model_len"] // kv["groups"][0]["block_size"])
    assert kv["max_concurrency"] == kv["blocks"] / (growing + 3)
    assert kv["bytes_per_token"] is None


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param("deepseek-ai/DeepSeek-V3", 16, marks=pytest.mark.full),
        pytest.param("Qwen/Qwen3-32B", 4, marks=pytest.mark.full),
        ("Qwen/Qwen3-30B-A3B", 2),
        pytest.param(*HYBRID, marks=pytest.mark.full),
    ],
)
def test_quantized_weights_have_their_sizes(run_memprof, sim_stack, name, size):
    arguments = [f"--tensor-parallel-size={size}", "--quantization=ascend", "--enforce-eager"]
    run = run_memprof("plan", name, *ONE_RANK, *arguments)
    rank = assert_planned(run)
    weights, config = weights_of(rank), find_preset(name).config
    assert weights == pytest.approx(expected_bytes(config, size, quantized=True), rel=0.04)
    assert weights < 0.62 * expected_bytes(config, size, quantized=False)
    assert [
        note
        for note in run.report["run"]["notes"]
        if "quant_model_description.json was generated" in note
    ]


def _rows():
    """Yield a row of docs/models.json for every preset, and the smallest of each stack and device."""
    kept = json.loads((Path(__file__).parents[2] / "docs" / "models.json").read_text())
    first = {row["model"]: row for row in reversed(kept)}
    for place in sorted({(row["stack"], row["device"]) for row in kept}):
        here = [
            row for row in kept if (row["stack"], row["device"]) == place and "error" not in row
        ]
        yield min(here, key=lambda row: row["weights_bytes"])
    yield from first.values()


ROWS = {f"{row['model']} {row['stack']} {row['device']}": row for row in _rows()}


@pytest.mark.full
@pytest.mark.parametrize("row", [*ROWS.values()], ids=[*ROWS])
def test_a_row_of_the_list_of_models_is_planned_again(run_memprof, row):
    require_stack(row["stack"])
    own = ["--device", f"sim:{row['device']}", "--stack", row["stack"], "--ranks", "one"]
    run = run_memprof("plan", row["model"], *own, *shlex.split(row["arguments"]))
    if "error" in row:
        assert run.returncode == 1
        return
    if row["kv_cache_bytes"] is None:
        assert weights_of(run.report["ranks"][0]) == row["weights_bytes"]
        return
    rank = assert_planned(run)
    assert (weights_of(rank), rank["budget"]["engine_kv_cache_bytes"]) == (
        row["weights_bytes"],
        row["kv_cache_bytes"],
    )
    assert (rank["kv"]["tokens"], rank["kv"]["max_concurrency"]) == (
        row["tokens"],
        row["max_concurrency"],
    )


@pytest.mark.full
def test_quantized_weights_of_the_older_engine(run_memprof):
    stack = require_stack(OLD_STACK)
    arguments = [
        "--device",
        "sim:910b",
        "--stack",
        stack,
        "--enforce-eager",
        "--max-model-len=8192",
    ]
    sizes = []
    for quantization in ([], ["--quantization", "ascend"]):
        run = run_memprof("plan", "Qwen/Qwen3-8B", *arguments, *quantization)
        assert run.returncode == 0, run.output
        loaded = re.search(r"Loading model weights took ([\d.]+) GB", run.engine_log)
        sizes.append(float(loaded[1]) * GIB)
    config = find_preset("Qwen/Qwen3-8B").config
    assert sizes == [
        pytest.approx(expected_bytes(config, 1, quantized), rel=0.01) for quantized in (False, True)
    ]


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def test_a_folder_with_nothing_but_a_configuration(run_memprof, sim_stack, tmp_path):
    folder = model_folder(tmp_path / "my-llama", LLAMA)
    run = run_memprof("plan", str(folder), "--device", "sim:910b", "--enforce-eager")
    rank = assert_planned(run)
    assert 0 <= weights_of(rank) - 2 * count_parameters(LLAMA) < 8 << 20  # tables of positions
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert f"{folder} has no tokenizer: a synthetic one was generated" in run.report["run"]["notes"]


#: Images and video, of a kind without a preset: linear and full attention, two layers of an encoder.
MULTIMODAL = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "dtype": "bfloat16",
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
    },
    "vision_config": {"model_type": "qwen3_5", "depth": 2, "out_hidden_size": 1024},
}


@pytest.mark.full
def test_a_multimodal_folder_without_the_files_of_its_processor(run_memprof, sim_stack, tmp_path):
    folder = model_folder(tmp_path / "mine", MULTIMODAL)
    arguments = ["--device", "sim:910b", "--enforce-eager", "--max-model-len=8192"]
    run = run_memprof("plan", str(folder), *arguments)
    rank = assert_planned(run)
    assert "mm_profile" in [phase["phase"] for phase in rank["phases"]]
    named = "has no preprocessor_config.json, video_preprocessor_config.json: generated as for"
    assert [note for note in run.report["run"]["notes"] if named in note]


#: Stores nothing: a prompt of one token has nothing that it would fill.
CONNECTOR = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}


@pytest.mark.full
def test_draft_model_lora_and_connector_are_owners_of_their_own(run_memprof, sim_stack, tmp_path):
    """Each has a phase, and a part of the weights or of allocated; the engine's figures stay."""
    draft = {"method": "draft_model", "model": resolve_model("memprof/tiny", []).path}
    speculative = json.dumps({**draft, "num_speculative_tokens": 1})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": {"prompt_token_ids": [17]}}) + "\n")
    options = ["--enable-lora", "--max-lora-rank=16", "--speculative-config", speculative]
    options += ["--kv-transfer-config", json.dumps(CONNECTOR)]
    options += ["--enforce-eager", "--max-model-len=2048"]
    own = ["--device", "sim:910b", "--prompts", str(prompts), "--max-tokens", "1"]
    run = run_memprof("offline", "memprof/tiny", *own, *options)
    assert run.returncode == 0, run.output + run.engine_log[-3000:]
    rank = run.report["ranks"][0]
    grown = {phase["phase"]: phase["delta"]["allocated_bytes"] for phase in rank["phases"]}
    weights = 2 * count_parameters(find_preset("memprof/tiny").config)
    assert grown["draft_load"] >= weights
    assert grown["lora_load"] > 0
    assert grown["weight_load"] >= weights + grown["draft_load"] + grown["lora_load"]
    assert rank["budget"]["residual_bytes"] == 0
    assert [row for row in rank["budget"]["audit"] if row["agrees"] is False] == []
    assert [check for check in rank["kv"]["checks"] if check["ok"] is not True] == []
    # the engine's figure, divided
    term = next(row for row in rank["budget"]["terms"] if row["name"] == "weights")
    parts = {part["name"]: (part["bytes"], part["how"]) for part in term["parts"]}
    assert parts["draft_weights"] == (grown["draft_load"], "measured")
    assert parts["lora"] == (grown["lora_load"], "measured")
    assert sum(size for size, _ in parts.values()) == term["bytes"] == weights_of(rank)
    assert parts["target_weights"][0] >= weights
    # the drafter is the model once more: half of the KV cache
    kv = rank["kv"]
    assert (kv["draft_layers"], kv["draft_bytes"] * 2) == (2, kv["planned_bytes"])
    # parts of allocated; rows and unexplained add up to the device without them
    warm_up = next(phase for phase in rank["phases"] if phase["phase"] == "warm_up")
    memory = warm_up["owners"]["after"]
    held = {
        part["component"]: part["bytes"]
        for part in memory["parts"]
        if part.get("part_of") == "allocated"
    }
    assert held == {
        "target_weights": grown["weight_load"] - grown["draft_load"] - grown["lora_load"],
        "draft_weights": grown["draft_load"],
        "lora": grown["lora_load"],
        "draft_kv_cache": kv["draft_bytes"],
        "kv_connector": grown["kv_connector"],
    }
    known = sum(row["bytes"] for row in memory["rows"] if row["bytes"] is not None)
    assert known + memory["unexplained_bytes"] == warm_up["after"]["device_total_bytes"]
    assert memory["unexplained_bytes"] == 0


@pytest.mark.full
def test_an_unknown_kind_is_refused_in_the_engine_s_words(run_memprof, sim_stack, tmp_path):
    folder = model_folder(
        tmp_path / "foo", {**LLAMA, "architectures": ["FooForCausalLM"], "model_type": "foo"}
    )
    run = run_memprof("plan", str(folder), "--device", "sim:910b")
    assert run.returncode == 1
    assert "does not recognize this architecture" in run.report["run"]["exit_reason"]
    assert (
        run.report["failure"]["title"]
        == "this release does not know the model's architecture or model_type"
    )


def test_a_command_is_planned_as_its_server_has_it(run_memprof, sim_stack):
    """Pasted whole: a folder of another machine, how its weights are read, who reads its answers."""
    typed = """vllm serve /models/vllm-ascend/DeepSeek-V2-Lite_w8a8 --port 8000 --quantization ascend
        --tensor-parallel-size 16 --enable-expert-parallel --reasoning-parser deepseek_r1
        --model-loader-extra-config '{"enable_multithread_load": true, "num_threads": 8}'
        --max-model-len 4096 --enforce-eager"""
    run = run_memprof("plan", *shlex.split(typed), "--device", "sim:a3")
    assert_planned(run)
    named = "/models/vllm-ascend/DeepSeek-V2-Lite_w8a8 is not on this machine"
    assert f"{named}: deepseek-ai/DeepSeek-V2-Lite by its name" in run.info["notes"]
    few = len(os.sched_getaffinity(0)) < 8
    assert run.info["ranks"]["mode"] == ("one" if few else "all")
