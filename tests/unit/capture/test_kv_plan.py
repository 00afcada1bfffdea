"""KV plans beyond one group of equal layers: hybrids, groups of one type with several page sizes,
several workers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_memprof.capture.kv_plan import (
    describe,
    describe_group,
    divisor_bytes,
    layer_bytes,
    layout,
    planned_bytes,
)


class FullAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def full(page: int, block: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, page_size_bytes=page, dtype="torch.float16")


def group(spec: Any, layers: int) -> Any:
    return SimpleNamespace(
        kv_cache_spec=spec, layer_names=[f"layer{index}" for index in range(layers)]
    )


def test_a_uniform_group_with_two_page_sizes_is_two_rows() -> None:
    members = {"a": full(64), "b": full(64), "index": full(24)}
    uniform = SimpleNamespace(kv_cache_specs=members, block_size=16, page_size_bytes=152)

    rows = describe_group(group(uniform, 3))
    assert [(row["layers"], row["page_size_bytes"], row["bytes_per_token"]) for row in rows] == [
        (2, 64, 8),
        (1, 24, 1.5),
    ]


def plan_of(*groups: Any, **config: Any) -> dict[str, Any]:
    """Return the plan of a worker with ten blocks of these groups."""
    plan = SimpleNamespace(num_blocks=10, kv_cache_groups=groups, kv_cache_tensors=[])
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9),
        **config,
    )
    return describe(vllm_config, [700], [plan])


def test_state_that_does_not_grow_with_tokens_has_no_bytes_per_token() -> None:
    growing, state = full(64), MambaSpec(block_size=400, page_size_bytes=64, dtype=None)
    plan = plan_of(group(growing, 2), group(state, 6))
    assert [row["bytes_per_token"] for row in plan["groups"]] == [8, None]
    assert plan["bytes_per_token"] is None
    assert plan_of(group(growing, 2), group(full(24), 1))["bytes_per_token"] == 9.5
    assert plan_of()["bytes_per_token"] is None


def test_blocks_are_the_fewest_of_all_workers_and_bytes_are_per_worker() -> None:
    def config(blocks: int) -> Any:
        tensors = [SimpleNamespace(size=64 * blocks)] * 2
        return SimpleNamespace(
            num_blocks=blocks, kv_cache_groups=[group(full(64), 2)], kv_cache_tensors=tensors
        )

    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9),
    )
    plan = describe(vllm_config, [2000, 1300], [config(12), config(10)])
    assert plan["blocks"] == 10
    assert plan["available_bytes"] == [2000, 1300]
    assert plan["planned_bytes"] == [1536, 1280]
    assert (
        plan["tokens"] is None
    )  # the engine's own function is not loaded here: unknown, not guessed


def test_a_draft_layer_is_counted_with_a_whole_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V4-Flash with MTP: 22 tuples of two pages, and a page of the draft."""
    main, index, blocks = 131_072, 16_640, 100
    uniform = SimpleNamespace(get_page_sizes=lambda: {main, index})
    groups = [SimpleNamespace(kv_cache_spec=uniform) for _ in range(3)]
    layers = [
        SimpleNamespace(size=page * blocks, shared_by=[f"layers.{number}.attn"])
        for number in range(22)
        for page in (main, index)
    ]
    draft = SimpleNamespace(size=main * blocks, shared_by=["mtp.0.attn"])
    config = SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=[*layers, draft])
    assert divisor_bytes(config) is None  # vLLM's own planner: what it divides by is planned
    name = "vllm_ascend.patch.platform.patch_kv_cache_utils"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    assert planned_bytes(config.kv_cache_tensors) == 3_380_736 * blocks
    assert divisor_bytes(config) == 23 * (main + index) == 3_397_376
    without = SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=layers)
    assert divisor_bytes(without) == planned_bytes(layers) // blocks
    plain = SimpleNamespace(kv_cache_groups=[group(full(64), 2)] * 2, kv_cache_tensors=layers)
    assert divisor_bytes(plain) is None


