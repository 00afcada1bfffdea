"""KV cache by type of layer: bytes of a block and blocks of a request, as rows of a table.

A group of layers as the ``kv_plan`` event describes it enters; the result of its type's formula
leaves, None where the event lacks an ingredient or the type is unknown. The engine's own figures
are compared with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vllm_memprof.accounting.model import Kv, KvGroup
from vllm_memprof.engines import ENGINES
from vllm_memprof.units import Amount, product_or_none, sum_or_none

#: What a request keeps: its whole length, the tokens of a window or of a chunk, or states.
WHOLE, WINDOW, CHUNK, STATES = "whole", "sliding_window", "attention_chunk_size", "states"


class LayerType(NamedTuple):
    """How much the layers of a type hold."""

    keeps: str = WHOLE
    vectors: tuple[str, ...] = ("head_size",)  # sizes of the vectors of a token
    #: Keys by which a page holds more than vectors: where one is set, and where one is not so.
    unless: tuple[str, ...] = ()
    plain: Mapping[str, int | bool] = {}
    stored: bool = False  # a block counts stored vectors, each of ``compress_ratio`` tokens


_KEYS_AND_VALUES = ("head_size", "head_size_v")
#: Class of the engine's spec -> its layers. (vllm/v1/kv_cache_interface.py, read in vLLM 0.11.0,
#: 0.18.0, 0.23.0, 0.27.1, 0.30.0 and 0.33.0; vllm_ascend/core/kv_cache_interface.py 0.23.0)
LAYER_TYPES = {
    # scales of quantised caches lie in the same page
    "FullAttentionSpec": LayerType(vectors=_KEYS_AND_VALUES, unless=("kv_quant_mode",)),
    "MLAAttentionSpec": LayerType(unless=("model_version", "kv_quant_mode")),
    # caches of sparse attention in 8 bits with their scales, an indexer's that several ranks hold
    "AscendMLAAttentionSpec": LayerType(
        plain={
            "scale_dim": 0,
            "cache_sparse_sfa_c8": False,
            "cache_sparse_li_c8": False,
            "sfa_dcp_replicated_indexer_size": 1,
        },
        stored=True,  # CompressAttentionManager
    ),
    "AscendSlidingWindowMLASpec": LayerType(WINDOW, unless=("kv_quant_mode",)),
    "SlidingWindowSpec": LayerType(WINDOW, _KEYS_AND_VALUES, ("kv_quant_mode",)),
    "ChunkedLocalAttentionSpec": LayerType(CHUNK, _KEYS_AND_VALUES, ("kv_quant_mode",)),
    "MambaSpec": LayerType(STATES),
}
#: Of an engine that has no specs: the class of its pool stands for one.
_POOLS = {pool: spec for row in ENGINES.values() for pool, spec in row.pools.items()}
#: Bytes of a latent vector in the packed format of sparse attention.
_PACKED, _PACKED_BYTES = "fp8_ds_mla", 656


def page_bytes(group: KvGroup) -> Amount:
    """Bytes that one block takes in one layer of the group, by the formula of its type."""
    row, layout = _row(group), group.layout
    if row is None or layout is None or not group.block_size:
        return None
    if any(map(layout.get, row.unless)) or any(
        layout.get(name) != value for name, value in row.plain.items()
    ):
        return None

    def figure(name: str) -> Amount:
        size = layout.get(name, layout.get("head_size") if name in row.vectors else None)
        return None if size is None else int(size)

    ratio = 1 if row.stored else figure("compress_ratio") or 1
    if row.keeps == STATES:
        size = figure("state_bytes")
    elif layout.get("cache_dtype_str") == _PACKED:
        size = group.block_size * _PACKED_BYTES
    else:
        vectors = sum_or_none(map(figure, row.vectors))
        tokens = group.block_size // ratio
        size = product_or_none(tokens, vectors, figure("num_kv_heads"), figure("dtype_bytes"))
    return size if size is None else max(size, figure("page_size_padded") or 0)


def request_blocks(group: KvGroup, kv: Kv, length: Amount = None) -> Amount:
    """Blocks that one request takes of the group.

    Args:
        group, kv: of the plan.
        length: tokens of the request, that is admitted with as many blocks of a window as it has
            tokens for; None: of ``max_model_len``, as the engine sizes its KV cache.
    """
    row, layout, block = _row(group), group.layout or {}, group.block_size
    if row is None or not block or not kv.max_model_len:
        return None
    if row.keeps == STATES:
        # one state, one per speculative token, one where prefix caching aligns them; in the mode
        # "all", and in releases without modes, as many as the length has, which is one of blocks
        # of max_model_len (MambaManager 0.13.0, 0.23.0)
        aligned = kv.mamba_cache_mode == "align"
        whole = kv.mamba_cache_mode in (None, "all")
        states = -(-(length or kv.max_model_len) // block) if whole else 1 + aligned
        if kv.mamba_cache_mode is None and length is None:
            return states  # those releases size it without speculative tokens
        names = ["num_speculative_blocks"]
        names += ["num_prefill_checkpoint_blocks"] if aligned else []  # from 0.29 on
        return states + sum(int(layout.get(name) or 0) for name in names)
    tokens, more = kv.max_model_len, 0
    if row.keeps == WHOLE:
        tokens = -(-(length or tokens) // (kv.context_parallel or 1))
        tokens //= int(layout.get("compress_ratio") or 1) if row.stored else 1
    else:  # what is kept and the tokens of one step
        kept, step = layout.get(row.keeps), kv.max_num_batched_tokens
        if kept is None or step is None:
            return None
        if row.keeps == WINDOW:  # it need not begin at the beginning of a block
            kept, more = int(kept) - 1 + int(layout.get("extra_retained_tokens") or 0), 1
        tokens = min(int(kept) + step, tokens)
    blocks = -(-tokens // block) + more
    return blocks if length is None or row.keeps == WHOLE else min(blocks, -(-length // block))


def _row(group: KvGroup) -> LayerType | None:
    return LAYER_TYPES.get(_POOLS.get(group.type, group.type))
