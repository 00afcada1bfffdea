"""The engine core's KV plan as an event: the result of ``get_kv_cache_configs`` enters.

Sizes are read from the live specs (``page_size_bytes``), never recomputed from the model's
dimensions.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vllm_memprof.capture.attributes import NAMES, Fields, reach
from vllm_memprof.capture.connectors import described
from vllm_memprof.capture.versions import in_range

#: Modules that may have the functions of vLLM's KV plan; the second is there from 0.33 on.
_PLANNERS = ("vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning")
#: Replaces vLLM's planner of layers with several page sizes.
_TUPLES = "vllm_ascend.patch.platform.patch_kv_cache_utils"
#: Sizes windows for all batches that run at once (0.23.0).
_WINDOWS = "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime"


def describe(vllm_config: Any, available_bytes: Any, configs: Any) -> Fields:
    """Return the keys of a kv_plan event.

    Args:
        vllm_config: the engine's configuration, after a possible reduction of max_model_len.
        available_bytes: what the equation granted, one entry per worker.
        configs: one KVCacheConfig per worker.
    """
    first = configs[0]
    max_model_len = vllm_config.model_config.max_model_len
    groups, *others = every = [rows_of(config) for config in configs]
    per_token = [group["bytes_per_token"] for group in groups]
    block_size = min((group["block_size"] for group in groups), default=None)
    blocks = min(config.num_blocks for config in configs)
    shared_by = math.prod(  # the ranks over which the tokens of one request are spread
        reach(vllm_config, f"parallel_config.{kind}_context_parallel_size") or 1
        for kind in ("decode", "prefill")
    )
    # requests of full length that fit, by the engine's own (pure) function
    name, concurrency = "get_max_concurrency_for_kv_cache_config", None
    for compute in filter(None, (getattr(sys.modules.get(each), name, None) for each in _PLANNERS)):
        concurrency = float(compute(vllm_config, first)) if first.kv_cache_groups else None
    # the size that vLLM prints, as read in vllm/v1/core/kv_cache_utils.py of 0.11.0, 0.13.0,
    # 0.18.0, 0.19.1 (by blocks), 0.20.2, 0.21.0, 0.23.0, 0.27.1 and 0.33.0 (by concurrency)
    version = reach(sys.modules.get("vllm.version"), "__version__")
    by_blocks = version is not None and in_range(version, "<0.20")
    tokens = None
    if by_blocks and block_size is not None:
        tokens = blocks // len(first.kv_cache_groups) * block_size * shared_by
    elif not by_blocks and concurrency is not None:
        tokens = int(concurrency * max_model_len)
    scheduled = reach(vllm_config, "scheduler_config.max_num_batched_tokens")
    if scheduled and _WINDOWS in sys.modules:
        scheduled *= vllm_config.max_concurrent_batches
    drafts = reach(vllm_config, "speculative_config") is not None
    transfer = reach(vllm_config, "kv_transfer_config")
    return {
        "blocks": blocks,
        "block_size": block_size,
        "tokens": tokens,
        "max_model_len": max_model_len,
        "max_concurrency": concurrency,
        "available_bytes": [*map(int, available_bytes)],
        "planned_bytes": [planned_bytes(config.kv_cache_tensors) for config in configs],
        # None where a layer's state does not grow
        "bytes_per_token": None if not groups or None in per_token else sum(per_token),
        "groups": groups,
        "worker_groups": every if any(rows != groups for rows in others) else None,
        "group_count": len(first.kv_cache_groups),
        "tokens_rule": "blocks" if by_blocks else "concurrency",
        "context_parallel": shared_by,
        "max_num_batched_tokens": reach(vllm_config, "max_in_flight_tokens") or scheduled,
        "kv_transfer": transfer is not None,
        "connectors": described(getattr(transfer, "__dict__", {})) if transfer else [],
        "shared_backing": shares_backing(first.kv_cache_tensors),
        "divisor_bytes": [divisor_bytes(config) for config in configs],
        "layer_bytes": [layer_bytes(config) for config in configs] if drafts else None,
        **{name: reach(vllm_config, path) for name, path in NAMES["kv_plan"].items()},
    }


def rows_of(config: Any) -> list[Fields]:
    """Return the rows of all groups of a worker's plan, each with the number of its group."""
    return [
        row | {"group": number}
        for number, group in enumerate(config.kv_cache_groups)
        for row in describe_group(group)
    ]


