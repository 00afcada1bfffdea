"""Arguments of the engine that answer a finding, to the byte where the engine takes bytes."""

from __future__ import annotations

import math

from vllm_memprof.accounting.equations import divisor_of
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.text import text


def device_total(rank: RankReport) -> int | None:
    """Return the device's total, bytes; where it was not recorded, the request over its share."""
    if rank.device_total_bytes is not None:
        return rank.device_total_bytes
    asked, utilization = rank.figures.get("requested_bytes"), rank.budget.gpu_memory_utilization
    return None if asked is None or not utilization else round(asked / utilization)


def leave_room(
    rank: RankReport, size: int, ranks: list[RankReport], by_utilization: bool = False
) -> str:
    """Return the arguments that take an amount off the KV cache, "" where there are none.

    They hold for all ranks, so the rank with the smallest grant sets the figure.

    Args:
        rank: that lacks the memory.
        size: bytes.
        ranks: all of the run.
        by_utilization: also say which --gpu-memory-utilization does it.
    """
    grants = [other.budget.engine_kv_cache_bytes for other in ranks]
    granted = min((grant for grant in grants if grant is not None), default=None)
    if granted is None or granted <= size:
        return ""
    choices = []
    if rank.budget.takes_fixed_size:
        choices.append(f"--kv-cache-memory-bytes {granted - size}")
    total, utilization = rank.device_total_bytes, rank.budget.gpu_memory_utilization
    if by_utilization and total and utilization and rank.budget.override is None:
        lower = math.floor((utilization - size / total) * 10_000) / 10_000
        choices += [f"--gpu-memory-utilization {lower:.4f}"] if lower > 0 else []
    match choices:
        case [first, second]:
            return text(
                "{argument} leaves room for it, as does {other}", argument=first, other=second
            )
        case [only]:
            return text("{argument} leaves room for it", argument=only)
    return ""


def make_up_for(rank: RankReport, size: int) -> str:
    """Return the utilization that gives the KV cache so many bytes more, "" where none does."""
    total, utilization = device_total(rank), rank.budget.gpu_memory_utilization
    if not total or not utilization:
        return ""
    share = math.ceil((utilization + size / total) * 10_000) / 10_000
    if share >= 1:
        return ""
    return text("--gpu-memory-utilization {share:.4f} makes up for it", share=share)


def leave_a_kv_cache(rank: RankReport, missing: int) -> str:
    """Return the utilization above which the KV cache is positive, or by how much to raise it.

    Args:
        rank: whose budget leaves nothing.
        missing: bytes; 0 where they are not known.
    """
    if not missing:
        return text("raise --gpu-memory-utilization, or lower --max-num-batched-tokens")
    total, utilization = device_total(rank), rank.budget.gpu_memory_utilization
    missing *= divisor_of(rank.budget.equation)
    if not total or not utilization:
        return text(
            "raise --gpu-memory-utilization by more than {size:gib} / the device's GiB",
            size=missing,
        )
    share = math.ceil((utilization + missing / total) * 10_000) / 10_000
    if share >= 1:
        return text(
            "no --gpu-memory-utilization below 1 is enough: lower --max-num-batched-tokens or use "
            "more devices"
        )
    return text(
        "more than --gpu-memory-utilization {share:.4f} leaves a positive KV cache", share=share
    )
