"""Findings of SGLang alone: a static share that is too small, pools beside keys and values, and a
flush that frees nothing (seen in 0.5.18 on the simulated NPU).
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.findings.rules import Context, Found
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.record.spans import ancestors
from vllm_memprof.units import MIB, minus

#: Bytes of one place in the request-to-token pool.
#: (sglang/srt/mem_cache/memory_pool.py::ReqToTokenPool, int32)
_PLACE_BYTES = 4
#: What pools may take beyond their sizing, as a part of it: spare rows of each.
_FRACTION = 20
#: Tokens of a page of DeepSeek-V4's pools, a multiple of 128 by an assertion of SGLang.
_DSV4_PAGE = 256


def static_share_too_small(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find starts that SGLang refused because its weights take all of the static share."""
    figures = rank.figures
    if figures.get("static_refused"):
        before, after = (
            figures.get(f"least_{name}", figures.get(name))
            for name in ("free_before_load_bytes", "free_after_load_bytes")
        )
        yield Found(None, {"before": before, "after": after})


def request_pool_not_subtracted(item: str, rank: RankReport, _: Context) -> Iterator[Found]:
    """Find pools beside keys and values, which SGLang allocates after it has sized the KV cache."""
    size = next((each.bytes for each in rank.budget.not_subtracted if each.name == item), None)
    names = ("free_after_load", "free_after_pools", "k_pool", "v_pool", "kv_pool")
    slack = rank.rounding(*(f"{name}_bytes" for name in names))
    if size is not None and size > slack:
        requests, length = rank.figures.get("max_running_requests"), rank.kv.max_model_len
        table = None
        if requests is not None and length is not None:
            table = int(requests) * length * _PLACE_BYTES
        yield Found(size, {"slack": slack, "table": table})


def flush_frees_nothing(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find flushes that should empty the allocator's cache and never call empty_cache."""
    spans = rank.phases
    calls = [span for span in spans if span.phase == "empty_cache"]
    if not calls:  # not a sign of an empty function: calls may not have been recorded at all
        return
    emptied = {parent.order for call in calls for parent in ancestors(spans, call)}
    left: list[tuple[int, int]] = []
    for span in spans:
        if span.phase != "flush_cache" or span.order in emptied or span.after is None:
            continue
        if span.detail.get("success") is True and span.detail.get("empty_cache") is not False:
            size = minus(span.after.reserved_bytes, span.after.allocated_bytes)
            workspace = span.after.npu_workspace_bytes or 0
            if size is not None and size + workspace >= MIB:
                left.append((size, workspace))
    if left:
        cached, workspace = max(left, key=sum)
        yield Found(
            cached + workspace, {"count": len(left), "cached": cached, "workspace": workspace}
        )


def pools_larger_than_sized(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find pools of DeepSeek-V4 that take more than the bytes per token of their sizing."""
    figures = rank.figures
    budget, tokens = figures.get("pools_budget_bytes"), int(figures.get("pools_tokens") or 0)
    before, after = figures.get("free_after_load_bytes"), figures.get("free_after_pools_bytes")
    if not budget or budget < 0 or not tokens or before is None or after is None:
        return  # where a limit of tokens has made the pools smaller, they have two sizes
    sized = int(budget)
    requests, length = figures.get("max_running_requests"), rank.kv.max_model_len
    table = int(requests or 0) * (length or 0) * _PLACE_BYTES
    took = int(before - after) - table
    read = ("pools_budget_bytes", "free_after_load_bytes", "free_after_pools_bytes")
    slack = rank.rounding(*read)
    if took - sized > max(slack, sized // _FRACTION):
        tokens = tokens * sized // took // _DSV4_PAGE * _DSV4_PAGE
        yield Found(took - sized, {"took": took, "slack": slack, "tokens": tokens})