@pytest.mark.parametrize(
    ("version", "rule"),
    [
        ("0.11.0", "blocks"),
        ("0.13.0+empty", "blocks"),
        ("0.19.1", "blocks"),
        ("0.20.2", "concurrency"),
        ("0.23.0+empty", "concurrency"),
        ("0.33.0", "concurrency"),
        (None, "concurrency"),
    ],
)
def test_what_a_release_prints_as_its_kv_cache_size(
    version: str | None, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.version", SimpleNamespace(__version__=version))
    assert plan_of(group(full(64), 2))["tokens_rule"] == rule


def test_tokens_as_an_older_release_prints_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks // groups x block size x ranks that share a request: no whole requests needed."""
    monkeypatch.setitem(sys.modules, "vllm.version", SimpleNamespace(__version__="0.13.0"))
    config = SimpleNamespace(
        num_blocks=11,
        kv_cache_groups=[group(full(64), 2), group(full(64), 2)],
        kv_cache_tensors=[SimpleNamespace(size=64 * 11)] * 2,
    )
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9, num_gpu_blocks_override=11),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=2, prefill_context_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        kv_transfer_config=object(),
    )
    plan = describe(vllm_config, [2000], [config])
    assert (plan["tokens"], plan["tokens_rule"], plan["context_parallel"]) == (
        11 // 2 * 16 * 2,
        "blocks",
        2,
    )
    assert (
        plan["num_gpu_blocks_override"],
        plan["max_num_batched_tokens"],
        plan["kv_transfer"],
    ) == (11, 2048, True)


def test_a_layout_holds_numbers_and_words_only() -> None:
    dtype = SimpleNamespace(itemsize=2)
    spec = full(64)
    spec.dtype, spec.num_kv_heads, spec.head_size, spec.sliding_window = dtype, 4, 128, None
    spec.cache_dtype_str = "fp8_ds_mla"
    assert layout(spec) == {
        "num_kv_heads": 4,
        "head_size": 128,
        "dtype_bytes": 2,
        "cache_dtype_str": "fp8_ds_mla",
    }
    state = MambaSpec(
        shapes=((3, 4), (5,)), dtypes=(dtype, SimpleNamespace(itemsize=4)), num_speculative_blocks=1
    )
    assert layout(state) == {"state_bytes": 44, "num_speculative_blocks": 1}
    assert (
        layout(
            SimpleNamespace(dtype="float16", dtypes=(1,), shapes=((1,),), kv_quant_mode=object())
        )
        == {}
    )


def _place(size: int, host: bool = False) -> Any:
    """A tensor of vLLM from 0.29 on: a place in an allocation of that size."""
    return SimpleNamespace(size=size, layer_stride=8, block_stride=8, host_resident=host)


def test_groups_that_share_an_allocation_take_it_once() -> None:
    assert planned_bytes([_place(640), _place(640)]) == 640
    assert planned_bytes([_place(640), _place(640), _place(64)]) == 704  # one more, of a drafter
    assert planned_bytes([_place(640), _place(9999, host=True)]) == 640
    assert planned_bytes([SimpleNamespace(size=640), SimpleNamespace(size=640)]) == 1280


def test_bytes_of_layers_are_those_of_tensors_that_no_other_layer_shares() -> None:
    tensors = [
        SimpleNamespace(size=640, shared_by=["model.0"]),
        SimpleNamespace(size=320, shared_by=["mtp.0"]),
        SimpleNamespace(size=64, shared_by=["model.1", "mtp.1"]),
    ]
    config = SimpleNamespace(kv_cache_tensors=tensors, kv_cache_groups=[], num_blocks=10)
    assert layer_bytes(config) == {"model.0": 640, "mtp.0": 320, "model.1": None, "mtp.1": None}


def test_bytes_of_layers_in_one_allocation_follow_from_their_pages() -> None:
    """From vLLM 0.29 on; groups that lie over each other have no bytes of their own."""
    spec = SimpleNamespace(kv_cache_specs={"a": full(64), "index": full(24)}, page_size_bytes=88)
    one = SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "index"])
    config = SimpleNamespace(kv_cache_tensors=[_place(880)], kv_cache_groups=[one], num_blocks=10)
    assert layer_bytes(config) == {"a": 640, "index": 240}
    config.kv_cache_groups = [one, group(full(64), 1)]
    assert set(layer_bytes(config).values()) == {None}
    config.kv_cache_groups = [SimpleNamespace(**vars(one), host_resident=True)]
    assert set(layer_bytes(config).values()) == {None}


def test_layers_are_listed_with_a_drafter_alone() -> None:
    tensors = [SimpleNamespace(size=640, shared_by=["a"])]
    config = SimpleNamespace(
        num_blocks=10, kv_cache_groups=[group(full(64), 1)], kv_cache_tensors=tensors
    )
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9),
        speculative_config=None,
    )
    assert describe(vllm_config, [700], [config])["layer_bytes"] is None
    vllm_config.speculative_config = object()
    assert describe(vllm_config, [700], [config])["layer_bytes"] == [{"a": 640}]
