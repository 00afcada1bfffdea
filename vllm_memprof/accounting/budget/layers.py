"""KV cache by type of layer: bytes of a block and blocks of a request, as rows of a table.

A group of layers as the ``kv_plan`` event describes it enters; the result of its type's formula
leaves, None where the event lacks an ingredient or the type is unknown. The engine's own figures
are compared with these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_memprof.accounting.model import Kv, KvGroup
from vllm_memprof.engines import ENGINES
from vllm_memprof.units import Amount

_Layout = Mapping[str, Any]
#: Bytes of a block of so many tokens in one layer; blocks of so many tokens that one request of
#: ``max_model_len`` tokens takes. Both are None where the layout or the plan lacks a figure.
Page = Callable[[_Layout, int], Amount]
Blocks = Callable[[_Layout, int, Kv], Amount]


def page_bytes(group: KvGroup) -> Amount:
    """Bytes that one block takes in one layer of the group, by the formula of its type."""
    row = _row(group)
    if row is None or group.layout is None or not group.block_size:
        return None
    size, padded = row[0](group.layout, group.block_size), group.layout.get("page_size_padded")
    return size if size is None or padded is None else max(size, int(padded))


def request_blocks(group: KvGroup, kv: Kv) -> Amount:
    """Blocks that one request of ``max_model_len`` tokens takes of the group."""
    row = _row(group)
    if row is None or not group.block_size or not kv.max_model_len:
        return None
    return row[1](group.layout or {}, group.block_size, kv)


def _row(group: KvGroup) -> tuple[Page, Blocks] | None:
    return LAYER_TYPES.get(_POOLS.get(group.type, group.type))


def _two_tensors(layout: _Layout, block: int) -> Amount:
    """Keys and values: tokens x heads x (size of a key + size of a value) x bytes per number."""
    if layout.get("kv_quant_mode"):
        return None  # scales of quantised caches lie in the same page
    size = layout.get("head_size_v", layout.get("head_size"))
    keys, values = _vectors(layout, block), _vectors({**layout, "head_size": size}, block)
    return None if keys is None or values is None else keys + values


def _vectors(layout: _Layout, block: int) -> Amount:
    """Tokens x heads x size of a vector x bytes per number."""
    size: Amount = block
    for name in ("num_kv_heads", "head_size", "dtype_bytes"):
        factor = layout.get(name)
        size = None if size is None or factor is None else int(size * factor)
    return size


def _latent(layout: _Layout, block: int) -> Amount:
    """One latent vector per token; 656 bytes of it in the packed format of sparse attention."""
    if layout.get("model_version") or layout.get("kv_quant_mode"):
        return None
    if layout.get("cache_dtype_str") == "fp8_ds_mla":
        return block * 656
    return _vectors(layout, block // (layout.get("compress_ratio") or 1))


#: Keys by which a page of vllm-ascend's latent attention holds more than latent vectors (caches of
#: sparse attention in 8 bits with their scales, an indexer's cache that several ranks hold), with
#: the value of each where it does not.
_PLAIN_LATENT = {
    "scale_dim": 0,
    "cache_sparse_sfa_c8": False,
    "cache_sparse_li_c8": False,
    "sfa_dcp_replicated_indexer_size": 1,
}


def _ascend_latent(layout: _Layout, block: int) -> Amount:
    """Return the same latent vector; None where sparse attention adds to it, or may add to it."""
    if any(layout.get(name) != plain for name, plain in _PLAIN_LATENT.items()):
        return None
    return _vectors(layout, block)


def _state(layout: _Layout, block: int) -> Amount:
    size = layout.get("state_bytes")
    return None if size is None else int(size)


def _whole_length(layout: _Layout, block: int, kv: Kv) -> Amount:
    share = -(-(kv.max_model_len or 0) // (kv.context_parallel or 1))
    return -(-share // block)


def _window(layout: _Layout, block: int, kv: Kv) -> Amount:
    """Return the blocks of the window and the tokens of one step, and one more.

    A window need not begin at the beginning of a block.
    """
    kept, more = layout.get("sliding_window"), layout.get("extra_retained_tokens") or 0
    blocks = None if kept is None else _recent(kept - 1 + more, block, kv)
    return None if blocks is None else blocks + 1


def _chunk(layout: _Layout, block: int, kv: Kv) -> Amount:
    return _recent(layout.get("attention_chunk_size"), block, kv)


def _recent(kept: Amount, block: int, kv: Kv) -> Amount:
    """Return the blocks of the tokens that are kept and of those of one step."""
    if kept is None or kv.max_num_batched_tokens is None or kv.max_model_len is None:
        return None
    return -(-min(kept + kv.max_num_batched_tokens, kv.max_model_len) // block)


def _states(layout: _Layout, block: int, kv: Kv) -> Amount:
    """Return one state, one per speculative token, and one where prefix caching aligns them.

    Without a mode the release is one from before 0.18, where it is one block or as many as the
    length has.
    """
    fixed = {"none": 1, "align": 2}.get(kv.mamba_cache_mode or "")
    if fixed is None:
        return None
    names = ["num_speculative_blocks"]
    if kv.mamba_cache_mode == "align":
        names.append("num_prefill_checkpoint_blocks")  # from 0.29 on
    return fixed + sum(int(layout.get(name) or 0) for name in names)


#: Class of the engine's spec -> its formulas. (vllm/v1/kv_cache_interface.py, read in vLLM 0.11.0,
#: 0.18.0, 0.23.0, 0.27.1, 0.30.0 and 0.33.0; vllm_ascend/core/kv_cache_interface.py 0.23.0)
LAYER_TYPES: dict[str, tuple[Page, Blocks]] = {
    "FullAttentionSpec": (_two_tensors, _whole_length),
    "MLAAttentionSpec": (_latent, _whole_length),
    "AscendMLAAttentionSpec": (_ascend_latent, _whole_length),
    "SlidingWindowSpec": (_two_tensors, _window),
    "ChunkedLocalAttentionSpec": (_two_tensors, _chunk),
    "MambaSpec": (_state, _states),
}
#: Of an engine that has no specs: the class of its pool stands for one.
_POOLS = {pool: spec for row in ENGINES.values() for pool, spec in row.pools.items()}
