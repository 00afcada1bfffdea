"""Findings about the KV cache that the engine granted and planned."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.budget.equations import divisor_of
from vllm_memprof.accounting.budget.kv import (
    ALLOCATED,
    is_hybrid,
    tokens_for_blocks,
    worth_in_tokens,
)
from vllm_memprof.accounting.findings.advice import keep_apart, leave_a_kv_cache, most_accepted
from vllm_memprof.accounting.findings.rules import Context, Found
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.units import minus, sum_or_none


def negative_kv(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find ranks whose KV cache is zero or less."""
    budget = rank.budget
    granted, refused = budget.engine_kv_cache_bytes, rank.figures.get("no_cache_blocks") or None
    if refused is None and (granted is None or granted > 0):
        return
    sizes = [row.bytes for row in budget.terms if row.subtracted]
    missing = max(0, -(granted or 0))
    if sizes and not missing:
        missing = max(0, minus(sum_or_none(sizes), budget.requested_bytes) or 0)
    yield Found(
        granted,
        {
            "asked": budget.requested_bytes,
            "weights": rank.figures.get("weights_bytes"),
            "given": -missing if missing and not granted else None,
            "granted": granted,
            "refused": refused,
            **leave_a_kv_cache(rank, missing, run.ranks),
            **keep_apart(rank),
        },
    )


def kv_too_small(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find engines that refused to serve because not even one request fits."""
    figures, granted = rank.figures, rank.budget.engine_kv_cache_bytes
    asked, stored = figures.get("kv_cache_minimum_tokens"), figures.get("kv_cache_stored_tokens")
    if asked is not None and stored is not None and asked > stored:
        yield Found(None, {"asked": asked, "stored": stored, "length": stored})
        return
    wanted = figures.get("kv_cache_minimum_bytes")
    if wanted is not None and (granted is None or granted < wanted):
        missing = 0 if granted is None else int(wanted) - granted  # None: the line was cut
        yield Found(
            missing or None,
            {
                "wanted": wanted,
                "granted": granted,
                "length": figures.get("estimated_max_model_len") or None,
                **leave_a_kv_cache(rank, missing, run.ranks),
            },
        )


def startup_refused(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find engines that ended at the start because the device was in use."""
    total, free = rank.device_total_bytes, rank.initial_free_bytes
    asked, most = rank.budget.requested_bytes, most_accepted(run.ranks)
    if rank.figures.get("startup_refused") and total and free is not None:
        large = asked is not None and most is not None and most * total * 2 >= asked
        yield Found(
            minus(asked, free),
            {
                "total": total,
                "free": free,
                "used": total - free,
                "asked": asked,
                "share": rank.budget.gpu_memory_utilization,
                "fitting": most if large else None,
            },
        )


def rank_skew(run: Context) -> Iterator[Found]:
    """Find ranks of one replica and pipeline stage that were granted unequal KV caches."""
    peers: dict[tuple[int | None, int | None], list[tuple[int, RankReport]]] = {}
    for rank in run.ranks:
        granted = rank.budget.engine_kv_cache_bytes
        if granted is not None and rank.rank is not None:  # a log may print an unnamed one twice
            peers.setdefault((rank.dp_rank, rank.pp_rank), []).append((granted, rank))
    for group in peers.values():
        low, least = min(group, key=lambda pair: pair[0])
        high, most = max(group, key=lambda pair: pair[0])
        if high > low and worth_in_tokens(least.kv, high - low) != 0:
            yield Found(
                high - low,
                {"least": least.label, "low": low, "most": most.label, "high": high},
                about=least,
            )


def block_override_beyond_budget(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find plans with more blocks than the KV cache of the budget holds."""
    kv = rank.kv
    asked, fitting = kv.override_blocks, kv.fitting_blocks
    if asked is not None and fitting is not None and asked > fitting:
        over = asked - fitting
        yield Found(
            None if kv.bytes_per_block is None else over * kv.bytes_per_block,
            {"asked": asked, "fitting": fitting, "over": over},
            kv_tokens=tokens_for_blocks(kv, over),
        )


def kv_allocation_off_plan(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find KV caches whose tensors took more or less than the plan."""
    for row in rank.kv.checks:
        if row.name == ALLOCATED and row.ok is False:
            yield Found(
                minus(row.found, row.expected), {"expected": row.expected, "found": row.found}
            )


def hybrid_concurrency(run: Context) -> Iterator[Found]:
    """Find plans whose printed size does not tell how many requests fit."""
    for kv in (rank.kv for rank in run.ranks):
        if is_hybrid(kv) and kv.tokens and kv.max_model_len:
            yield Found(
                None,
                {
                    "tokens": kv.tokens,
                    "length": kv.max_model_len,
                    "quotient": kv.tokens / kv.max_model_len,
                    "concurrency": kv.max_concurrency,
                },
            )
            return  # the plan is the same on every rank


def budget_halved(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find KV caches of 310P devices, which get half of the budget."""
    budget, divisor = rank.budget, divisor_of(rank.budget.equation)
    granted = budget.engine_kv_cache_bytes
    if rank.figures.get("halved", divisor != 1) and granted is not None and granted > 0:
        name, left = budget.implied_term(divisor) or ("", None)
        yield Found(
            granted,
            {
                "granted": granted,
                "cleared": left if name == "cleared" else None,
                "unknown": True if rank.initial_free_bytes is None else None,
            },
        )
