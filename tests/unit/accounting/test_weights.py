"""Weights by class: the causes of published surpluses, and sums that hold for any rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.render import printed
from tests.unit.accounting.builders import process, run_of, snapshot, span
from vllm_memprof.accounting import build_report
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.weights import Checkpoint, Loaded, TensorRow
from vllm_memprof.report.documents.first_screen import FirstScreen
from vllm_memprof.report.table import render_table

GIB = 2**30
CONFIG = {"num_hidden_layers": 1, "model_type": "unknown"}


def row(name, shape, count=1, dtype="bfloat16", layers=(0,), **more):
    size = count * 2 if dtype == "bfloat16" else count
    for each in shape:
        size *= each
    sizes = {"bytes": size, **more}
    layers = list(layers) if "*" in name else []
    return TensorRow(name, dtype, list(shape), count, layers=layers, **sizes)


def report_of(loaded, checkpoint, ranks=None, config=None, expandable=True, reserved=0, **who):
    """The report of one rank whose blocks are as large as its tensors."""
    held = Loaded(
        [replace(each, block_bytes=each.bytes) for each in loaded],
        {**CONFIG, **(config or {})},
        ranks or {"tp": 1, "pp": 1, "dp": 1},
        expandable=expandable,
    )
    size = sum(each.bytes for each in loaded)
    load = span("weight_load", snapshot(allocated_bytes=0),
                snapshot(allocated_bytes=size, reserved_bytes=size + reserved))  # fmt: skip
    one = replace(process([load], {"weights_bytes": size}, **who), weights=held)
    run = run_of(one)
    return build_report(replace(run, info=replace(run.info, checkpoint=Checkpoint(checkpoint))))


def causes_of(report):
    held = report.ranks[0].weights
    assert sum(each["loaded_bytes"] for each in held.rows) == held.engine_bytes
    for each in held.rows:
        assert sum(each["causes"].values()) == (each["difference_bytes"] or 0)
    return {(each["class"], each["dtype"]): each["causes"] for each in held.rows if each["causes"]}


def ids(report):
    return {each.id: each.bytes for each in report.findings}


def test_clones_of_experts():
    """vllm-ascend#15219: 43 layers x 4 experts beside w13 and w2, 8.06 GiB a rank."""
    name, layers = "model.layers.*.mlp.experts.", range(43)
    whole = [row(f"{name}w13_weight", (4, 4096, 4096), 43, layers=layers),
             row(f"{name}w2_weight", (4, 2048, 4096), 43, layers=layers)]  # fmt: skip
    clones = [row(f"{name}w13_weight_list.*", (4096, 4096), 172, layers=layers, kind="attribute"),
              row(f"{name}w2_weight_list.*", (2048, 4096), 172, layers=layers, kind="attribute")]  # fmt: skip
    files = [row(f"{name}*.up_proj.weight", (2048, 4096), 43 * 12, layers=layers)]
    report = report_of([*whole, *clones], files, config={"num_hidden_layers": 43})
    found = causes_of(report)
    assert found == {("experts", "bfloat16"): {"copies": 43 * 4 * 3 * 4096 * 2048 * 2}}
    assert round(found["experts", "bfloat16"]["copies"] / GIB, 2) == 8.06
    assert "weights-above-checkpoint" in ids(report)
    # the originals deleted: the lists are the experts
    assert causes_of(report_of(clones, files, config={"num_hidden_layers": 43})) == {}


def test_a_draft_model_with_ends_of_its_own():
    """vllm-ascend#2790: 129280 x 7168 x 2 bytes twice, 3.45 GiB."""
    ends = [row("model.embed_tokens.weight", (129280, 7168), draft=True),
            row("lm_head.weight", (129280, 7168), draft=True)]  # fmt: skip
    own = row("model.layers.*.eh_proj.weight", (7168, 14336), layers=[1], draft=True)
    report = report_of([*ends, own], [replace(own, draft=False)])
    assert causes_of(report) == {("draft", "bfloat16"): {"draft_ends": 2 * 129280 * 7168 * 2}}
    assert round(ids(report)["replicated-weights"] / GIB, 2) == 3.45


