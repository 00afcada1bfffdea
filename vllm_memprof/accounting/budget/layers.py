"""KV cache by type of layer: bytes of a block and blocks of a request, as rows of a table.

A group of layers as the ``kv_plan`` event describes it enters; the result of its type's formula
leaves, None where the event lacks an ingredient or the type is unknown. The engine's own figures
are compared with these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_memprof.accounting.model import KvGroup
from vllm_memprof.engines import ENGINES

_Layout = Mapping[str, Any]


@dataclass(frozen=True)
class RequestLimits:
    """What a request of full length depends on besides its layers; None is unknown."""

    max_model_len: int | None = None  # tokens
    max_num_batched_tokens: int | None = None
    context_parallel: int = 1  # ranks that share the tokens of a request
    mamba_cache_mode: str | None = None  # none | all | align


@dataclass(frozen=True)
class LayerType:
    """One kind of layer: both functions return None where the group or the limits lack a figure."""

    names: tuple[str, ...]  # class names of the engine's specs
    page: Callable[[_Layout, int], int | None]  # bytes of a block of so many tokens in one layer
    blocks: Callable[
        [_Layout, int, RequestLimits], int | None
    ]  # that one request of max_model_len tokens takes
    cite: str


def page_bytes(group: KvGroup) -> int | None:
    """Bytes that one block takes in one layer of the group, by the formula of its type."""
    row = _row(group)
    if row is None or group.layout is None or not group.block_size:
        return None
    size = row.page(group.layout, group.block_size)
    padded = group.layout.get("page_size_padded")
    return size if size is None or padded is None else max(size, int(padded))


def request_blocks(group: KvGroup, limits: RequestLimits) -> int | None:
    """Blocks that one request of ``max_model_len`` tokens takes of the group."""
    row = _row(group)
    if row is None or not group.block_size or not limits.max_model_len:
        return None
    return row.blocks(group.layout or {}, group.block_size, limits)


def _row(group: KvGroup) -> LayerType | None:
    spec = _POOLS.get(group.type or "", group.type)
    return next((row for row in LAYER_TYPES if spec in row.names), None)


def _two_tensors(layout: _Layout, block: int) -> int | None:
    """Keys and values: tokens x heads x (size of a key + size of a value) x bytes per number."""
    if layout.get("kv_quant_mode"):
        return None  # scales of quantised caches lie in the same page
    keys, value = _vectors(layout, block), layout.get("head_size_v")
    if keys is None or value is None:
        return None if keys is None else 2 * keys
    return keys + (_vectors({**layout, "head_size": value}, block) or 0)


def _vectors(layout: _Layout, block: int) -> int | None:
    """Tokens x heads x size of a vector x bytes per number."""
    size: int | None = block
    for name in ("num_kv_heads", "head_size", "dtype_bytes"):
        factor = layout.get(name)
        size = None if size is None or factor is None else int(size * factor)
    return size


def _latent(layout: _Layout, block: int) -> int | None:
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


def _ascend_latent(layout: _Layout, block: int) -> int | None:
    """Return the same latent vector; None where sparse attention adds to it, or may add to it."""
    if any(layout.get(name) != plain for name, plain in _PLAIN_LATENT.items()):
        return None
    return _vectors(layout, block)


def _state(layout: _Layout, block: int) -> int | None:
    size = layout.get("state_bytes")
    return None if size is None else int(size)


def _whole_length(layout: _Layout, block: int, limits: RequestLimits) -> int | None:
    share = -(-(limits.max_model_len or 0) // limits.context_parallel)
    return -(-share // block)


def _window(layout: _Layout, block: int, limits: RequestLimits) -> int | None:
    """Return the blocks of the window and the tokens of one step, and one more.

    A window need not begin at the beginning of a block.
    """
    window, batch = layout.get("sliding_window"), limits.max_num_batched_tokens
    if window is None or batch is None or limits.max_model_len is None:
        return None
    kept = int(window) - 1 + int(layout.get("extra_retained_tokens") or 0)
    return -(-min(kept + batch, limits.max_model_len) // block) + 1


def _chunk(layout: _Layout, block: int, limits: RequestLimits) -> int | None:
    chunk, batch = layout.get("attention_chunk_size"), limits.max_num_batched_tokens
    if chunk is None or batch is None or limits.max_model_len is None:
        return None
    return -(-min(int(chunk) + batch, limits.max_model_len) // block)


def _states(layout: _Layout, block: int, limits: RequestLimits) -> int | None:
    """Return one state, one per speculative token, and one where prefix caching aligns them.

    Without a mode the release is one from before 0.18, where it is one block or as many as the
    length has.
    """
    speculative = int(layout.get("num_speculative_blocks") or 0)
    fixed = {"none": 1, "align": 2}.get(limits.mamba_cache_mode or "")
    if fixed is None:
        return None
    kept = int(layout.get("num_prefill_checkpoint_blocks") or 0)  # from 0.29 on
    return fixed + speculative + (kept if limits.mamba_cache_mode == "align" else 0)


_SPECS = "vllm/v1/kv_cache_interface.py"

#: Read in vLLM 0.11.0, 0.18.0, 0.23.0, 0.27.1, 0.30.0 and 0.33.0.
LAYER_TYPES: tuple[LayerType, ...] = (
    LayerType(("FullAttentionSpec",), _two_tensors, _whole_length, f"{_SPECS}::FullAttentionSpec"),
    LayerType(("MLAAttentionSpec",), _latent, _whole_length, f"{_SPECS}::MLAAttentionSpec"),
    LayerType(
        ("AscendMLAAttentionSpec",),
        _ascend_latent,
        _whole_length,
        "vllm_ascend/core/kv_cache_interface.py::AscendMLAAttentionSpec (0.23.0)",
    ),
    LayerType(("SlidingWindowSpec",), _two_tensors, _window, f"{_SPECS}::SlidingWindowSpec"),
    LayerType(
        ("ChunkedLocalAttentionSpec",), _two_tensors, _chunk, f"{_SPECS}::ChunkedLocalAttentionSpec"
    ),
    LayerType(("MambaSpec",), _state, _states, f"{_SPECS}::MambaSpec"),
)
#: Of an engine that has no specs: the class of its pool stands for one.
_POOLS = {pool: spec for row in ENGINES.values() for pool, spec in row.pools.items()}
