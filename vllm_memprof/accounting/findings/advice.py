"""Arguments of the engine that answer a finding, to the byte where the engine takes bytes.

Figures leave, by the names that the sentences of ``findings.toml`` have for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_memprof.accounting.budget.engine_options import share_of
from vllm_memprof.accounting.budget.equations import divisor_of, form_of
from vllm_memprof.accounting.budget.kv import worth_in_tokens
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.units import GIB, Amount, either, product_or_none, smallest

#: Less KV cache than this is not worth a change.
_LEAST_GAIN_BYTES = GIB // 10


def device_total(rank: RankReport) -> Amount:
    """Return the device's total, bytes; where it was not recorded, the request over its share."""
    return either(rank.device_total_bytes, rank.budget.total_bytes)


def least_granted(ranks: Iterable[RankReport]) -> Amount:
    """Return the smallest KV cache that a rank was granted, bytes; None: none is known."""
    return smallest(rank.budget.engine_kv_cache_bytes for rank in ranks)


def leave_room(
    rank: RankReport, size: int, granted: Amount, by_utilization: bool = False
) -> dict[str, str]:
    """Return the arguments that take an amount off the KV cache: ``argument``, and an ``other``.

    Args:
        rank: that lacks the memory.
        size: bytes.
        granted: the smallest KV cache of all ranks: the arguments hold for all of them.
        by_utilization: also say which --gpu-memory-utilization does it.
    """
    if granted is None or granted <= size:
        return {}
    choices = []
    if rank.budget.takes_fixed_size:
        choices.append(f"--kv-cache-memory-bytes {granted - size}")
    asked = share_of(rank)
    total, utilization = asked.base_bytes, asked.value
    if by_utilization and total and utilization and rank.budget.override is None:
        lower = math.floor((utilization - size / total) * 10_000) / 10_000
        choices += [f"{asked.option} {lower:.4f}"] if lower > 0 else []
    return dict(zip(("argument", "other"), choices, strict=False))


def most_accepted(ranks: list[RankReport]) -> float | None:
    """Return the largest utilization, to 4 digits, with which every rank's engine would start.

    Engines refuse a request that is larger than what is free at their start. What a log prints is
    rounded, so the least free memory and the largest total that it can mean count. 1 where no rank
    checks; None where a rank that may check does not say what was free.
    """
    most = 1.0
    for rank in ranks:
        row = form_of(rank.budget.equation)
        if row is not None and not row.checks_free:
            continue
        total, free = device_total(rank), rank.initial_free_bytes
        if total is None or free is None:
            return None
        least = free - rank.half_units.get("initial_free_bytes", 0) - 1  # a request is rounded up
        share = least / (total + rank.half_units.get("device_total_bytes", 0))
        most = min(most, math.floor(share * 10_000) / 10_000)
    return most


@dataclass(frozen=True)
class MoreKvCache:
    """Headroom that the KV cache could take; bytes."""

    argument: str
    bytes: int  # by which the KV cache of every rank grows
    tokens: Amount
    left_bytes: int  # headroom that is left on the rank with the least


def more_kv_cache(ranks: list[RankReport]) -> MoreKvCache | None:
    """Return the argument that turns headroom into KV cache, None where there is too little.

    What serving may use beyond the profile run is left free on every rank
    (``accounting.budget.serving_peak.unprofiled``). A rank of which a part of the serving peak is
    unknown, as graphs that were not captured, tells of no room.
    """
    if any(rank.budget.device_verdict != "fits" for rank in ranks) or not ranks:
        return None
    items = [item for rank in ranks for item in rank.budget.held_at_peak]
    if any(item.name == "held_at_worst" or item.bytes is None for item in items):
        return None  # the engine ran no step of full size, or nothing after its KV plan
    held = [product_or_none(each.kv.max_num_seqs, each.kv.max_model_len) for each in ranks]
    if None not in held and held == [each.kv.usable_tokens for each in ranks]:
        return None  # all requests that may run at once fit at their full length
    rank = min(ranks, key=lambda each: each.budget.headroom_bytes or 0)
    budget, granted = rank.budget, least_granted(ranks)
    headroom = budget.headroom_bytes or 0
    size = headroom - (budget.unprofiled_bytes or 0)
    asked, most = share_of(rank), most_accepted(ranks)
    argument = ""
    if granted is not None and budget.takes_fixed_size:
        argument = f"--kv-cache-memory-bytes {granted + size}"
    if asked.base_bytes and asked.value is not None and budget.override is None:
        share = asked.value + size * divisor_of(budget.equation) / asked.base_bytes
        share = math.floor(min(share, 1.0 if most is None else most) * 1000) / 1000
        size = int((share - asked.value) * asked.base_bytes / divisor_of(budget.equation))
        argument = f"{asked.option} {share:g}"
    if not argument or size < _LEAST_GAIN_BYTES:
        return None
    left = headroom - size
    steps = [step for each in ranks for step in each.kv.steps if (step.bytes or 0) > left]
    if any(step.name == "prompt-logprobs" for step in steps):  # then none may be asked for
        argument = f"--max-logprobs 0 {argument}"
    return MoreKvCache(argument, size, worth_in_tokens(rank.kv, size), left)


def keep_apart(rank: RankReport) -> dict[str, object]:
    """Return ``subtracting``, the equation where it takes others' memory from the KV cache.

    And ``upgrade``, where a later release does not.
    """
    form = form_of(rank.budget.equation)
    if form is None or not form.subtracts_neighbours:
        return {}
    return {"subtracting": form.id, "upgrade": form.id != "E4p" or None}


def higher_share(
    rank: RankReport, size: int, ranks: list[RankReport], beyond: bool = False
) -> dict[str, object]:
    """Return the utilization that makes the request so much larger, or what tells that none does.

    Args:
        rank: whose request it is about.
        size: bytes.
        ranks: all of the run: they have the utilization in common.
        beyond: it takes more than that.

    Returns:
        ``share``; with ``start``, the bytes that have to be free then, where nothing tells whether
        they are. Else ``most``, above which the engine refuses to start, and ``gain``, the KV cache
        that it adds up to there, where it is worth a change; ``none``, where it would
        be 1 or more; ``more``, the size, where the device's total or the utilization is unknown.
    """
    total, utilization = device_total(rank), rank.budget.gpu_memory_utilization
    if not total or not utilization:
        return {"more": size}
    share, most = math.ceil((utilization + size / total) * 10_000) / 10_000, most_accepted(ranks)
    if share >= 1:
        return {"none": True}
    if most is None:
        return {"share": share, "start": math.ceil(share * total)}
    if (share, beyond) <= (most, False):
        return {"share": share}
    gain = int((most - utilization) * total / divisor_of(rank.budget.equation))
    return {"most": most, "gain": gain >= _LEAST_GAIN_BYTES and gain}


def leave_a_kv_cache(rank: RankReport, missing: int, ranks: list[RankReport]) -> dict[str, object]:
    """Return the utilization above which the KV cache is large enough, as ``higher_share``.

    Args:
        rank: whose budget leaves too little.
        missing: bytes of the KV cache; 0 where they are not known, which is ``unknown`` then.
        ranks: all of the run.
    """
    if not missing:
        return {"unknown": True}
    size = missing + rank.half_units.get("kv_cache_bytes", 0)
    return higher_share(rank, size * divisor_of(rank.budget.equation), ranks, beyond=True)
