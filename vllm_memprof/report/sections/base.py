"""What several sections ask of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_memprof.accounting.model import RankReport


def least_grant(ranks: Sequence[RankReport]) -> RankReport | None:
    """Return the rank with the smallest KV cache, which all of them serve with; None: no grant."""
    known = [rank for rank in ranks if rank.budget.engine_kv_cache_bytes is not None]
    return min(known, key=lambda rank: rank.budget.engine_kv_cache_bytes or 0, default=None)
