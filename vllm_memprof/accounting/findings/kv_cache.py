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
from vllm_memprof.accounting.findings.rules import ERROR, WARNING, Context, Found
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.text import join, text
from vllm_memprof.units import minus, sum_or_none


def negative_kv(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find ranks whose KV cache is zero or less."""
    budget, granted = rank.budget, rank.budget.engine_kv_cache_bytes
    refused = rank.figures.get("no_cache_blocks")
    if not refused and (granted is None or granted > 0):
        return
    sizes = budget.subtracted.values()
    missing = max(0, -(granted or 0))
    if sizes and not missing:
        missing = max(0, minus(sum_or_none(sizes), budget.requested_bytes) or 0)
    given = -missing if missing and not granted else None
    advice = leave_a_kv_cache(rank, missing, run.ranks) | keep_apart(rank)
    yield Found(granted, {"given": given, "refused": refused, **advice})


def kv_too_small(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find engines that refused to serve because not even one request fits."""
    figures, granted = rank.figures, rank.budget.engine_kv_cache_bytes
    asked, stored = figures.get("kv_cache_minimum_tokens"), figures.get("kv_cache_stored_tokens")
    wanted = figures.get("kv_cache_minimum_bytes")
    if asked is not None and stored is not None and asked > stored:
        yield Found(None, {"short": True, "length": stored})
    elif wanted is not None and (granted is None or granted < wanted):
        missing = 0 if granted is None else int(wanted) - granted  # None: the line was cut
        length = figures.get("estimated_max_model_len") or None
        advice = leave_a_kv_cache(rank, missing, run.ranks)
        yield Found(missing or None, {"length": length, **advice})


def startup_refused(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find engines that ended at the start because the device was in use."""
    total, free = rank.device_total_bytes, rank.initial_free_bytes
    asked, most = rank.budget.requested_bytes, most_accepted(run.ranks)
    if rank.figures.get("startup_refused") and total and free is not None:
        # None: the line was cut
        large = asked is not None and most is not None and most * total * 2 >= asked
        yield Found(minus(asked, free), {"used": total - free, "fitting": large and most})


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
    kv, over = rank.kv, minus(rank.kv.override_blocks, rank.kv.fitting_blocks) or 0
    if over > 0:
        size = None if kv.bytes_per_block is None else over * kv.bytes_per_block
        yield Found(size, {"over": over}, kv_tokens=tokens_for_blocks(kv, over))


def kv_allocation_off_plan(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find KV caches whose tensors took more or less than the plan."""
    for row in rank.kv.checks:
        if row.name == ALLOCATED and row.ok is False:
            yield Found(minus(row.found, row.expected), vars(row))


def kv_out_of_reach(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find KV caches of which requests can hold a part; of ranks that serve together once."""
    kv, peers = rank.kv, [each for each in run.ranks if each.dp_rank == rank.dp_rank]
    binding = next((each for each in kv.limits if each.title == kv.usable_why), None)
    if binding is None or rank is not peers[0]:
        return
    waits = None if kv.longest_tokens is None else kv.longest_tokens + 1
    poorest = next((each for each in peers if each.rank == kv.poorest_rank), rank)
    stage = binding.name == "poorest-rank" and poorest.pp_rank != rank.pp_rank
    lost, usable = kv.out_of_reach_tokens or 0, kv.usable_tokens or 0
    if (
        waits
        or binding.unchecked
        or ((stage or binding.name == "own-blocks") and lost >= usable / 9)
    ):
        figures = {
            "waits": waits,
            "unchecked": binding.unchecked,
            "holder": kv.poorest or rank.label,
            "fits": waits,
            "enough": kv.override_blocks
            and (kv.blocks or 0) + (kv.needed_blocks or 0) - (kv.free_blocks or 0),
            "most_blocks": kv.block_size and usable // kv.block_size,
            "stage": stage and poorest.label,
        }
        severity = ERROR if waits or binding.unchecked else WARNING if stage else None
        yield Found(kv.out_of_reach_bytes, figures, severity, about=poorest)


def step_not_profiled(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find steps that take more than the profile run by more than the margin of serving."""
    margin, room = rank.budget.unprofiled_bytes, rank.budget.headroom_bytes
    steps = [each for each in rank.kv.steps if (each.bytes or 0) > (margin or 0)]
    if steps and margin is not None:
        size = max(each.bytes or 0 for each in steps)
        short = room is not None and room < size
        logprobs = any(each.name == "prompt-logprobs" for each in steps)
        figures = {
            "steps": join(
                "; ", [text("{title}: {largest:,} against {profiled:,}", each) for each in steps]
            ),
            "room": room,
            "short": short and not logprobs,
            "logprobs": short and logprobs,
        }
        yield Found(size, figures, WARNING if short else None)


def hybrid_concurrency(run: Context) -> Iterator[Found]:
    """Find plans whose printed size does not tell how many requests fit; the same on every rank."""
    for kv in [rank.kv for rank in run.ranks if is_hybrid(rank.kv)][:1]:
        yield Found(None, vars(kv) | {"quotient": (kv.tokens or 0) / (kv.max_model_len or 1)})


def budget_halved(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find KV caches of 310P devices, which get half of the budget."""
    budget, divisor = rank.budget, divisor_of(rank.budget.equation)
    granted = budget.engine_kv_cache_bytes
    if rank.figures.get("halved", divisor != 1) and granted is not None and granted > 0:
        name, left = budget.implied_term(divisor) or ("", None)
        yield Found(granted, {name: left, "unknown": rank.initial_free_bytes is None})
