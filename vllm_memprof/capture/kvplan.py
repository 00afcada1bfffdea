"""The engine core's KV plan as an event: the result of ``get_kv_cache_configs`` enters, the keys of KV_PLAN leave.

Sizes are read from the live specs (``page_size_bytes``), never recomputed from the model's dimensions.
"""

from __future__ import annotations

import sys
from typing import Any


def describe(vllm_config: Any, available_bytes: Any, configs: Any) -> dict[str, Any]:
    """Keys of a kv_plan event.

    Args:
        vllm_config: the engine's configuration, after a possible reduction of max_model_len.
        available_bytes: what the equation granted, one entry per worker.
        configs: one KVCacheConfig per worker.
    """
    first = configs[0]
    groups = [row for group in first.kv_cache_groups for row in describe_group(group)]
    max_model_len = vllm_config.model_config.max_model_len
    concurrency = max_concurrency(vllm_config, first)
    return {
        "blocks": min(int(config.num_blocks) for config in configs),
        "block_size": min((group["block_size"] for group in groups), default=None),
        "tokens": None if concurrency is None else int(concurrency * max_model_len),
        "max_model_len": max_model_len,
        "max_concurrency": concurrency,
        "available_bytes": [int(available) for available in available_bytes],
        "planned_bytes": [sum(int(tensor.size) for tensor in config.kv_cache_tensors) for config in configs],
        "bytes_per_token": bytes_per_token(groups),
        "groups": groups,
        "gpu_memory_utilization": vllm_config.cache_config.gpu_memory_utilization,
    }


def describe_group(group: Any) -> list[dict[str, Any]]:
    """One row per layer type of a group: a group of uniform type may hold layers of several page sizes."""
    members = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    specs = list(members.values()) if members else [group.kv_cache_spec] * len(group.layer_names)
    counted: dict[tuple[Any, ...], int] = {}
    for spec in specs:
        key = (type(spec).__name__, int(spec.block_size), int(spec.page_size_bytes), _dtype(spec))
        counted[key] = counted.get(key, 0) + 1
    return [
        {
            "type": type_name,
            "layers": layers,
            "block_size": block_size,
            "page_size_bytes": page_size,
            "bytes_per_token": _per_token(type_name, layers * page_size, block_size),
            "dtype": dtype,
        }
        for (type_name, block_size, page_size, dtype), layers in counted.items()
    ]


def bytes_per_token(groups: list[dict[str, Any]]) -> int | float | None:
    """Bytes that one token takes over all layers of a worker; None when a layer's state does not grow with tokens."""
    values = [group["bytes_per_token"] for group in groups]
    return None if not values or None in values else sum(values)


def max_concurrency(vllm_config: Any, config: Any) -> float | None:
    """Requests of full length that fit, by the engine's own function (it computes from its arguments alone)."""
    module = sys.modules.get("vllm.v1.core.kv_cache_utils")
    compute = getattr(module, "get_max_concurrency_for_kv_cache_config", None)
    if compute is None or not config.kv_cache_groups:
        return None
    return float(compute(vllm_config, config))


def _per_token(type_name: str, bytes_per_block: int, block_size: int) -> int | float | None:
    if "Mamba" in type_name or block_size <= 0:
        return None
    whole, rest = divmod(bytes_per_block, block_size)
    return bytes_per_block / block_size if rest else whole


def _dtype(spec: Any) -> str | None:
    dtype = getattr(spec, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")
