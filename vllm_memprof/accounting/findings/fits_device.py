"""Findings about whether the device holds the KV cache and the serving peak together."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.budget.kv import worth_in_tokens
from vllm_memprof.accounting.findings.advice import device_total
from vllm_memprof.accounting.findings.needs import DEVICE_BUDGET, NOTHING
from vllm_memprof.accounting.findings.registry import (
    ERROR,
    INFO,
    WARNING,
    Found,
    RankContext,
    finding,
)
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.text import Text, join, text


@finding(
    "kv-cache-beyond-device",
    severity=ERROR,
    title=text("The device does not hold the KV cache and the serving peak: out of memory"),
    needs=DEVICE_BUDGET,
)
def kv_cache_beyond_device(context: RankContext) -> Iterator[Found]:
    """Find KV caches that do not fit the device, whatever the allocator releases.

    Meaning:
        Tensors at the peak of a step as large as the profile run, memory outside torch and the KV
        cache are together more than the device has. Such a step fails with an out-of-memory error,
        if the start does not fail already.

    Computed:
        Allocated peak of the profile run + non-torch memory without operator workspace + tensors
        that came after the profile run + KV cache - device total
        (`vllm_memprof/accounting/budget/serving_peak.py::serving_peak`), more than the rounding of
        a log.

    To do:
        Give the KV cache the size that the finding names, lower `--gpu-memory-utilization`, or
        make steps smaller (`--max-num-batched-tokens`).
    """
    rank = context.rank
    over = rank.budget.released_headroom_bytes
    if rank.budget.device_verdict != "exceeds" or over is None or rank.oom is not None:
        return  # of an allocation that failed, out-of-memory says more
    held = rank.budget.fits_device_released_bytes
    evidence = text(
        "{fits:gib} GiB of KV cache fit the device when the allocator has released all that it "
        "can, {granted:gib} GiB are in use",
        fits=held,
        granted=None if held is None else held - over,
    )
    yield Found(evidence, -over, _grant_what_fits(rank, context.ranks))


@finding(
    "reserved-peak-beyond-device",
    severity=WARNING,
    title=text(
        "The KV cache fits the device only if the allocator releases blocks that are reserved, not "
        "allocated, while serving"
    ),
    needs=DEVICE_BUDGET,
)
def reserved_peak_beyond_device(context: RankContext) -> Iterator[Found]:
    """Find KV caches that leave no room for all that was reserved at the serving peak.

    Meaning:
        A step as large as the profile run, with the KV cache in place, reserves more than the
        device has. The allocator then frees its unallocated blocks and tries again, which
        synchronises the device, or it fails.

    Computed:
        Everything held at the serving peak (reserved and non-torch) + KV cache - device total,
        where that takes a KV block and more than the rounding of a log
        (`vllm_memprof/accounting/budget/serving_peak.py::serving_peak`).

    To do:
        Give the KV cache the size that the finding names, where the release takes
        `--kv-cache-memory-bytes`.
    """
    rank, headroom = context.rank, context.rank.budget.headroom_bytes
    if rank.budget.device_verdict != "release" or headroom is None:
        return
    if worth_in_tokens(rank.kv, headroom) == 0:
        return
    yield Found(_held(rank), -headroom, _grant_what_fits(rank, context.ranks))


@finding(
    "headroom-small",
    severity=WARNING,
    title=text("Little headroom is left on the device at the serving peak"),
    needs=DEVICE_BUDGET,
)
def headroom_small(context: RankContext) -> Iterator[Found]:
    """Find KV caches that fit the device with less headroom than profiling is known to miss.

    Meaning:
        The profile run is one step. Workspace of operators that it does not run, communicators
        that are made later, and fragmentation come on top of it while serving.

    Computed:
        Headroom at the serving peak is below a quarter of the activation peak, or below 150 MiB,
        which vLLM and vllm-ascend keep in the sizes that they suggest because profiling may
        underestimate memory outside torch. The quarter is a margin and no reading: engines that
        were driven to their limits held up to a fifth of the activation peak more than the profile
        run, which has no attention over a KV cache
        (`vllm_memprof/accounting/budget/serving_peak.py::unprofiled`).

    To do:
        Give the KV cache the size that the finding names, or lower `--gpu-memory-utilization`.
    """
    rank, headroom = context.rank, context.rank.budget.headroom_bytes
    if rank.budget.device_verdict != "narrow":
        return
    margin = rank.budget.unprofiled_bytes or 0
    yield Found(_held(rank), headroom, _grant_what_fits(rank, context.ranks, margin))


@finding(
    "engine-suggestion-beyond-device",
    severity=INFO,
    title=text("A KV cache size that the engine suggests does not fit the device"),
    needs=NOTHING,
)
def engine_suggestion_beyond_device(context: RankContext) -> Iterator[Found]:
    """Find sizes for `--kv-cache-memory-bytes` that the engine prints and the device does not hold.

    Meaning:
        The engine subtracts weights, the allocated peak, the non-torch increase and graphs from the
        request, or from what was free at the start, and keeps 150 MiB. Tensors outside the weights,
        blocks that are reserved, not allocated at the peak, and what comes after its readings are
        not in that.

    Computed:
        The suggested size less the KV cache that fits the device
        (`vllm_memprof/accounting/budget/serving_peak.py::computed`).

    To do:
        Take the size that fits the device instead.
    """
    rank = context.rank
    fits = rank.budget.fits_device_bytes
    for each in rank.budget.suggestions:
        if fits is None or each.headroom_bytes is None:
            return
        if each.headroom_bytes >= -rank.budget.device_tolerance_bytes:
            continue
        evidence = text(
            "suggested to fit the {limit}: {size:gib} GiB, fits the device: {fits:gib} GiB",
            limit=_LIMITS[each.limit],
            size=each.bytes,
            fits=fits,
        )
        yield Found(evidence, -each.headroom_bytes)


_LIMITS = {"request": text("request"), "device": text("device")}


def _held(rank: RankReport) -> Text:
    items = [item for item in rank.budget.held_at_peak if item.bytes]
    parts = join(" + ", [text("{size:gib} {title}", size=i.bytes, title=i.title) for i in items])
    fits, headroom = rank.budget.fits_device_bytes, rank.budget.headroom_bytes
    return text(
        "{total:gib} GiB - ({parts}) - KV cache {granted:gib} = {headroom:gib} GiB",
        total=device_total(rank),
        parts=parts,
        granted=None if fits is None or headroom is None else fits - headroom,
        headroom=headroom,
    )


def _grant_what_fits(rank: RankReport, ranks: list[RankReport], margin: int = 0) -> str:
    """Return the argument for the largest KV cache that fits on every rank, "" where none does."""
    sizes = [each.budget.fits_device_bytes for each in ranks]
    known = [size - margin for size in sizes if size is not None]
    if not rank.budget.takes_fixed_size or len(known) < len(sizes) or min(known) <= 0:
        return ""
    argument = f"--kv-cache-memory-bytes {min(known)}"
    if any(item.bytes is None for item in rank.budget.held_at_peak):
        return text("{argument} leaves room for what was measured", argument=argument)
    return text("{argument} leaves room for it", argument=argument)
