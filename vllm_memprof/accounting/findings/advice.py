"""Arguments of the engine that answer a finding, to the byte where the engine takes bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_memprof.accounting.budget.engine_options import share_of
from vllm_memprof.accounting.budget.equations import divisor_of, form_of
from vllm_memprof.accounting.budget.kv import worth_in_tokens
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.text import text
from vllm_memprof.units import GIB

#: Less KV cache than this is not worth a change.
_LEAST_GAIN_BYTES = GIB // 10


def device_total(rank: RankReport) -> int | None:
    """Return the device's total, bytes; where it was not recorded, the request over its share."""
    if rank.device_total_bytes is not None:
        return rank.device_total_bytes
    asked, utilization = rank.figures.get("requested_bytes"), rank.budget.gpu_memory_utilization
    return None if asked is None or not utilization else round(asked / utilization)


def least_granted(ranks: Iterable[RankReport]) -> int | None:
    """Return the smallest KV cache that a rank was granted, bytes; None: none is known."""
    grants = [rank.budget.engine_kv_cache_bytes for rank in ranks]
    return min((grant for grant in grants if grant is not None), default=None)


def leave_room(
    rank: RankReport, size: int, granted: int | None, by_utilization: bool = False
) -> str:
    """Return the arguments that take an amount off the KV cache, "" where there are none.

    Args:
        rank: that lacks the memory.
        size: bytes.
        granted: the smallest KV cache of all ranks: the arguments hold for all of them.
        by_utilization: also say which --gpu-memory-utilization does it.
    """
    if granted is None or granted <= size:
        return ""
    choices = []
    if rank.budget.takes_fixed_size:
        choices.append(f"--kv-cache-memory-bytes {granted - size}")
    asked = share_of(rank)
    total, utilization = asked.base_bytes, asked.value
    if by_utilization and total and utilization and rank.budget.override is None:
        lower = math.floor((utilization - size / total) * 10_000) / 10_000
        choices += [f"{asked.option} {lower:.4f}"] if lower > 0 else []
    match choices:
        case [first, second]:
            return text(
                "{argument} leaves room for it, as does {other}", argument=first, other=second
            )
        case [only]:
            return text("{argument} leaves room for it", argument=only)
    return ""


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


def make_up_for(rank: RankReport, size: int, ranks: list[RankReport]) -> str:
    """Return the utilization that makes the request so much larger, or why none does.

    Args:
        rank: whose request it is about.
        size: bytes.
        ranks: all of the run: they have the utilization in common.

    Returns:
        "" where the device's total or the utilization is not known, or it would be 1 or more.
    """
    total, utilization = device_total(rank), rank.budget.gpu_memory_utilization
    if not total or not utilization:
        return ""
    share = _rounded_up(utilization + size / total)
    if share >= 1:
        return ""
    most = most_accepted(ranks)
    if most is None:
        return text(
            "--gpu-memory-utilization {share:.4f} makes up for it, where {asked:gib} GiB are free "
            "at the start",
            share=share,
            asked=math.ceil(share * total),
        )
    if share > most:
        return text(
            "no utilization makes up for it: above {most:.4f} the engine refuses to start",
            most=most,
        )
    return text("--gpu-memory-utilization {share:.4f} makes up for it", share=share)


@dataclass(frozen=True)
class MoreKvCache:
    """Headroom that the KV cache could take; bytes."""

    argument: str
    bytes: int  # by which the KV cache of every rank grows
    tokens: int | None
    left_bytes: int  # headroom that is left on the rank with the least


def more_kv_cache(ranks: list[RankReport]) -> MoreKvCache | None:
    """Return the argument that turns headroom into KV cache, None where there is too little.

    What serving may use beyond the profile run is left free on every rank
    (``accounting.budget.serving_peak.unprofiled``).
    """
    if any(rank.budget.device_verdict != "fits" for rank in ranks) or not ranks:
        return None
    if any(item.name == "held_at_worst" for rank in ranks for item in rank.budget.held_at_peak):
        return None  # the engine ran no step of full size
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
    return MoreKvCache(argument, size, worth_in_tokens(rank.kv, size), headroom - size)


def keep_apart(rank: RankReport) -> str:
    """Return what keeps other processes' memory out of a KV cache whose equation subtracts it."""
    if rank.budget.equation == "E4p":
        return text("move the other process to another device")
    return text(
        "move the other process to another device, or upgrade to vllm-ascend 0.18 or later, which "
        "does not subtract it"
    )


def leave_a_kv_cache(rank: RankReport, missing: int, ranks: list[RankReport]) -> str:
    """Return the utilization above which the KV cache is large enough, or by how much to raise it.

    Args:
        rank: whose budget leaves too little.
        missing: bytes of the KV cache; 0 where they are not known.
        ranks: all of the run: they have the utilization in common.
    """
    if not missing:
        return text("raise --gpu-memory-utilization, or lower --max-num-batched-tokens")
    total, utilization = device_total(rank), rank.budget.gpu_memory_utilization
    missing += rank.half_units.get("kv_cache_bytes", 0)
    missing *= divisor_of(rank.budget.equation)
    if not total or not utilization:
        return text(
            "raise --gpu-memory-utilization by more than {size:gib} / the device's GiB, where that "
            "is free at the start",
            size=missing,
        )
    share, most = _rounded_up(utilization + missing / total), most_accepted(ranks)
    if share >= 1:
        return text(
            "no --gpu-memory-utilization below 1 is enough: lower --max-num-batched-tokens or use "
            "more devices"
        )
    if most is None:
        return text(
            "more than --gpu-memory-utilization {share:.4f} is enough, where {asked:gib} GiB are "
            "free at the start",
            share=share,
            asked=math.ceil(share * total),
        )
    if share >= most:
        return text(
            "no utilization is enough: above {most:.4f} the engine refuses to start; lower "
            "--max-num-batched-tokens, use more devices, or move what else is on this one",
            most=most,
        )
    return text("more than --gpu-memory-utilization {share:.4f} is enough", share=share)


def _rounded_up(share: float) -> float:
    return math.ceil(share * 10_000) / 10_000
