"""What SGLang's processes record besides the figures of ``record.schema``: data."""

from __future__ import annotations

#: Keys of a ``figures`` event: readings of free memory around the weights, which are the least of
#: all ranks, and what the engine makes of them.
FIGURES = (
    "least_free_before_load_bytes",  # pre_model_load_memory
    "least_free_after_load_bytes",  # what _profile_available_bytes reads
    "mem_fraction_static",  # float
    "mm_reserved_bytes",  # set aside for multi-modal input
    # what the cache of multimodal embeddings may hold, where the former is for it alone
    "mm_cache_limit_bytes",
    "page_bytes",  # of the KV cache, all layers; its tokens go down to whole pages
    "profiled_bytes",  # what _profile_available_bytes returned
    "limited_tokens",  # --max-total-tokens, where that is what it serves with
    "kv_cache_bytes",  # of the tokens that it serves with, without the pool's page more
)
#: Keys that a ``kv_plan`` has besides.
KV_PLAN = (
    "padding_bytes",  # what the pools allocate besides the tokens: a page
)
