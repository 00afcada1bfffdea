"""What a rank holds beside its KV cache at the serving peak, and the KV cache that fits the device.

The phases of a rank enter, items in bytes leave. The serving peak is a step as large as the profile
run with everything in place that came after it (captured graphs, pools first used in the warm-up),
or a later moment at which more was held. There is one definition: a plan, which stops before the
later items exist, has them as unknown, and what follows from it is estimated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_memprof.accounting.model import Oom, PeakItem
from vllm_memprof.accounting.quantities import QUANTITIES
from vllm_memprof.accounting.readings import StartupReadings, growth, value
from vllm_memprof.accounting.suggestions import MARGIN_BYTES
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import (
    DERIVED,
    ESTIMATED,
    MEASURED,
    MODELLED,
    Span,
    edges_of,
    first_of,
    is_within,
    weakest,
)
from vllm_memprof.text import Text, text
from vllm_memprof.units import minus

#: Of the activation peak, what serving may hold beyond the profile run: that step runs without
#: attention over a KV cache. ``scripts/verdict_cases.py`` has driven engines that held up to a
#: fifth of it more.
UNPROFILED_SHARE = 0.25


def unprofiled(peak_activation_bytes: int | None) -> int:
    """Return what serving may hold beyond the profile run, bytes: a margin, not a reading.

    At least what vLLM and vllm-ascend keep free in the sizes that they suggest.
    """
    return max(MARGIN_BYTES, int((peak_activation_bytes or 0) * UNPROFILED_SHARE))


@dataclass(frozen=True)
class ServingPeak:
    """What a rank holds beside its KV cache, bytes; None where it is unknown."""

    items: list[PeakItem]
    #: Sum of the known items: every block stays reserved. None where the profile run is unknown.
    held_bytes: int | None
    #: What no release of unallocated blocks and workspace gives back; a part may be missing.
    at_least_bytes: int | None
    how: str  # held_bytes; estimated where an item is unknown


def serving_peak(
    of: StartupReadings, kv_cache_bytes: int | None, oom: Oom | None = None
) -> ServingPeak:
    """Find what is held beside the KV cache at the serving peak.

    Args:
        of: the readings of one rank.
        kv_cache_bytes: that the rank serves with, None where none was granted.
        oom: an allocation that failed; one that failed beside the KV cache counts as held.
    """
    nothing = ServingPeak([], None, None, DERIVED)
    if kv_cache_bytes is None:
        return nothing
    reached = [
        size
        for size in (_later(of, kv_cache_bytes), _failed(of, kv_cache_bytes, oom))
        if size is not None
    ]
    later = max(reached, default=None)
    if of.figure("profiled_bytes") is not None:  # an engine that runs no profile
        if of.nothing_later is not None or later is None:  # nothing was run once the KV cache stood
            return nothing
        # a step larger than those that were run holds more: an estimate from below
        where = text(
            "the worst reading after kv_cache_alloc; this engine runs no step of full size"
        )
        return ServingPeak(
            [_held("held_at_worst", later, ESTIMATED, where)], later, None, ESTIMATED
        )
    peak, least = _profile(of), _at_least(of, kv_cache_bytes)
    allocated = of.figure("profile_after_allocated_peak_bytes")
    # a reading below what tensors held was not taken at the peak: what was reserved is not known
    if peak is None or (allocated is not None and peak.reserved < allocated):
        return replace(nothing, at_least_bytes=least)
    non_torch, over = (MODELLED, MODELLED) if of.simulated else (MEASURED, DERIVED)
    late_torch, late_device = _late(of, peak, kv_cache_bytes)
    worst, most = text("the worst reading of profile_run"), text("most at a reading of profile_run")
    items = [
        _held("reserved_peak", peak.reserved, MEASURED, worst),
        _held("non_torch_peak", peak.non_torch, non_torch, most),
    ]
    missing = of.nothing_later or text("the run did not get through its warm-up")
    for name, size, how in (
        ("late_torch", late_torch, DERIVED),
        ("late_device", late_device, over),
    ):
        reason = missing if size is None else None
        items.append(_held(name, size, how, text("after warm_up"), reason))
    graph = of.figure("graph_bytes")
    if late_torch is None and late_device is None and graph is not None:
        where = text("the engine's figure for its graph capture")
        items.append(_held("graph", max(0, graph), non_torch, where))
    held = sum(item.bytes for item in items if item.bytes is not None)
    if later is not None and later > held:
        where = text("the worst reading after kv_cache_alloc")
        items.append(_held("held_later", later - held, non_torch, where))
        held = later
    hows = [ESTIMATED if item.bytes is None else item.how for item in items]
    # the allocator has released all that it can before it fails
    failed = _failed(of, kv_cache_bytes, oom)
    least = max((size for size in (least, failed) if size is not None), default=None)
    return ServingPeak(items, held, least, weakest(hows))


def _held(
    name: str, size: int | None, how: str, source: Text, reason: Text | None = None
) -> PeakItem:
    return PeakItem(name, QUANTITIES[name].title, size, how, source, reason)


@dataclass(frozen=True)
class _Profile:
    """The profile run at its worst, bytes."""

    reserved: int
    non_torch: int
    workspace: int | None  # operator workspace, the most of it
    cleared: int  # non-torch memory that its last empty_cache gave back
    end: Snapshot | None  # the last reading of it


def profile_reserved_peak(of: StartupReadings) -> int | None:
    """Return the most that the profile run had reserved, bytes; None where it is unknown."""
    peak = _profile(of)
    return None if peak is None else peak.reserved


def _profile(of: StartupReadings) -> _Profile | None:
    runs = [span for span in of.spans if span.phase == "profile_run"]
    inside = [*runs, *(span for span in of.spans if is_within(of.spans, span, "profile_run"))]
    snapshots = [edge.snapshot for _, edge in edges_of(inside)]
    reserved, outside, workspaces = (
        [size for each in snapshots if (size := value(each, field)) is not None]
        for field in ("reserved_bytes", "non_torch_bytes", "npu_workspace_bytes")
    )
    reserved += [size for span in inside if (size := _peak_between(span)) is not None]
    if not reserved or not outside or any(span.error for span in runs):
        return None
    start, end, _ = of.profile_end
    freed = growth(end, start, "non_torch_bytes") or 0
    workspace = max(workspaces, default=None)
    return _Profile(max(reserved), max(outside), workspace, max(0, freed), runs[-1].after)


def _late(
    of: StartupReadings, peak: _Profile, kv_cache_bytes: int
) -> tuple[int | None, int | None]:
    """Return what came after the profile run and stays, bytes, over its peak: torch, non-torch."""
    warm_up, start = of.last("warm_up"), peak.end
    if start is None or warm_up is None or warm_up.error or warm_up.after is None:
        return None, None
    end = warm_up.after
    grown = minus(growth(start, end, "reserved_bytes"), kv_cache_bytes)
    tensors = minus(growth(start, end, "allocated_bytes"), kv_cache_bytes)
    pools = minus(end.graph_pool_bytes, start.graph_pool_bytes or 0)
    if grown is not None and tensors is not None and pools is not None:
        # blocks of the default pool without a tensor are used by the next peak, those of graphs not
        grown = max(tensors, min(grown, tensors + pools))
    torch = None if grown is None else max(0, grown)
    if end.non_torch_bytes is None:
        return torch, None
    # the next peak takes the operator workspace again
    again = minus(peak.workspace, end.npu_workspace_bytes)
    again = peak.cleared if again is None else max(0, again)
    return torch, max(0, end.non_torch_bytes + again - peak.non_torch)


def _failed(of: StartupReadings, kv_cache_bytes: int, oom: Oom | None) -> int | None:
    """Return what an allocation that failed beside the KV cache would have held with it, bytes."""
    stands = first_of(of.spans, "kv_cache_alloc")
    if oom is None or oom.requested_bytes is None or stands is None or stands.after is None:
        return None
    used = minus(oom.device_total_bytes, oom.free_bytes)
    return None if used is None else used + oom.requested_bytes - kv_cache_bytes


def _later(of: StartupReadings, kv_cache_bytes: int) -> int | None:
    """Return the most that was held beside the KV cache once it stood, bytes."""
    stands, total = first_of(of.spans, "kv_cache_alloc"), of.figure("device_total_bytes")
    if stands is None or stands.after is None:
        return None
    sizes = [_in_use(stands.after, total)]
    for span in of.spans:
        if span.order > stands.order:
            sizes += [_in_use(edge.snapshot, total) for edge in span.edges]
            sizes.append(_in_use_between(span))
    known = [size for size in sizes if size is not None]
    return max(known) - kv_cache_bytes if known else None


def _at_least(of: StartupReadings, kv_cache_bytes: int) -> int | None:
    """Return what is held at the peak when the allocator has released all that it can, bytes."""
    peak, after = of.figure("profile_after_allocated_peak_bytes"), of.profile_end[1]
    if peak is None or after is None or after.non_torch_bytes is None:
        # the engine's figures: in use at the start, and all that it then measured
        weights = of.figure("weights_bytes")
        used = minus(of.figure("device_total_bytes"), of.figure("initial_free_bytes"))
        if weights is None or used is None:
            return None
        names = ("peak_activation_bytes", "non_torch_increase_bytes", "graph_bytes")
        return weights + used + sum(max(0, of.figure(name) or 0) for name in names)
    held = peak + after.non_torch_bytes - (after.npu_workspace_bytes or 0)
    warm_up = of.last("warm_up")
    end = None if warm_up is None or warm_up.error else warm_up.after
    if end is None:
        return held
    if end.non_torch_bytes is not None and end.npu_workspace_bytes is not None:
        held = peak + end.non_torch_bytes - end.npu_workspace_bytes
    grown = minus(growth(after, end, "allocated_bytes"), kv_cache_bytes)
    return held + max(0, grown or 0)


def _peak_between(span: Span) -> int | None:
    """Return the reserved peak that fell within a phase, bytes; None where none did."""
    grown = growth(span.before, span.after, "reserved_run_peak_bytes")
    return value(span.after, "reserved_run_peak_bytes") if grown and grown > 0 else None


def _in_use_between(span: Span) -> int | None:
    """Return the reserved peak within a phase and the non-torch memory that was there, bytes."""
    high = _peak_between(span)
    sizes = [edge.snapshot.non_torch_bytes for edge in span.edges]
    if high is None or any(edge.snapshot.unmapped_bytes for edge in span.edges):
        return None
    known = [size for size in sizes if size is not None]
    # non-torch memory at that moment is not known; at least the lesser of both edges was there
    return high + min(known) if len(known) == len(sizes) else None


def _in_use(snapshot: Snapshot, total: int | None) -> int | None:
    whole = snapshot.device_total_bytes if snapshot.device_total_bytes is not None else total
    used = minus(whole, snapshot.device_free_bytes)
    if used is None and None not in (snapshot.reserved_bytes, snapshot.non_torch_bytes):
        return (snapshot.reserved_bytes or 0) + (snapshot.non_torch_bytes or 0)
    return used