def specs_of(group: Any) -> Fields:
    """Return the spec of each layer of a group, which may hold layers of several page sizes."""
    members = reach(group, "kv_cache_spec.kv_cache_specs")
    return members or dict.fromkeys(group.layer_names, group.kv_cache_spec)


def layer_bytes(config: Any) -> Fields:
    """Return the bytes of each layer of a plan by its name; None where another shares them.

    Layers of several groups lie over each other: a tensor is then no single layer's.
    """
    tensors, groups = config.kv_cache_tensors, config.kv_cache_groups
    if not shares_backing(tensors):
        return {
            name: tensor.size if len(tensor.shared_by) == 1 else None
            for tensor in tensors
            for name in tensor.shared_by
        }
    alone = len(groups) == 1 and not reach(groups[0], "host_resident")
    return {
        name: spec.page_size_bytes * config.num_blocks if alone else None
        for group in groups
        for name, spec in specs_of(group).items()
    }


def shares_backing(tensors: Sequence[Any]) -> bool:
    """Return whether a plan's tensors are places in one allocation, over which groups lie.

    From vLLM 0.29 on each names the size of the whole allocation, and where in it its layers are.
    (vllm/v1/kv_cache_interface.py::KVCacheTensor 0.30.0; 0.28.0 has a size per tensor)
    """
    return any(hasattr(tensor, "layer_stride") for tensor in tensors)


def planned_bytes(tensors: Sequence[Any]) -> int:
    """Return the bytes of a plan on the device, an allocation that several tensors name once.

    Tensors that name sizes that differ are in allocations of their own.
    """
    sizes = [tensor.size for tensor in tensors if not reach(tensor, "host_resident")]
    return sum(set(sizes) if shares_backing(tensors) else sizes)


def divisor_bytes(config: Any) -> int | None:
    """Return what a planner divided the budget by, where its plan has less; else None.

    DeepSeek-V4's layers lie in tuples of a page of each size. For a layer of the draft (MTP)
    vllm-ascend counts a whole tuple as well, and allocates its one page.
    (vllm_ascend/patch/platform/patch_kv_cache_utils.py::_get_kv_cache_config_deepseek_v4, 0.23.0;
    in 0.30.0 the rest of the tuple is part of the allocation)
    """
    groups, tensors = config.kv_cache_groups, config.kv_cache_tensors
    tuples = all(hasattr(group.kv_cache_spec, "get_page_sizes") for group in groups)
    if _TUPLES not in sys.modules or len(groups) < 2 or not tuples or shares_backing(tensors):
        return None
    drafts = [tensor for tensor in tensors if any("mtp" in name for name in tensor.shared_by)]
    others = Counter(tensor.size for tensor in tensors if tensor not in drafts)
    page_sizes = groups[0].kv_cache_spec.get_page_sizes()
    return int(sum(page_sizes) * (max(others.values(), default=0) + len(drafts)))


def describe_group(group: Any) -> list[Fields]:
    """Return one row per layer type of a group, which may hold layers of several page sizes.

    Its keys: type (class of the engine's spec), layers, block_size (in tokens), page_size_bytes
    (one block of one layer), bytes_per_token (all these layers; None: it does not grow with
    tokens), dtype, layout.
    """
    rows: dict[tuple[Any, ...], Fields] = {}
    for spec in specs_of(group).values():
        dtype = reach(spec, "dtype")
        row: Fields = {
            "type": type(spec).__name__,
            "block_size": spec.block_size,
            "page_size_bytes": spec.page_size_bytes,
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        }
        more = {"layers": 0, "bytes_per_token": None, "layout": layout(spec)}
        rows.setdefault(tuple(row.values()), row | more)["layers"] += 1
    for row in rows.values():
        if "Mamba" not in row["type"] and row["block_size"] > 0:
            size = row["layers"] * row["page_size_bytes"] / row["block_size"]
            row["bytes_per_token"] = int(size) if size.is_integer() else size
    return list(rows.values())


def layout(spec: Any) -> Fields:
    """Return the numbers and words of a spec from which a page can be recomputed."""
    values = {name: reach(spec, name) for name in NAMES["kv_layout"]}
    values["dtype_bytes"] = reach(spec, "dtype.itemsize")
    sizes = [reach(dtype, "itemsize") for dtype in reach(spec, "dtypes") or ()]
    shapes = reach(spec, "shapes") or ()
    if sizes and None not in sizes and len(sizes) == len(shapes):
        values["state_bytes"] = sum(
            math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=True)
        )
    return {name: value for name, value in values.items() if isinstance(value, (int, str))}
