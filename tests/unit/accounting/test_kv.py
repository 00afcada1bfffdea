"""KV arithmetic against figures that engines printed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.accounting.builders import DATA, gib
from vllm_memprof.accounting.budget.kv import (
    blocks_of_request,
    blocks_per_request,
    build_kv,
    is_hybrid,
    tokens_for_bytes,
    worth_in_tokens,
)
from vllm_memprof.accounting.budget.layers import (
    LAYER_TYPES,
    page_bytes,
    request_blocks,
)
from vllm_memprof.accounting.model import Check, Kv, KvGroup
from vllm_memprof.record.codec import from_json, to_json

PAGE, LAYERS = 262_144, 36  # 2 x 128 tokens x 4 KV heads x 128 x 2 bytes
PER_BLOCK = PAGE * LAYERS


def plan(**changes: Any) -> dict[str, Any]:
    blocks = 5040
    group = {
        "type": "FullAttentionSpec",
        "layers": LAYERS,
        "block_size": 128,
        "page_size_bytes": PAGE,
    }
    group["layout"] = {"num_kv_heads": 4, "head_size": 128, "head_size_v": 128, "dtype_bytes": 2}
    values: dict[str, Any] = {
        "blocks": blocks,
        "block_size": 128,
        "tokens": 645_120,
        "max_model_len": 65_536,
        "max_concurrency": blocks / 512,
        "available_bytes": [gib(44.3), gib(44.4)],
        "planned_bytes": [blocks * PER_BLOCK] * 2,
        "bytes_per_token": 73_728,
        "groups": [group | {"bytes_per_token": 73_728, "dtype": "bfloat16"}],
    }
    return {**values, **changes}


def checks(kv: Kv) -> dict[str, Check]:
    return {check.name.split(" ")[0]: check for check in kv.checks}


def test_the_measured_cards() -> None:
    """44.30 GiB are 5,040 blocks or 645,120 tokens; 43.54 GiB 4,953 blocks or 633,984 tokens."""
    kv = build_kv(plan(), 0, None)
    assert kv.bytes_per_block == 9_437_184
    assert tokens_for_bytes(kv, gib(44.30)) == 645_120
    assert tokens_for_bytes(kv, gib(43.54)) == 633_984
    assert blocks_per_request(kv) == 512


def test_cross_checks_hold() -> None:
    padded = 5040 * PER_BLOCK + 72 * 512
    kv = build_kv(plan(), 1, padded)
    assert [check.ok for check in kv.checks] == [True] * 6
    assert kv.available_bytes == gib(44.4)


@pytest.mark.parametrize(
    ("change", "first_word"),
    [
        ({"planned_bytes": [5040 * PER_BLOCK + 5040] * 2, "available_bytes": [0, 0]}, "planned"),
        ({"available_bytes": [gib(50), gib(50)]}, "blocks"),
        ({"tokens": 645_121}, "tokens"),
    ],
)
def test_cross_checks_fail(change: dict[str, Any], first_word: str) -> None:
    kv = build_kv(plan(**change), 0, None)
    failed = [check.name for check in kv.checks if check.ok is False]
    assert any(name.startswith(first_word) for name in failed)


def test_an_allocation_that_is_not_the_plan() -> None:
    kv = build_kv(plan(), 0, 4 * 5040 * PER_BLOCK)
    assert checks(kv)["allocated"].ok is False


def test_the_least_of_all_workers_counts() -> None:
    """With unequal shares of the layers each worker divides by its own bytes per block."""
    uneven = plan(
        planned_bytes=[5040 * 20 * PAGE, 5040 * 16 * PAGE],
        available_bytes=[5041 * 20 * PAGE, 5040 * 16 * PAGE],
    )
    kv = build_kv(uneven, 0, None)
    assert kv.bytes_per_block == 20 * PAGE
    assert next(check for check in kv.checks if "least" in check.name).ok is True


WINDOW = {
    "type": "SlidingWindowSpec",
    "layers": LAYERS,
    "block_size": 128,
    "page_size_bytes": PAGE,
    "layout": {"num_kv_heads": 4, "head_size": 128, "dtype_bytes": 2, "sliding_window": 1024},
}


def test_a_hybrid_shares_its_pools_and_adds_up_its_requests() -> None:
    """Whole length: 512 blocks. Window of 1,024 in steps of 2,048: cdiv(1,023 + 2,048, 128) + 1 = 25."""
    blocks = 5040
    kv = build_kv(
        plan(
            groups=[*plan()["groups"], WINDOW],
            group_count=2,
            max_num_batched_tokens=2048,
            max_concurrency=blocks / 537,
            tokens=int(blocks / 537 * 65_536),
        ),
        0,
        None,
    )
    assert kv.bytes_per_block == PAGE * LAYERS
    assert [check.ok for check in kv.checks][:-1] == [True] * 5
    assert is_hybrid(build_kv(plan(max_concurrency=blocks / 537), 0, None))


def test_a_hybrid_of_an_unknown_kind_is_not_recomputed() -> None:
    kv = build_kv(
        plan(groups=[*plan()["groups"], {**WINDOW, "type": "NewSpec"}], planned_bytes=[None, None]),
        0,
        None,
    )
    assert checks(kv)["tokens"].ok is None
    assert kv.bytes_per_block == PAGE * LAYERS  # layers of different groups share their pools


def test_layers_of_one_group_with_pages_of_their_own() -> None:
    """An indexer beside the latent cache: one group, two rows, both grow with the length and share the block ids."""
    latent = {
        "type": "MLAAttentionSpec",
        "layers": 61,
        "block_size": 128,
        "page_size_bytes": 147_456,
    }
    latent["layout"] = {"num_kv_heads": 1, "head_size": 576, "dtype_bytes": 2}
    indexer = {
        "type": "MLAAttentionSpec",
        "layers": 61,
        "block_size": 128,
        "page_size_bytes": 32_768,
    }
    indexer["layout"] = {"num_kv_heads": 1, "head_size": 128, "dtype_bytes": 2}
    kv = build_kv(
        plan(
            groups=[latent, indexer],
            group_count=1,
            planned_bytes=[None, None],
            max_concurrency=5040 / 512,
        ),
        0,
        None,
    )
    assert kv.bytes_per_block == 61 * (147_456 + 32_768)
    assert checks(kv)["bytes"].ok is True
    assert checks(kv)["tokens"].ok is True


@pytest.mark.parametrize(("context_parallel", "tokens"), [(1, 645_120), (2, 1_290_240)])
def test_tokens_by_the_blocks_of_one_group(context_parallel: int, tokens: int) -> None:
    """To 0.19: whole blocks of one group, also where the longest request does not end with a block."""
    older = plan(
        tokens_rule="blocks", max_model_len=65_500, tokens=tokens, context_parallel=context_parallel
    )
    older["max_concurrency"] = 5040 / (512 // context_parallel)
    kv = build_kv(older, 0, None)
    assert [check.ok for check in kv.checks][:-1] == [True] * 5
    assert tokens_for_bytes(kv, 10 * PER_BLOCK) == 1280 * context_parallel
    newer = build_kv(plan(max_model_len=65_500, tokens=int(5040 / 512 * 65_500)), 0, None)
    assert [check.ok for check in newer.checks][:-1] == [True] * 5
    assert build_kv({**older, "tokens_rule": "concurrency"}, 0, None).checks[-2].ok is False


@pytest.mark.parametrize(("blocks", "over"), [(4000, 0), (6000, 960)])
def test_an_override_replaces_the_blocks_of_the_budget(blocks: int, over: int) -> None:
    """No check fails because of it: the plan keeps to the override, and the budget is told beside it."""
    kv = build_kv(
        plan(
            num_gpu_blocks_override=blocks,
            blocks=blocks,
            planned_bytes=[blocks * PER_BLOCK] * 2,
            max_concurrency=blocks / 512,
            tokens=blocks * 128,
        ),
        0,
        blocks * PER_BLOCK,
    )
    assert all(check.ok for check in kv.checks)
    assert (kv.override_blocks, kv.fitting_blocks) == (blocks, 5040)
    assert max(0, blocks - (kv.fitting_blocks or 0)) == over
    assert to_json(kv)["override_blocks"] == blocks
    ignored = build_kv(plan(num_gpu_blocks_override=blocks), 0, None)
    assert any("override" in check.name and check.ok is False for check in ignored.checks)


def test_a_connector_pads_its_tensors() -> None:
    """Keys and values of 36 layers by 2 MiB each: more than 1% of a small cache, and still the plan."""
    small = plan(
        blocks=100, tokens=12_800, max_concurrency=100 / 512, planned_bytes=[100 * PER_BLOCK] * 2
    )
    padded = 100 * PER_BLOCK + 72 * (2 << 20)
    assert checks(build_kv(small, 0, padded))["allocated"].ok is False
    assert checks(build_kv({**small, "kv_transfer": True}, 0, padded))["allocated"].ok is True
    assert (
        checks(build_kv({**small, "kv_transfer": True}, 0, padded + 2 * PER_BLOCK))["allocated"].ok
        is False
    )


LAYOUTS = json.loads((DATA / "kv_layouts.json").read_text())


@pytest.mark.parametrize("release", sorted(LAYOUTS["releases"]))
def test_pages_and_requests_are_those_of_the_engine_s_own_classes(release: str) -> None:
    known = set()
    for row in LAYOUTS["releases"][release]:
        group = from_json(KvGroup, row["group"])
        limits = Kv(
            max_model_len=LAYOUTS["max_model_len"],
            max_num_batched_tokens=LAYOUTS["max_num_batched_tokens"],
            mamba_cache_mode=row["mamba_cache_mode"],
        )
        page, blocks = page_bytes(group), request_blocks(group, limits)
        assert page == group.page_size_bytes, group
        if blocks is not None:
            assert blocks * page == row["max_bytes_per_request"], group
            known.add(group.type)
    assert {name for name in LAYER_TYPES if not name.startswith("Ascend")} == known


def test_layers_of_deepseek_v4() -> None:
    """Pages and blocks as vllm-ascend 0.23.0 had them: blocks count vectors of four tokens each."""
    layout = {"num_kv_heads": 1, "head_size": 512, "dtype_bytes": 2, "scale_dim": 0,
              "cache_sparse_sfa_c8": False, "cache_sparse_li_c8": False,
              "sfa_dcp_replicated_indexer_size": 1, "compress_ratio": 4}  # fmt: skip
    group = KvGroup("AscendMLAAttentionSpec", 1, 32, 32_768, layout=layout)
    kv = Kv(max_model_len=65_536, max_num_batched_tokens=2048)
    assert (page_bytes(group), request_blocks(group, kv)) == (32_768, 65_536 // 4 // 32)
    assert [request_blocks(group, kv, length) for length in (128, 131, 132)] == [1, 1, 2]
    window = {"num_kv_heads": 1, "head_size": 2048, "dtype_bytes": 4, "sliding_window": 8,
              "page_size_padded": 32_768, "compress_ratio": 1}  # fmt: skip
    group = KvGroup("AscendSlidingWindowMLASpec", 1, 2, 32_768, layout=window)
    assert (page_bytes(group), request_blocks(group, kv)) == (32_768, -(-(8 - 1 + 2048) // 2) + 1)


def test_a_request_of_deepseek_v4_is_counted_in_blocks_of_the_first_group() -> None:
    """DeepSeek-V4-Flash W8A8, TP8, 65,536 tokens on vllm-ascend 0.23.0: 509,468 tokens, 7.77 of it."""
    full, window = "AscendMLAAttentionSpec", "AscendSlidingWindowMLASpec"
    rows = [(0, full, 21, 32, 4160, {"compress_ratio": 4}), (0, full, 21, 32, 32_768, {"compress_ratio": 4}),
            (1, full, 20, 32, 32_768, {"compress_ratio": 128}), (2, window, 22, 32, 32_768, {"sliding_window": 128}),
            (3, window, 21, 32, 32_768, {"sliding_window": 128}), (4, window, 21, 2, 32_768, {"sliding_window": 8}),
            (4, window, 21, 2, 4160, {"sliding_window": 8}), (5, window, 20, 8, 32_768, {"sliding_window": 128})]  # fmt: skip
    groups = [
        {"group": group, "type": kind, "layers": layers, "block_size": block,
         "page_size_bytes": page, "layout": layout}
        for group, kind, layers, block, page, layout in rows
    ]  # fmt: skip
    given = {"groups": groups, "group_count": 6, "blocks": 25_405, "max_model_len": 65_536,
             "max_num_batched_tokens": 4096, "max_concurrency": 25_405 / 3268,
             "tokens": 509_468, "tokens_rule": "concurrency"}  # fmt: skip
    found = build_kv(plan(**given), 0, None)
    named = {check.name: check for check in found.checks}
    blocks = next(check for name, check in named.items() if name.startswith("blocks of a request"))
    assert (blocks.expected, blocks.found, blocks.ok) == (3268, 3268, True)
    assert blocks_of_request(found) == 3376
    for row in groups:  # however an edited record numbers them
        row["group"] += 1
    assert build_kv(plan(**given), 0, None).checks == found.checks


@pytest.mark.parametrize(
    "lacking",
    [
        "num_kv_heads",
        "head_size",
        "dtype_bytes",
        "sliding_window",
        "attention_chunk_size",
        "state_bytes",
    ],
)
def test_a_layout_that_lacks_a_figure_gives_none(lacking: str) -> None:
    limits = Kv(max_model_len=5000, max_num_batched_tokens=2048, mamba_cache_mode="none")
    for row in LAYOUTS["releases"]["0.23.0"]:
        whole = from_json(KvGroup, row["group"])
        layout = {name: value for name, value in (whole.layout or {}).items() if name != lacking}
        group = replace(whole, layout=layout)
        if (
            group.layout != whole.layout
            and whole.layout
            and not whole.layout.get("cache_dtype_str")
        ):
            assert page_bytes(group) is None or request_blocks(group, limits) is None


#: As vllm-ascend 0.23.0 describes the layers of DeepSeek-V3; 576 numbers of two bytes per token.
ASCEND_LATENT: dict[str, Any] = {
    "num_kv_heads": 1,
    "head_size": 576,
    "dtype_bytes": 2,
    "scale_dim": 0,
    "cache_sparse_sfa_c8": False,
    "cache_sparse_li_c8": False,
    "sfa_dcp_replicated_indexer_size": 1,
}


@pytest.mark.parametrize(
    ("otherwise", "page"),
    [
        ({}, 128 * 576 * 2),
        ({"cache_sparse_li_c8": True}, None),
        ({"cache_sparse_sfa_c8": True}, None),
        ({"scale_dim": 4}, None),
        ({"sfa_dcp_replicated_indexer_size": 2}, None),
        ({"cache_sparse_li_c8": None}, None),  # a record from before it was recorded
    ],
)
def test_latent_attention_of_vllm_ascend(otherwise: dict[str, Any], page: int | None) -> None:
    row = {
        "type": "AscendMLAAttentionSpec",
        "block_size": 128,
        "layout": {**ASCEND_LATENT, **otherwise},
    }
    assert page_bytes(from_json(KvGroup, row)) == page


def test_limits_that_are_unknown_give_none() -> None:
    for row in LAYOUTS["releases"]["0.23.0"]:
        assert request_blocks(from_json(KvGroup, row["group"]), Kv()) is None


def test_no_plan_no_figures() -> None:
    kv = build_kv(None, 0, 5)
    assert kv.tokens is None
    assert worth_in_tokens(kv, 5) is None


def test_a_rank_beyond_the_plan() -> None:
    assert build_kv(plan(), 7, None).available_bytes is None
    assert build_kv(plan(), None, None).available_bytes is None
    assert build_kv(plan(available_bytes=[5]), None, None).available_bytes == 5


@given(size=st.integers(0, 2**37))
def test_tokens_are_whole_blocks(size: int) -> None:
    kv = build_kv(plan(), 0, None)
    assert tokens_for_bytes(kv, size) == size // PER_BLOCK * 128
    assert worth_in_tokens(kv, -size) == -(size // PER_BLOCK * 128)
    assert tokens_for_bytes(kv, -size - 1) == 0


PRINTED: dict[str, int | float] = {
    "tokens": 645_120,
    "max_concurrency": 9.84,
    "max_model_len": 65_536,
    "blocks": 5040,
}


def printed_checks(printed: dict[str, int | float]) -> dict[str, bool | None]:
    kv = build_kv(plan(), 0, None, printed)
    return {check.name: check.ok for check in kv.checks if "printed" in check.name}


def test_the_plan_is_what_the_engine_printed() -> None:
    assert list(printed_checks(PRINTED).values()) == [True] * 4
    for name, value in PRINTED.items():
        found = printed_checks(
            {**PRINTED, name: value + (0.01 if name == "max_concurrency" else 1)}
        )
        assert list(found.values()).count(False) == 1, name


def test_what_the_engine_did_not_print_is_unknown() -> None:
    assert printed_checks({}) == {"tokens and concurrency as the engine printed them": None}
    assert list(printed_checks({"tokens": 645_120}).values()) == [True]
    assert not [check for check in build_kv(plan(), 0, None).checks if "printed" in check.name]


def test_a_plan_that_holds_less_than_a_block_for_a_request_has_no_tokens() -> None:
    assert tokens_for_bytes(build_kv(plan(max_concurrency=50_000.0), 0, None), gib(1)) is None


def test_groups_in_one_allocation_may_differ_in_their_pages() -> None:
    """A block has the bytes of the largest group: 12 layers of 100 bytes, not 12 of 80."""
    groups = [
        {"type": "FullAttentionSpec", "layers": 12, "block_size": 16, "page_size_bytes": 100},
        {"type": "MambaSpec", "layers": 12, "block_size": 16, "page_size_bytes": 80},
    ]
    plan = {"blocks": 10, "groups": groups, "group_count": 2, "planned_bytes": [None]}
    assert build_kv({**plan, "shared_backing": True}, 0, None).bytes_per_block == 1200
    assert build_kv(plan, 0, None).bytes_per_block is None


def test_blocks_of_a_planner_that_counts_more_than_it_allocates() -> None:
    plan = {"blocks": 10, "planned_bytes": [900], "available_bytes": [1050]}
    name = "blocks = budget // bytes per block, least of all workers"
    found = {}
    for divisor in ([100], [None], None):
        kv = build_kv({**plan, "divisor_bytes": divisor}, 0, None)
        found[str(divisor)] = next(c for c in kv.checks if c.name == name).ok
    assert found == {"[100]": True, "[None]": False, "None": False}


@pytest.mark.parametrize(
    ("available", "blocks", "without"),
    [
        (26_309_528_064, 7744, 7782),
        (19_011_914_240, 5596, 5623),
        (18_708_872_192, 5506, 5533),
        (18_692_778_496, 5502, 5529),
    ],
)
def test_blocks_of_deepseek_v4_with_mtp(available: int, blocks: int, without: int) -> None:
    """Four plans of vllm-ascend 0.23.0: DeepSeek-V4-Flash, W8A8, MTP."""
    plan = {
        "blocks": blocks,
        "planned_bytes": [blocks * 3_380_736],
        "available_bytes": [available],
    }
    assert build_kv({**plan, "divisor_bytes": [3_397_376]}, 0, None).fitting_blocks == blocks
    assert build_kv(plan, 0, None).fitting_blocks == without


def test_the_device_holds_more_than_the_engine_counts() -> None:
    """Two groups with a buffer per layer each: the engine counts the bytes of one."""
    plan = {"blocks": 10, "planned_bytes": [1000], "available_bytes": [1000]}
    found = {
        allocated: checks(build_kv(plan, 0, allocated, counted=0.5))["allocated"].ok
        for allocated in (1000, 2000)
    }
    assert found == {1000: False, 2000: True}
