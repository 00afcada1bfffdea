"""KV plans beyond one group of equal layers: hybrids, groups of one type with several page sizes, several workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_memprof.capture.kvplan import bytes_per_token, describe, describe_group


class FullAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def full(page: int, block: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, page_size_bytes=page, dtype="torch.float16")


def group(spec: Any, layers: int) -> Any:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer{index}" for index in range(layers)])


def test_a_uniform_group_with_two_page_sizes_is_two_rows() -> None:
    members = {"a": full(64), "b": full(64), "index": full(24)}
    uniform = SimpleNamespace(kv_cache_specs=members, block_size=16, page_size_bytes=152)

    rows = describe_group(group(uniform, 3))
    assert [(row["layers"], row["page_size_bytes"], row["bytes_per_token"]) for row in rows] == [
        (2, 64, 8),
        (1, 24, 1.5),
    ]
    assert bytes_per_token(rows) == 9.5


def test_state_that_does_not_grow_with_tokens_has_no_bytes_per_token() -> None:
    rows = describe_group(group(full(64), 2)) + describe_group(
        group(MambaSpec(block_size=400, page_size_bytes=64, dtype=None), 6)
    )

    assert [row["bytes_per_token"] for row in rows] == [8, None]
    assert bytes_per_token(rows) is None
    assert bytes_per_token([]) is None


def test_blocks_are_the_fewest_of_all_workers_and_bytes_are_per_worker() -> None:
    def config(blocks: int) -> Any:
        tensors = [SimpleNamespace(size=64 * blocks)] * 2
        return SimpleNamespace(num_blocks=blocks, kv_cache_groups=[group(full(64), 2)], kv_cache_tensors=tensors)

    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100), cache_config=SimpleNamespace(gpu_memory_utilization=0.9)
    )
    plan = describe(vllm_config, [2000, 1300], [config(12), config(10)])
    assert plan["blocks"] == 10
    assert plan["available_bytes"] == [2000, 1300]
    assert plan["planned_bytes"] == [1536, 1280]
    assert plan["tokens"] is None  # the engine's own function is not loaded here: unknown, not guessed
