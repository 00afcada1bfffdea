"""Usable tokens of a KV cache: each rule where it binds, and where it does not apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.accounting.builders import gib, process, run_of, snapshot, span
from tests.unit.accounting.findings.test_every_finding import found_in
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.budget.kv import build_kv
from vllm_memprof.accounting.budget.usable import limited
from vllm_memprof.accounting.model import Kv
from vllm_memprof.report.documents.first_screen import FirstScreen, opening_of

ASCEND = "vllm-ascend", "0.23.0"
PAGE = 1 << 18  # of a layer, 128 tokens


def layers(
    number: int, block: int = 128, kind: str = "FullAttentionSpec", **layout: Any
) -> dict[str, Any]:
    return {
        "type": kind,
        "layers": 2,
        "block_size": block,
        "page_size_bytes": PAGE,
        "layout": layout,
        "group": number,
    }


def plan(blocks: int, *groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a plan of one worker, of layers of two pages a block."""
    groups = groups or (layers(0),)
    return {
        "blocks": blocks,
        "block_size": min(group["block_size"] for group in groups),
        "max_model_len": 2048,
        "groups": list(groups),
        "group_count": len({group["group"] for group in groups}),
        "available_bytes": [blocks * 2 * PAGE],
        "planned_bytes": [blocks * 2 * PAGE],
        "mamba_cache_mode": "none",
        "max_num_batched_tokens": 2048,
        **more,
    }


def usable(given: dict[str, Any], engine: tuple[str, str] = ASCEND, worker: int = 0) -> Kv:
    return limited(build_kv(given, worker, None), *engine)


def binding(kv: Kv) -> str:
    return next(each.name for each in kv.limits if each.title == kv.usable_why)


def test_all_blocks_but_the_empty_one() -> None:
    kv = usable(plan(64))
    assert (kv.usable_tokens, binding(kv)) == (63 * 128, "own-blocks")
    assert (kv.out_of_reach_tokens, kv.out_of_reach_bytes, kv.longest_tokens) == (0, 0, None)


def test_the_poorest_stage_decides_and_is_named() -> None:
    both = plan(
        40, available_bytes=[160 * 2 * PAGE, 40 * 2 * PAGE], planned_bytes=[40 * 2 * PAGE] * 2
    )
    rich, poor = usable(both), usable(both, worker=1)
    assert rich.poorest_rank == poor.poorest_rank == 1
    assert (rich.usable_tokens, binding(rich)) == (39 * 128, "poorest-rank")
    assert rich.out_of_reach_tokens == 120 * 128
    assert (poor.usable_tokens, binding(poor)) == (39 * 128, "own-blocks")


def test_states_of_a_hybrid_take_blocks_of_the_same_pool() -> None:
    """Each request has three states; the longest requests lose least to them."""
    states = [layers(number, 2048, "MambaSpec", num_speculative_blocks=0) for number in (1, 2, 3)]
    kv = usable(plan(64, layers(0), *states))
    # three requests of 16 + 3 blocks, and one of the other 6, of which 3 stay free
    assert (kv.usable_tokens, binding(kv)) == (3 * 2048, "free-for-states")
    assert [each.tokens for each in kv.limits if each.name == "own-blocks"] == [3 * 2048 + 3 * 128]
    assert "shared by 4 groups" in str(kv.limits[1].title)


def test_a_window_holds_its_own_blocks_only_while_it_decodes() -> None:
    window = layers(1, kind="SlidingWindowSpec", sliding_window=256)
    kv = usable(plan(64, layers(0), window))
    # a request of 2,048 tokens: 16 blocks, and 256 / 128 + 1 of the window
    assert kv.usable_tokens == 3 * 2048 + (6 - 3) * 128


def test_a_prompt_that_is_never_admitted() -> None:
    """An indexer's group of 4 tokens a block takes the ids of the others. (GLM-5.3-Flash)"""
    states = [
        layers(number, 131_072, "MambaSpec", num_speculative_blocks=0) for number in range(1, 6)
    ]
    kv = usable(plan(690, layers(0, block=4), *states, max_model_len=131_072))
    assert (kv.longest_tokens, kv.needed_blocks, kv.free_blocks) == ((689 - 5) * 4, 690, 689)
    assert (kv.usable_tokens, binding(kv)) == ((689 - 5 - 5) * 4, "free-for-states")


@pytest.mark.parametrize(("blocks", "longest"), [(16, 15 * 128), (17, None)])
def test_the_empty_block_may_be_the_one_that_lacks(blocks: int, longest: int | None) -> None:
    """The engine starts where 2,048 tokens fit into all blocks, of which one is never given."""
    assert usable(plan(blocks, num_gpu_blocks_override=blocks)).longest_tokens == longest


def test_requests_that_may_run_at_once() -> None:
    kv = usable(plan(64, max_num_seqs=2))
    assert (kv.usable_tokens, binding(kv)) == (2 * 2048, "max-num-seqs")
    assert binding(usable(plan(64, max_num_seqs=4))) == "own-blocks"


#: DeepSeek-V4.1-Flash on A3: 31,506 blocks, right answers up to 2**32 / 147,712.
SPARSE = {
    **layers(0, kind="MLAAttentionSpec", model_version="deepseek_v4"),
    "page_size_bytes": 147_712,
}


def test_page_offsets_of_32_bits() -> None:
    kv = usable(plan(31_506, SPARSE, max_model_len=1_048_576))
    assert (kv.usable_tokens, binding(kv)) == ((29_076 - 1) * 128, "dsv4-page-offsets")
    below = usable(plan(29_000, SPARSE, max_model_len=1_048_576))
    assert binding(below) == "own-blocks"


