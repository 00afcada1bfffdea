"""Weights of real engines: rows that add up to the engine's figure, and each cause provoked."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support.engine import OLD_STACK, require_stack
from vllm_memprof.layout import list_weights
from vllm_memprof.sim.presets import find_preset

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]

PLAN = ["--device", "sim:910b", "--enforce-eager", "--max-model-len=2048"]
ONE = ["--ranks", "one"]
DATA = Path(__file__).parents[1] / "data"
ROUTER = {"replicated", "made"}  # 0.30 keeps it in fp32 as well
WIDTHS = {"BF16": 2, "F8_E4M3": 1}


def model_folder(path, preset, dtype=None, extra=(), tied=None, **config):
    """A preset's files in a folder, with weights of zeros where a dtype is given."""
    content = {**find_preset(preset).config, **config}
    if tied is not None:
        content["tie_word_embeddings"] = tied
    shapes = {} if dtype is None else {**list_weights(content), **dict(extra)}
    return write_model(path, content, shapes, dtype)


def write_model(path, content, shapes, dtype="BF16"):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(content))
    if not shapes:
        return path
    header, end = {}, 0
    for name, shape in shapes.items():
        # norms, embeddings and the head stay as they are
        own = dtype if "proj" in name else "BF16"
        size = math.prod(shape) * WIDTHS[own]
        header[name] = {"dtype": own, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return path


def weights_of(run, ended=True):
    """The weights of every rank, which add up, and whose causes do as well."""
    assert run.returncode == 0 or not ended, run.output + run.engine_log[-3000:]
    assert run.report["ranks"]
    for rank in run.report["ranks"]:
        held = rank["weights"]
        term = next((row for row in rank["budget"]["terms"] if row["name"] == "weights"), None)
        if term is not None:
            assert held["engine_bytes"] == term["bytes"]
        assert sum(row["loaded_bytes"] for row in held["rows"]) == held["engine_bytes"]
        for row in held["rows"]:
            if row["difference_bytes"] is not None:
                assert sum(row["causes"].values()) == row["difference_bytes"], row
    return [rank["weights"] for rank in run.report["ranks"]]


def caused(held):
    """Class -> cause -> bytes, all dtypes."""
    found: dict[str, dict[str, int]] = {}
    for row in held["rows"]:
        for name, size in row["causes"].items():
            own = found.setdefault(row["class"], {})
            own[name] = own.get(name, 0) + size
    return found


def unnamed(held):
    return sum(row["causes"].get("unexplained", 0) for row in held["rows"]) + sum(
        row["loaded_bytes"] for row in held["rows"] if row["class"] == "unexplained"
    )


def test_a_quantised_checkpoint_that_runs_in_bf16(run_memprof, sim_stack, tmp_path):
    """Real files: fp8 without a quantization_config, and a head that the model ties."""
    extra = {"lm_head.weight": (1024, 256)}
    model = model_folder(tmp_path / "fp8", "memprof/tiny", "F8_E4M3", extra, tied=True)
    run = run_memprof("plan", str(model), *PLAN, "--skip-tokenizer-init")
    (held,) = weights_of(run)
    assert (held["source"], unnamed(held)) == ("checkpoint", 0)
    found = caused(held)
    assert found["lm_head"] == {"not_loaded": -2 * 1024 * 256}
    wide = 1_572_864  # of each class, in bf16
    assert (found["attention"], found["dense_mlp"]) == ({"dtype": wide // 2},) * 2
    rows = {(row["class"], row["dtype"]): row for row in held["rows"]}
    assert rows["attention", "float8_e4m3fn"]["causes"] == {"dtype": -wide // 2}
    assert rows["attention", "bfloat16"]["causes"] == {"dtype": wide}
    said = [each for each in run.report["findings"] if each["id"] == "silent-dequantisation"]
    assert [each["bytes"] for each in said] == [wide // 2] * 2
    assert "attention: float8_e4m3fn in the checkpoint, bfloat16 on the device" in run.full


def test_experts_and_kv_heads_of_few(run_memprof, sim_stack):
    """Four ranks, two KV heads, eight experts and four redundant ones.

    A profile run that moves experts needs a library that the simulated device lacks.
    """
    redundant = json.dumps({"eplb_config": {"dynamic_eplb": True, "num_redundant_experts": 4}})
    arguments = ["--tensor-parallel-size=4", "--enable-expert-parallel"]
    run = run_memprof(
        "plan", "memprof/tiny-moe", *PLAN, *ONE, *arguments, f"--additional-config={redundant}",
        env={"DYNAMIC_EPLB": "true"},
    )  # fmt: skip
    (held,) = weights_of(run, ended=False)
    found = caused(held)
    # keys and values of two layers: two ranks hold the same head
    assert found["attention"] == {"kv_heads": 2 * 2 * 128 * 256 * 2 // 2}
    [experts] = [row for row in held["rows"] if row["class"] == "experts" and row["expected_bytes"]]
    assert experts["causes"] == {"redundant": 2 * 3 * 128 * 256 * 2}
    assert found["norms"].keys() == found["router"].keys() == {"replicated"}
    assert unnamed(held) == 0


def test_a_draft_and_copies_of_latent_attention(run_memprof, sim_stack, tmp_path):
    model = model_folder(tmp_path / "mtp", "memprof/tiny-mla", num_nextn_predict_layers=1)
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    run = run_memprof("plan", str(model), *PLAN, f"--speculative-config={speculative}")
    (held,) = weights_of(run)
    found = caused(held)
    assert found["attention"] == {"copies": 2 * 2048 * 512 * 2}
    assert held["source"] == "layout"
    assert any(row["class"] == "draft" for row in held["rows"])
    assert unnamed(held) == 0


@pytest.mark.full
@pytest.mark.parametrize("stack", [None, OLD_STACK, "vllm-ascend-0.18.0", "vllm-ascend-0.30.0rc2"])
@pytest.mark.parametrize(
    ("model", "arguments", "cls", "causes"),
    [
        ("memprof/tiny", [], "tables", {"tables"}),
        ("memprof/tiny", ["--quantization=ascend"], "scales", {"made", "copies"}),
        ("memprof/tiny-vl", ["--tensor-parallel-size=2", *ONE], "norms", {"replicated"}),
        ("memprof/tiny-moe", ["--tensor-parallel-size=2", *ONE], "router", ROUTER),
        ("memprof/tiny-mla", [], "attention", {"copies"}),
    ],
)
def test_each_stack(run_memprof, sim_stack, stack, model, arguments, cls, causes):
    own = [] if stack is None else ["--stack", require_stack(stack)]
    run = run_memprof("plan", model, *PLAN, *own, *arguments)
    for held in weights_of(run):
        assert caused(held)[cls].keys() <= causes
        assert unnamed(held) == 0


@pytest.mark.full
def test_redundant_experts_of_sglang(run_memprof, sim_stack):
    expert = ["--ep-size=2", "--enable-eplb", "--ep-num-redundant-experts=4", "--tp-size=2"]
    both = weights_of(run_memprof("plan", "memprof/tiny-moe", *PLAN[:2], *_sglang(), *expert))
    assert len(both) == 2
    for held in both:
        found = caused(held)
        assert found.keys() == {"experts", "router", "norms", "tables"}
        assert found["experts"] == {"redundant": 2 * 2 * 3 * 128 * 256 * 2}
        assert found["router"] == {"replicated": 2 * 8 * 256 * 2 // 2}
        assert (held["source"], unnamed(held)) == ("layout", 0)


@pytest.mark.full
def test_a_draft_of_sglang_has_its_own_ends(run_memprof, sim_stack, tmp_path):
    """It is loaded after the model, and takes the model's ends only later."""
    model = model_folder(tmp_path / "mtp", "memprof/tiny-mla", num_nextn_predict_layers=1)
    drafts = ["--speculative-algorithm=NEXTN", "--speculative-num-steps=1"]
    drafts += ["--speculative-eagle-topk=1", "--speculative-num-draft-tokens=2"]
    run = run_memprof("plan", str(model), *PLAN[:2], *_sglang(), *drafts, "--skip-tokenizer-init")
    (held,) = weights_of(run)
    found = caused(held)
    assert found["draft"]["draft_ends"] == 2 * 2 * 1024 * 256
    assert found["draft"].keys() <= {"draft_ends", "copies", "made"}
    grown = sum(
        phase["after"]["allocated_bytes"] - phase["before"]["allocated_bytes"]
        for phase in run.report["ranks"][0]["phases"]
        if phase["phase"] in ("weight_load", "draft_load")
    )
    assert (held["engine_bytes"], unnamed(held)) == (grown, 0)


@pytest.mark.full
def test_padding_of_heads(run_memprof, sim_stack, tmp_path):
    """A vision tower of three heads over two ranks: four heads."""
    table = json.loads((DATA / "glm4v_three_heads.json").read_text())
    model = write_model(tmp_path / "glm4v", table["config"], table["shapes"])
    tp = ["--tp-size=2", "--skip-tokenizer-init", "--disable-cuda-graph"]
    for held in weights_of(run_memprof("plan", str(model), *PLAN[:2], *_sglang(), *tp)):
        vision = caused(held)["vision"]
        # queries, keys, values, and what they are projected by: half a head a rank is of none
        assert vision["padding"] == 2 * 4 * (64 // 2) * 192 * 2
        assert (held["source"], unnamed(held)) == ("checkpoint", 0)


def _sglang() -> list[str]:
    return ["--engine", "sglang", "--stack", require_stack("sglang-0.5.23")]


@pytest.mark.full
def test_a_pipeline_with_a_tied_head(run_memprof, sim_stack):
    tied = "--hf-overrides=" + json.dumps({"tie_word_embeddings": True})
    run = run_memprof("plan", "memprof/tiny", *PLAN, "--pipeline-parallel-size=2", tied)
    first, last = weights_of(run)
    assert caused(last)["embedding"] == {"stages": 2 * 1024 * 256}
    assert "embedding" not in caused(first)
    assert (unnamed(first), unnamed(last)) == (0, 0)


@pytest.mark.full
def test_a_vision_tower_on_every_rank(run_memprof, sim_stack):
    data = ["--tensor-parallel-size=2", *ONE, "--mm-encoder-tp-mode=data"]
    (held,) = weights_of(run_memprof("plan", "memprof/tiny-vl", *PLAN, *data))
    (row,) = [row for row in held["rows"] if row["class"] == "vision"]
    assert row["causes"] == {"replicated": row["loaded_bytes"] // 2}


@pytest.mark.full
def test_a_real_hybrid_model(run_memprof, sim_stack):
    name = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    run = run_memprof("plan", name, *PLAN, *ONE, "--tensor-parallel-size=4")
    (held,) = weights_of(run)
    assert held["source"] == "layout"
    assert unnamed(held) == 0


def _experts_in_4_bits(folder: Path) -> None:
    """A description in which the experts have 4 bits."""
    from vllm_memprof.sim.quantization import FILE_NAME, describe

    types = describe(json.loads((folder / "config.json").read_text())) or {}
    types = {
        name: "W4A8_DYNAMIC" if ".experts." in name and kind != "FLOAT" else kind
        for name, kind in types.items()
    }
    (folder / FILE_NAME).write_text(json.dumps({**types, "version": "1.0.0", "group_size": 256}))


@pytest.mark.full
def test_experts_in_4_bits(run_memprof, sim_stack, tmp_path):
    model = model_folder(tmp_path / "w4", "memprof/tiny-moe")
    _experts_in_4_bits(model)
    run = run_memprof("plan", str(model), *PLAN, "--quantization=ascend")
    (held,) = weights_of(run)
    rows = {row["dtype"]: row for row in held["rows"] if row["class"] == "experts"}
    assert rows["int4"]["expected_bytes"] == 2 * 8 * 3 * 128 * 256 // 2
    assert "silent-dequantisation" not in [each["id"] for each in run.report["findings"]]
