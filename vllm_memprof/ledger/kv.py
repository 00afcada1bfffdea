"""KV-cache arithmetic: bytes to blocks to tokens, and the plan held against the budget and the allocation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from vllm_memprof.ledger.model import Check, Kv, KvGroup

#: KV cache specs whose requests grow with their length, one block per ``block_size`` tokens; for them the engine's
#: concurrency can be recomputed. (vllm 0.23.0, vllm/v1/kv_cache_interface.py::FullAttentionSpec)
_FULL_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "AscendMLAAttentionSpec")


def build_kv(plan: dict[str, Any] | None, worker_index: int | None, allocated_bytes: int | None) -> Kv:
    """One rank's share of the engine's KV plan, with its cross-checks.

    Args:
        plan: the ``kv_plan`` event of the rank's engine core, None where there was none.
        worker_index: position of the rank in the plan's per-worker lists.
        allocated_bytes: growth of allocated memory while the KV cache was allocated.
    """
    if plan is None:
        return Kv()
    groups = [_group(data) for data in plan.get("groups") or []]
    blocks = _integer(plan.get("blocks"))
    planned = _item(plan.get("planned_bytes"), worker_index)
    available = _item(plan.get("available_bytes"), worker_index)
    per_block = _bytes_per_block(groups, planned, blocks)
    kv = Kv(
        tokens=_integer(plan.get("tokens")),
        block_size=_integer(plan.get("block_size")),
        blocks=blocks,
        bytes_per_token=plan.get("bytes_per_token"),
        max_model_len=_integer(plan.get("max_model_len")),
        max_concurrency=plan.get("max_concurrency"),
        bytes_per_block=per_block,
        available_bytes=available,
        planned_bytes=planned,
        groups=groups,
    )
    return Kv(**{**vars(kv), "checks": _checks(kv, _fitting_blocks(plan, kv), allocated_bytes)})


#: Tokens per block that an engine takes where nobody asks for another number; a log does not print it.
_DEFAULT_BLOCK_SIZE = {"vllm-ascend": 128, "vllm": 16}
#: Bytes per token are layers x heads x head size x bytes per number: a multiple of this for every known model.
_BYTES_PER_TOKEN_STEP = 512


def infer_layout(kv: Kv, granted_bytes: int | None, half_unit_bytes: int, engine: str | None) -> Kv:
    """Blocks and bytes per block of a plan of which a log prints the tokens alone.

    The size of the KV cache over its tokens leaves a narrow range for the bytes per token; the layout counts as
    known only where a single multiple of 512 bytes lies in it, and where every layer grows with the length of a
    request. What it gives is marked inferred.
    """
    if kv.blocks is not None or not kv.tokens or not granted_bytes or is_hybrid(kv):
        return kv
    block_size = kv.block_size or _DEFAULT_BLOCK_SIZE.get(engine or "")
    if block_size is None or kv.tokens % block_size:
        return kv
    low = (granted_bytes - half_unit_bytes) / (kv.tokens + block_size)
    high = (granted_bytes + half_unit_bytes) / kv.tokens
    first = math.floor(low / _BYTES_PER_TOKEN_STEP) + 1
    last = math.floor(high / _BYTES_PER_TOKEN_STEP)
    if first != last:
        return kv
    per_token = first * _BYTES_PER_TOKEN_STEP
    return replace(
        kv,
        block_size=block_size,
        blocks=kv.tokens // block_size,
        bytes_per_token=per_token,
        bytes_per_block=per_token * block_size,
        inferred=True,
    )


def is_hybrid(kv: Kv) -> bool:
    """Whether tokens / max_model_len is another number than the engine's concurrency: layers that do not grow alike."""
    if not kv.tokens or not kv.max_model_len or kv.max_concurrency is None:
        return False
    return abs(kv.tokens / kv.max_model_len - kv.max_concurrency) > 0.01 + 0.01 * kv.max_concurrency


def blocks_per_request(kv: Kv) -> int | None:
    """Blocks that one request of ``max_model_len`` tokens takes, None where the plan does not tell.

    vllm 0.23.0, vllm/v1/core/kv_cache_utils.py::get_max_concurrency_for_kv_cache_config divides the blocks by this
    whole number, so it can be read back from the concurrency.
    """
    if not kv.blocks or not kv.max_concurrency:
        return None
    return round(kv.blocks / kv.max_concurrency)


def tokens_for_blocks(kv: Kv, blocks: int) -> int | None:
    """Tokens that a number of blocks holds, as the engine prints its "KV cache size".

    vllm 0.23.0, vllm/v1/core/kv_cache_utils.py::_report_kv_cache_config: int(concurrency x max_model_len).
    """
    if kv.inferred:
        return None if kv.block_size is None else blocks * kv.block_size
    per_request = blocks_per_request(kv)
    if per_request is None or kv.max_model_len is None:
        return None
    return int(blocks / per_request * kv.max_model_len)