def test_kernels_of_cuda_alone_do_not_apply_on_ascend() -> None:
    given = plan(40_000, layers(0, dtype_bytes=2), attention_backend="FLEX_ATTENTION")
    assert "flex-attention" not in [each.name for each in usable(given).limits]
    kv = usable(given, ("vllm", "0.23.0"))
    # 2**31 numbers of two bytes: 16,384 pages of 2**17
    assert (kv.usable_tokens, binding(kv)) == ((2**31 // 2**17 - 1) * 128, "flex-attention")
    other = usable({**given, "attention_backend": "FLASH_ATTN"}, ("vllm", "0.23.0"))
    assert binding(other) == "own-blocks"


def test_a_pool_of_sglang_has_no_empty_block() -> None:
    pool = layers(0, kind="NPUMHATokenToKVPool")
    kv = usable(plan(64, pool, max_num_seqs=2048), ("sglang", "0.5.23"))
    assert (kv.usable_tokens, binding(kv)) == (64 * 128, "sized-tokens")
    fewer = usable(plan(64, pool, max_num_seqs=3), ("sglang", "0.5.23"))
    assert (fewer.usable_tokens, binding(fewer)) == (3 * 2048, "max-num-seqs")


def test_a_layer_of_an_unknown_kind_gives_no_figure() -> None:
    kv = usable(plan(64, layers(0, kind="SomethingSpec")))
    assert (kv.usable_tokens, kv.limits) == (None, [])


# --- the largest step, and findings -----------------------------------------------------------------


def report(given: dict[str, Any], **figures: Any) -> Report:
    alloc = span("kv_cache_alloc", snapshot(allocated_bytes=0), snapshot(allocated_bytes=gib(1)))
    figures = {"kv_cache_bytes": gib(1), "peak_activation_bytes": gib(1), **figures}
    core = replace(process([], role="engine_core", roles=frozenset({"engine_core"})), kv_plan=given)
    return build_report(run_of(process([alloc], figures), core, engine="vllm-ascend"))


#: A model of 150,000 words, in steps of 8,192 tokens.
WORDS = {
    "step_tokens": 8192, "max_num_seqs": 16, "vocab_size": 150_000, "hidden_size": 1024,
    "dtype_bytes": 2, "max_logprobs": 20, "runner_type": "generate", "max_model_len": 8192,
}  # fmt: skip


def test_prompt_logprobs_take_more_than_was_profiled() -> None:
    made = report(plan(6400, **WORDS), profiled_tokens=8192)
    steps = {each.name: each for each in made.ranks[0].kv.steps}
    assert steps["tokens"].bytes == 0
    row = steps["prompt-logprobs"]
    assert (row.largest, row.profiled, row.bytes) == (8191, 16, 8191 * 150_000 * 6 - gib(1))
    refused = report(plan(6400, **{**WORDS, "max_logprobs": 0}), profiled_tokens=4096)
    [tokens] = refused.ranks[0].kv.steps
    assert tokens.bytes == 4096 * 1024 * 2


def test_speculative_tokens_have_rows_of_logits_of_their_own() -> None:
    made = report(plan(6400, **{**WORDS, "max_logprobs": 0, "speculative_tokens": 3}))
    [row] = made.ranks[0].kv.steps
    assert (row.name, row.largest, row.profiled, row.bytes) == ("speculative", 64, 16, 0)


@pytest.mark.parametrize(("words", "found"), [(150_000, True), (15_000, False)])
def test_a_step_beyond_the_profile_is_found(words: int, found: bool) -> None:
    """From the margin on that is kept for serving."""
    made = report(plan(6400, **{**WORDS, "vocab_size": words}), profiled_tokens=8192)
    size = 8191 * words * 6 - gib(1)
    expected = [size] if found else []
    assert [each.bytes for each in found_in([made], "step-not-profiled")] == expected


@pytest.mark.parametrize(("blocks", "found"), [(16, True), (17, False)])
def test_a_request_that_waits_for_ever_is_found_and_on_the_first_screen(
    blocks: int, found: bool
) -> None:
    made = report(plan(blocks, num_gpu_blocks_override=blocks))
    findings = found_in([made], "kv-out-of-reach")
    lines = [str(line.value) for line in opening_of(FirstScreen([made]), 100).answer]
    title = "A prompt of 1,921 tokens waits for ever: it needs 16 blocks on TP0, which has 15"
    assert [(each.severity, str(each.title)) for each in findings] == (
        [("error", title)] if found else []
    )
    assert (title in lines) == found
    if found:
        assert "--num-gpu-blocks-override 17" in str(findings[0].action)


def test_a_stage_with_fewer_blocks_is_found_and_named() -> None:
    sizes = {
        "available_bytes": [160 * 2 * PAGE, 40 * 2 * PAGE],
        "planned_bytes": [40 * 2 * PAGE] * 2,
    }
    workers = [
        process([], {"kv_cache_bytes": size}, rank=at, pp_rank=at, label=f"PP{at} TP0", pid=at + 1)
        for at, size in enumerate(sizes["available_bytes"])
    ]
    given = plan(40, **sizes)
    core = replace(process([], role="engine_core", roles=frozenset({"engine_core"})), kv_plan=given)
    made = build_report(run_of(*workers, core, engine="vllm-ascend"))
    [finding] = found_in([made], "kv-out-of-reach")
    assert (finding.severity, finding.label) == ("warning", "PP1 TP0")
    assert "fewer layers on PP1 TP0" in str(finding.action)
    assert finding.bytes == 160 * 2 * PAGE * 120 // 159