def test_an_output_projection_on_every_rank():
    """GLM-5 under DSA-CP: 16384 x 6144 x 78 in int8 is 7.3 GiB on each of 16 ranks."""
    name, layers = "model.layers.*.self_attn.o_proj.weight", range(78)
    whole = row(name, (6144, 16384), 78, "int8", layers, facts={"tp_size": 1})
    report = report_of([whole], [replace(whole, facts={})], {"tp": 16}, {"num_hidden_layers": 78})
    assert causes_of(report)["attention", "int8"] == {"replicated": whole.bytes * 15 // 16}
    assert round(whole.bytes / GIB, 1) == 7.3
    (found,) = [each for each in report.findings if each.id == "replicated-weights"]
    assert (found.severity, found.action) == ("info", "")  # more replicas would hold more


def test_what_leaves_nothing_to_do_is_nothing_to_do():
    """Tables of positions have the model's own length, whatever --max-model-len is."""
    table = row("model.rotary_emb.cos_sin_cache", (1 << 21, 64), kind="buffer")
    report = report_of([table], [row("model.norm.weight", (64,))])
    (found,) = [each for each in report.findings if each.id == "weights-above-checkpoint"]
    assert "follow max_position_embeddings" in found.evidence
    screen = printed(render_table(FirstScreen([report], "run")), 120)
    assert "weights-above-checkpoint" not in screen


def test_nothing_is_claimed_of_a_layer_that_says_nothing():
    """Neither its facts nor a tensor of its shape tell over how many ranks it is divided."""
    fused = row("model.layers.*.mlp.fused.weight", (96, 64))
    files = [row("model.layers.*.mlp.up_proj.weight", (64, 64))]
    assert causes_of(report_of([fused], files, {"tp": 2})) == {
        ("dense_mlp", "bfloat16"): {"unexplained": fused.bytes - 64 * 64 * 2 // 2}
    }
    norm = row("model.layers.*.input_layernorm.weight", (64,))
    assert causes_of(report_of([norm], [norm], {"tp": 2})) == {
        ("norms", "bfloat16"): {"replicated": norm.bytes // 2}
    }


def test_kv_b_proj_beside_what_is_made_of_it():
    """vllm-ascend#17104, sglang#28876: latent attention keeps what it has absorbed, here TP8."""
    name, layers = "model.layers.*.self_attn.", range(61)
    kept = row(f"{name}kv_b_proj.weight", (4096, 512), 61, layers=layers, facts={"tp_size": 8})
    made = [row(f"{name}mla_attn.impl.{each}", (16, 512, 128), 61, layers=layers, kind="attribute")
            for each in ("W_UV", "W_UK_T")]  # fmt: skip
    files = [row(f"{name}kv_b_proj.weight", (32768, 512), 61, layers=layers)]
    report = report_of([kept, *made], files, {"tp": 8}, {"num_hidden_layers": 61})
    assert causes_of(report) == {("attention", "bfloat16"): {"copies": kept.bytes}}


def test_scales_kept_twice():
    """vllm#23379: scales of NVFP4 beside those that a kernel wants."""
    scale = row("model.layers.*.mlp.down_proj.weight_scale", (4096, 256), dtype="float8_e4m3fn")
    copy = replace(scale, name="model.layers.*.mlp.down_proj.scale_swizzled", kind="attribute")
    assert causes_of(report_of([scale, copy], [scale])) == {
        ("scales", "float8_e4m3fn"): {"copies": scale.bytes}
    }


def test_4_bits_that_run_in_bf16(tmp_path):
    """vllm#40291: 15 to 16 GiB of NVFP4 have 29.39 GiB on the device."""
    log = """
vllm serve some/31B-NVFP4
INFO Filesystem type for checkpoints: EXT4. Checkpoint size: 15.50 GiB. Available RAM: 90.00 GiB.
INFO Model loading took 29.39 GiB memory and 60.1 seconds
INFO [gpu_worker.py:298] Available KV cache memory: 10.00 GiB
"""
    path = tmp_path / "x.log"
    path.write_text(log)
    (run,) = read_log(str(path))
    (rank,) = build_report(run).ranks
    (only,) = rank.weights.rows
    assert (only["class"], list(only["causes"])) == ("model", ["dtype"])
    assert round(only["difference_bytes"] / GIB, 2) == 13.89


def test_padding_ties_stages_and_dtypes():
    embed = row("model.embed_tokens.weight", (1000, 64))
    facts = {"tp_size": 2, "org_vocab_size": 1000, "num_embeddings_padded": 1024}
    padded = row("model.embed_tokens.weight", (512, 64), facts=facts)
    assert causes_of(report_of([padded], [embed], {"tp": 2})) == {
        ("embedding", "bfloat16"): {"padding": 24 / 2 * 64 * 2}
    }
    tied, head = {"tie_word_embeddings": True}, row("lm_head.weight", (1000, 64))
    assert causes_of(report_of([embed, head], [embed], config=tied)) == {
        ("lm_head", "bfloat16"): {"tied": head.bytes}
    }
    later = report_of([embed], [embed], {"tp": 1, "pp": 2}, tied, pp_rank=1)
    assert causes_of(later) == {("embedding", "bfloat16"): {"stages": embed.bytes}}
    packed = row("model.layers.*.mlp.up_proj.weight_packed", (64, 8), dtype="int32", bytes=2048)
    wide = row("model.layers.*.mlp.gate_up_proj.weight", (64, 64))
    report = report_of([wide], [packed])
    assert causes_of(report)["dense_mlp", "bfloat16"] == {"dtype": wide.bytes}
    assert ids(report)["silent-dequantisation"] == wide.bytes - packed.bytes


@pytest.mark.parametrize(
    ("expandable", "found"), [(False, {"weights-fragmented": GIB}), (True, {})]
)
def test_fragmentation_is_beside_the_sum(expandable, found):
    embed = row("model.embed_tokens.weight", (1000, 64))
    report = report_of([embed], [embed], expandable=expandable, reserved=GIB)
    assert causes_of(report) == {}
    assert report.ranks[0].weights.not_allocated_bytes == GIB
    assert ids(report) == found