def tokens_for_bytes(kv: Kv, size_bytes: int) -> int | None:
    """Tokens that a KV budget holds: whole blocks only; 0 for a negative budget."""
    if not kv.bytes_per_block:
        return None
    return tokens_for_blocks(kv, max(0, size_bytes) // kv.bytes_per_block)


def worth_in_tokens(kv: Kv, size_bytes: int | None) -> int | None:
    """What an amount of memory is worth in KV tokens: whole blocks, rounded down, sign kept."""
    if size_bytes is None:
        return None
    tokens = tokens_for_bytes(kv, abs(size_bytes))
    return None if tokens is None else int(tokens if size_bytes >= 0 else -tokens)


def _bytes_per_block(groups: list[KvGroup], planned: int | None, blocks: int | None) -> int | None:
    """What one block takes on the device over all layers: the plan's own division.

    One pool per layer of the largest group, shared by the groups. (vllm 0.23.0,
    vllm/v1/core/kv_cache_utils.py::get_kv_cache_config_from_groups)
    """
    if planned is not None and blocks and planned % blocks == 0:
        return planned // blocks
    pages = {group.page_size_bytes for group in groups}
    layers = [group.layers for group in groups if group.layers is not None]
    if len(pages) != 1 or len(layers) != len(groups):
        return None
    page = pages.pop()
    return None if page is None else page * max(layers)


def _fitting_blocks(plan: dict[str, Any], kv: Kv) -> int | None:
    """Blocks that the worker with the least room can hold: the engine serves with the minimum over workers."""
    available, planned = plan.get("available_bytes"), plan.get("planned_bytes")
    if not isinstance(available, list) or not isinstance(planned, list) or len(available) != len(planned):
        return None
    blocks = kv.blocks
    if not blocks or None in available or any(size is None or int(size) < blocks for size in planned):
        return None
    fitting = [int(room) // (int(size) // blocks) for room, size in zip(available, planned, strict=True)]
    return min(fitting, default=None)


def _checks(kv: Kv, fitting: int | None, allocated_bytes: int | None) -> list[Check]:
    product = None if kv.blocks is None or kv.bytes_per_block is None else kv.blocks * kv.bytes_per_block
    concurrency = _full_attention_concurrency(kv)
    tokens = None
    if concurrency is not None and kv.max_model_len is not None:
        tokens = int(concurrency * kv.max_model_len)
    within = None if kv.planned_bytes is None or kv.available_bytes is None else kv.planned_bytes <= kv.available_bytes
    return [
        _equal("blocks x bytes per block = planned bytes", product, kv.planned_bytes),
        Check("planned bytes fit into the budget", kv.available_bytes, kv.planned_bytes, within),
        _equal("blocks = budget // bytes per block, least of all workers", fitting, kv.blocks),
        _equal("tokens = int(concurrency x max_model_len)", tokens, kv.tokens),
        _allocated(kv.planned_bytes, allocated_bytes),
    ]


def _full_attention_concurrency(kv: Kv) -> float | None:
    """The engine's concurrency from blocks alone; None for layouts whose requests do not grow with their length."""
    if not kv.groups or any(group.type not in _FULL_SPECS for group in kv.groups) or len(kv.groups) != 1:
        return None
    if kv.blocks is None or not kv.block_size or not kv.max_model_len:
        return None
    return kv.blocks / -(-kv.max_model_len // kv.block_size)


def _equal(name: str, expected: int | None, found: int | None) -> Check:
    return Check(name, expected, found, None if expected is None or found is None else expected == found)


def _allocated(planned: int | None, allocated: int | None) -> Check:
    """The allocator pads each tensor by some bytes, a KV connector by 2 MiB: within 1% the plan was kept."""
    ok = None if planned is None or allocated is None else 0 <= allocated - planned <= planned // 100
    return Check("allocated for the KV cache = planned bytes, within 1%", planned, allocated, ok)


def _group(data: dict[str, Any]) -> KvGroup:
    return KvGroup(
        type=str(data.get("type")),
        layers=_integer(data.get("layers")),
        block_size=_integer(data.get("block_size")),
        page_size_bytes=_integer(data.get("page_size_bytes")),
        bytes_per_token=data.get("bytes_per_token"),
        dtype=data.get("dtype"),
    )


def _integer(value: Any) -> int | None:
    return None if value is None else int(value)


def _item(values: Any, index: int | None) -> int | None:
    if not isinstance(values, list) or not values:
        return None
    if index is None:
        return _integer(values[0]) if len(values) == 1 else None
    return _integer(values[index]) if 0 <= index < len(values) else None
