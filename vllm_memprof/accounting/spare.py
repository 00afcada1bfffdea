"""What a rank holds beside its KV cache at the serving peak, and the KV cache that fits the device.

The phases of a rank enter, items in bytes leave. The serving peak is a step as large as the profile
run with everything in place that came after it (captured graphs, pools first used in the warm-up),
or a later moment at which more was held. There is one definition: a plan, which stops before the
later items exist, has them as unknown, and what follows from it is estimated.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_memprof.accounting.model import Oom, PeakItem
from vllm_memprof.accounting.quantities import QUANTITIES, Evidence
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
    last_of,
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
    evidence: Evidence,
    kv_cache_bytes: int | None,
    oom: Oom | None = None,
    why_unknown: Text | None = None,
) -> ServingPeak:
    """Find what is held beside the KV cache at the serving peak.

    Args:
        evidence: of one rank.
        kv_cache_bytes: that the rank serves with, None where none was granted.
        oom: an allocation that failed; one that failed beside the KV cache counts as held.
        why_unknown: why nothing is recorded after the profile run, where that is known.
    """
    spans, simulated = evidence.spans, evidence.simulated
    peak = _profile(spans)
    if kv_cache_bytes is None:
        return ServingPeak([], None, None, DERIVED)
    if evidence.figure("profiled_bytes") is not None:
        if why_unknown is not None:  # nothing was run once the KV cache stood
            return ServingPeak([], None, None, DERIVED)
        return _without_profile(evidence, kv_cache_bytes, oom)
    least = _at_least(evidence, kv_cache_bytes)
    allocated = evidence.figure("profile_after_allocated_peak_bytes")
    # a reading below what tensors held was not taken at the peak: what was reserved is not known
    if peak is None or (allocated is not None and peak.reserved < allocated):
        return ServingPeak([], None, least, DERIVED)
    late = _late(spans, peak, kv_cache_bytes)
    non_torch = MODELLED if simulated else MEASURED
    missing = why_unknown or text("the run did not get through its warm-up")
    items = [
        _held("reserved_peak", peak.reserved, MEASURED, text("the worst reading of profile_run")),
        _held(
            "non_torch_peak", peak.non_torch, non_torch, text("most at a reading of profile_run")
        ),
    ]
    for name, size, how in (
        ("late_torch", late.torch, DERIVED),
        ("late_device", late.non_torch, MODELLED if simulated else DERIVED),
    ):
        reason = missing if size is None else None
        items.append(_held(name, size, how, text("after warm_up"), reason))
    graph = evidence.figure("graph_bytes")
    if late.torch is None and late.non_torch is None and graph is not None:
        where = text("the engine's figure for its graph capture")
        items.append(_held("graph", max(0, graph), non_torch, where))
    held = sum(item.bytes for item in items if item.bytes is not None)
    later = _later(spans, evidence.figure("device_total_bytes"), kv_cache_bytes)
    failed = _failed(spans, kv_cache_bytes, oom)
    later = max((size for size in (later, failed) if size is not None), default=None)
    if later is not None and later > held:
        where = text("the worst reading after kv_cache_alloc")
        items.append(_held("held_later", later - held, non_torch, where))
        held = later
    hows = [item.how for item in items if item.bytes is not None]
    hows += [ESTIMATED for item in items if item.bytes is None]
    # the allocator has released all that it can before it fails
    least = max((size for size in (least, failed) if size is not None), default=None)
    return ServingPeak(items, held, least, weakest(hows))


def _without_profile(evidence: Evidence, kv_cache_bytes: int, oom: Oom | None) -> ServingPeak:
    """Return the worst reading once the KV cache stood, of an engine that runs no profile.

    A step larger than those that were run holds more: the figure is an estimate from below.
    """
    spans, total = evidence.spans, evidence.figure("device_total_bytes")
    sizes = [_later(spans, total, kv_cache_bytes), _failed(spans, kv_cache_bytes, oom)]
    held = max((size for size in sizes if size is not None), default=None)
    if held is None:
        return ServingPeak([], None, None, DERIVED)
    where = text("the worst reading after kv_cache_alloc; this engine runs no step of full size")
    item = PeakItem(
        "held_at_worst", QUANTITIES["held_at_worst"].title, held, ESTIMATED, where, None
    )
    return ServingPeak([item], held, None, ESTIMATED)


def profile_reserved_peak(spans: list[Span]) -> int | None:
    """Return the most that the profile run had reserved, bytes; None where it is unknown."""
    peak = _profile(spans)
    return None if peak is None else peak.reserved


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


def _profile(spans: list[Span]) -> _Profile | None:
    runs = [span for span in spans if span.phase == "profile_run"]
    inside = [*runs, *(span for span in spans if is_within(spans, span, "profile_run"))]
    snapshots = [edge.snapshot for _, edge in edges_of(inside)]
    reserved = [size for each in snapshots if (size := each.reserved_bytes) is not None]
    reserved += [size for span in inside if (size := _peak_between(span)) is not None]
    outside = [size for each in snapshots if (size := each.non_torch_bytes) is not None]
    if not reserved or not outside or any(span.error for span in runs):
        return None
    workspaces = [size for each in snapshots if (size := each.npu_workspace_bytes) is not None]
    before, after, _ = Evidence({}, spans, simulated=False).profile_end()
    freed = None
    if before is not None and after is not None:
        freed = minus(before.non_torch_bytes, after.non_torch_bytes)
    return _Profile(
        max(reserved),
        max(outside),
        max(workspaces, default=None),
        max(0, freed or 0),
        runs[-1].after,
    )


@dataclass(frozen=True)
class _Late:
    """What came after the profile run and stays, bytes, over the peak of the profile run."""

    torch: int | None
    non_torch: int | None


def _late(spans: list[Span], peak: _Profile, kv_cache_bytes: int) -> _Late:
    warm_up, start = last_of(spans, "warm_up"), peak.end
    if start is None or warm_up is None or warm_up.error or warm_up.after is None:
        return _Late(None, None)
    end = warm_up.after
    grown = minus(minus(end.reserved_bytes, start.reserved_bytes), kv_cache_bytes)
    tensors = minus(minus(end.allocated_bytes, start.allocated_bytes), kv_cache_bytes)
    pools = minus(end.graph_pool_bytes, start.graph_pool_bytes or 0)
    if grown is not None and tensors is not None and pools is not None:
        # blocks of the default pool without a tensor are used by the next peak, those of graphs not
        grown = max(tensors, min(grown, tensors + pools))
    steady, workspace = end.non_torch_bytes, end.npu_workspace_bytes
    if steady is None:
        return _Late(None if grown is None else max(0, grown), None)
    if workspace is not None and peak.workspace is not None:
        steady += max(0, peak.workspace - workspace)
    else:
        steady += peak.cleared
    return _Late(None if grown is None else max(0, grown), max(0, steady - peak.non_torch))


def _failed(spans: list[Span], kv_cache_bytes: int, oom: Oom | None) -> int | None:
    """Return what an allocation that failed beside the KV cache would have held with it, bytes."""
    stands = first_of(spans, "kv_cache_alloc")
    if oom is None or oom.requested_bytes is None or stands is None or stands.after is None:
        return None
    used = minus(oom.device_total_bytes, oom.free_bytes)
    return None if used is None else used + oom.requested_bytes - kv_cache_bytes


def _later(spans: list[Span], total: int | None, kv_cache_bytes: int) -> int | None:
    """Return the most that was held beside the KV cache once it stood, bytes."""
    stands = first_of(spans, "kv_cache_alloc")
    if stands is None or stands.after is None:
        return None
    sizes = [_in_use(stands.after, total)]
    for span in spans:
        if span.order > stands.order:
            sizes += [_in_use(edge.snapshot, total) for edge in span.edges]
            sizes.append(_in_use_between(span))
    known = [size for size in sizes if size is not None]
    return max(known) - kv_cache_bytes if known else None


def _at_least(evidence: Evidence, kv_cache_bytes: int) -> int | None:
    """Return what is held at the peak when the allocator has released all that it can, bytes."""
    peak = evidence.figure("profile_after_allocated_peak_bytes")
    _, after, _ = evidence.profile_end()
    if peak is None or after is None or after.non_torch_bytes is None:
        return _engines_figures(evidence)
    held = peak + after.non_torch_bytes - (after.npu_workspace_bytes or 0)
    warm_up = last_of(evidence.spans, "warm_up")
    end = None if warm_up is None or warm_up.error else warm_up.after
    if end is None:
        return held
    if end.non_torch_bytes is not None and end.npu_workspace_bytes is not None:
        held = peak + end.non_torch_bytes - end.npu_workspace_bytes
    grown = minus(minus(end.allocated_bytes, after.allocated_bytes), kv_cache_bytes)
    return held + max(0, grown or 0)


def _engines_figures(evidence: Evidence) -> int | None:
    """Return the engine's figures added up: in use at the start, and all that it then measured."""
    weights = evidence.figure("weights_bytes")
    total, free = evidence.figure("device_total_bytes"), evidence.figure("initial_free_bytes")
    if weights is None or total is None or free is None:
        return None
    names = ("peak_activation_bytes", "non_torch_increase_bytes", "graph_bytes")
    return weights + total - free + sum(max(0, evidence.figure(name) or 0) for name in names)


def _peak_between(span: Span) -> int | None:
    """Return the reserved peak that fell within a phase, bytes; None where none did."""
    if span.before is None or span.after is None:
        return None
    low, high = span.before.reserved_run_peak_bytes, span.after.reserved_run_peak_bytes
    return high if low is not None and high is not None and high > low else None


def _in_use_between(span: Span) -> int | None:
    """Return the reserved peak within a phase and the non-torch memory that was there, bytes."""
    high = _peak_between(span)
    if high is None or span.before is None or span.after is None:
        return None
    both = (span.before, span.after)
    if any(each.non_torch_bytes is None or each.unmapped_bytes for each in both):
        return None
    # non-torch memory at that moment is not known; at least the lesser of both edges was there
    return high + min(each.non_torch_bytes or 0 for each in both)


def _in_use(snapshot: Snapshot, total: int | None) -> int | None:
    whole = snapshot.device_total_bytes if snapshot.device_total_bytes is not None else total
    if whole is not None and snapshot.device_free_bytes is not None:
        return whole - snapshot.device_free_bytes
    if snapshot.reserved_bytes is not None and snapshot.non_torch_bytes is not None:
        return snapshot.reserved_bytes + snapshot.non_torch_bytes
    return None
