"""Findings about memory that a rank holds and that its equation does not subtract."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.findings.advice import device_total, leave_room
from vllm_memprof.accounting.findings.needs import PROFILE_PEAK, item_known
from vllm_memprof.accounting.findings.registry import WARNING, Found, RankContext, by_bytes, finding
from vllm_memprof.accounting.kv import worth_in_tokens
from vllm_memprof.accounting.model import DERIVED, MEASURED, MODELLED
from vllm_memprof.accounting.spare import profile_peak
from vllm_memprof.text import text

_HOW = {MEASURED: text("measured"), DERIVED: text("derived"), MODELLED: text("modelled")}
_PEAK_FIGURES = (
    "profile_end_reserved_bytes",
    "profile_end_non_torch_bytes",
    "kv_cache_bytes",
    "requested_bytes",
)


def _item(context: RankContext, name: str) -> Iterator[Found]:
    """Yield an item that the equation does not subtract, where it takes a KV block at least."""
    rank = context.rank
    item = next((item for item in rank.budget.not_subtracted if item.name == name), None)
    if item is None or item.bytes is None or item.bytes <= 0 or item.kv_tokens == 0:
        return
    evidence = text(
        "{formula} = {size:bytes} bytes, {source} ({how})",
        formula=item.formula,
        size=item.bytes,
        source=item.source,
        how=_HOW.get(item.how, item.how),
    )
    action = leave_room(rank, item.bytes, context.ranks, by_utilization=True)
    yield Found(evidence, item.bytes, action, kv_tokens=item.kv_tokens)


@finding(
    "uncharged-persistent-torch",
    severity=by_bytes,
    title=text("The equation does not subtract torch memory outside the weights"),
    needs=item_known("persistent_torch"),
)
def uncharged_persistent_torch(context: RankContext) -> Iterator[Found]:
    """Find tensors that live before the profile run and are not weights.

    Meaning:
        Input buffers, rope tables and the sampler's state exist before profiling. The activation
        peak is an increase over them and the weights are measured apart, so no term contains them.
        The granted KV cache is too large by as much.

    Computed:
        Allocated before the profile run (its peak, right after the engine resets it) less weights
        (`vllm_memprof/accounting/quantities.py::_persistent_torch`).

    To do:
        Give the KV cache a fixed size that is smaller by as much, or lower the utilization.
    """
    yield from _item(context, "persistent_torch")


@finding(
    "graph-not-charged",
    severity=by_bytes,
    title=text("The equation does not subtract graph memory"),
    needs=item_known("graph"),
)
def graph_not_charged(context: RankContext) -> Iterator[Found]:
    """Find graph pools that were captured after the KV cache had been sized.

    Meaning:
        Graphs are captured when the KV cache already exists. Unless the equation subtracts an
        estimate, their pools come on top of the request.

    Computed:
        The engine's figure for its graph capture, less the estimate that its equation subtracts
        (`vllm_memprof/accounting/quantities.py::_graph`).

    To do:
        Give the KV cache a fixed size that is smaller by as much, capture fewer batch sizes
        (`--compilation-config`), or capture none (`--enforce-eager`).
    """
    yield from _item(context, "graph")


@finding(
    "non-torch-read-after-empty-cache",
    severity=by_bytes,
    title=text("Non-torch memory was read after empty_cache had freed a part of it"),
    needs=item_known("non_torch_cleared"),
)
def non_torch_read_after_empty_cache(context: RankContext) -> Iterator[Found]:
    """Find operator workspace that was freed before the engine read its non-torch memory.

    Meaning:
        The engine calls empty_cache at the end of the profile run and reads its non-torch memory
        afterwards. What the call freed is allocated again while serving, and no term contains it.

    Computed:
        Non-torch memory before the last empty_cache of the profile run less the same after it, not
        below zero (`vllm_memprof/accounting/quantities.py::_non_torch_cleared`).

    To do:
        Give the KV cache a fixed size that is smaller by as much, or lower the utilization.
    """
    yield from _item(context, "non_torch_cleared")


@finding(
    "headroom-below-observed-peak",
    severity=WARNING,
    title=text(
        "The peak of the profile run plus the KV cache exceeds the device: while serving, the "
        "allocator has to free blocks that are reserved, not allocated"
    ),
    needs=PROFILE_PEAK,
)
def headroom_below_observed_peak(context: RankContext) -> Iterator[Found]:
    """Find ranks that cannot hold the KV cache and what the profile run held at its worst moment.

    Meaning:
        A step as large as the profile run, with the KV cache in place, needs more than the device
        has. The allocator then frees its unallocated blocks and tries again, which synchronises
        the device, or it fails.

    Computed:
        Memory held at the worst moment of the profile run (reserved at its peak, and non-torch) +
        KV cache - device total, where that takes a KV block and more than the rounding of a log
        (`vllm_memprof/accounting/spare.py::profile_peak`).

    To do:
        Give the KV cache the size that the finding names, where the release takes
        `--kv-cache-memory-bytes`.
    """
    rank = context.rank
    total, granted = device_total(rank), rank.budget.engine_kv_cache_bytes
    peak = profile_peak(rank.phases, total)
    if total is None or granted is None or peak is None:
        return
    over = peak + granted - total
    slack = sum(rank.half_units.get(name, 0) for name in _PEAK_FIGURES)
    if over <= slack or worth_in_tokens(rank.kv, over) == 0:
        return
    evidence = text(
        "{peak:gib} GiB held (reserved and non-torch) at the worst moment of the profile run + KV "
        "cache {granted:gib} = {both:gib} of {total:gib} GiB",
        peak=peak,
        granted=granted,
        both=peak + granted,
        total=total,
    )
    fixed = total - peak if rank.budget.takes_fixed_size else 0
    argument = f"--kv-cache-memory-bytes {fixed}"
    action = text("{argument} leaves room for it", argument=argument) if fixed > 0 else ""
    yield Found(evidence, over, action)
