from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def get_max_concurrency_for_kv_cache_config(vllm_config: Any, config: Any) -> float:
    return 2.5


class FullAttentionSpec:
    block_size = 4
    page_size_bytes = 32
    dtype = "torch.bfloat16"


def get_kv_cache_configs(
    vllm_config: Any, kv_cache_specs: Any, available_memory: list[int]
) -> list[Any]:
    group = SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=FullAttentionSpec())
    tensors = [SimpleNamespace(size=96), SimpleNamespace(size=96)]
    return [SimpleNamespace(num_blocks=3, kv_cache_groups=[group], kv_cache_tensors=tensors)]
