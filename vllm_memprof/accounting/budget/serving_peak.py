"""What a rank holds beside its KV cache at the serving peak, and the KV cache that fits the device.

The readings of a rank enter, items in bytes leave. The serving peak is a step as large as the
profile run with everything in place that came after it (graph memory, pools first used in the
warm-up), or a later moment at which more was held. There is one definition: a plan, which stops
before the later items exist, has them as unknown, and what follows from it is estimated.
"""

from __future__ import annotations

from typing import NamedTuple

from vllm_memprof.accounting.model import Oom, Reading
from vllm_memprof.accounting.readings.quantities import QUANTITIES
from vllm_memprof.accounting.readings.startup import (
    ALLOCATED,
    Moments,
    ProfilePeak,
    growth,
    peak_between,
)
from vllm_memprof.engines.equation import Equation
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import (
    DERIVED,
    ESTIMATED,
    MEASURED,
    MODELLED,
    first_of,
    weakest,
)
from vllm_memprof.text import text
from vllm_memprof.units import (
    MIB,
    Amount,
    either,
    floor_zero,
    known_items,
    largest,
    minus,
    only_known,
    sum_or_none,
)

#: What engines leave free in the sizes that they suggest, because profiling "may slightly
#: underestimate non-torch allocations". (vllm-ascend 0.23.0, vllm_ascend/worker/worker.py::
#: NPUWorker.compile_or_warm_up_model; vLLM 0.33.0, vllm/v1/worker/gpu_worker.py)
MARGIN_BYTES = 150 * MIB
#: What a suggested size is to fit into -> the figure that it is less of; where a log has it, exact,
#: and rounded.
_LIMITS = {
    "request": (
        "requested_bytes",
        ("suggested_requested_bytes", "suggested_requested_printed_bytes"),
    ),
    "device": ("initial_free_bytes", ("suggested_limit_bytes", "suggested_limit_printed_bytes")),
}
#: Of the activation peak, what serving may hold beyond the profile run: that step runs without
#: attention over a KV cache. ``scripts/verdict_cases.py`` has driven engines that held up to a
#: fifth of it more.
UNPROFILED_SHARE = 0.25


def unprofiled(peak_activation_bytes: Amount) -> int:
    """Return what serving may hold beyond the profile run, bytes: a margin, not a reading.

    At least what vLLM and vllm-ascend keep free in the sizes that they suggest.
    """
    return max(MARGIN_BYTES, int((peak_activation_bytes or 0) * UNPROFILED_SHARE))


class ServingPeak(NamedTuple):
    """What a rank holds beside its KV cache, bytes; None where it is unknown."""

    items: list[Reading]
    #: Sum of the known items: every block stays reserved. None where the profile run is unknown.
    held_bytes: Amount
    #: What no release of unallocated blocks and workspace gives back; a part may be missing.
    at_least_bytes: Amount
    how: str  # held_bytes; estimated where an item is unknown


def serving_peak(of: Moments, kv_cache_bytes: Amount, oom: Oom | None = None) -> ServingPeak:
    """Find what is held beside the KV cache at the serving peak.

    Args:
        of: the readings of one rank.
        kv_cache_bytes: that the rank serves with, None where none was granted.
        oom: an allocation that failed; one that failed beside the KV cache counts as held.
    """
    if kv_cache_bytes is None:
        return ServingPeak([], None, None, DERIVED)
    stands, failed = first_of(of.spans, "kv_cache_alloc"), None
    if oom is not None and stands is not None and stands.after is not None:
        # what an allocation that failed beside the KV cache would have held with it
        failed = minus(oom.used_bytes, minus(kv_cache_bytes, oom.requested_bytes))
    later = largest([_later(of, kv_cache_bytes), failed])
    if of.figure("profiled_bytes") is not None:  # an engine that runs no profile
        if of.nothing_later is not None or later is None:  # nothing was run once the KV cache stood
            return ServingPeak([], None, None, DERIVED)
        # a step larger than those that were run holds more: an estimate from below
        where = text(
            "the worst reading after kv_cache_alloc; this engine runs no step of full size"
        )
        whole = QUANTITIES["held_at_worst"].named(Reading(later, ESTIMATED, where))
        return ServingPeak([whole], later, None, ESTIMATED)
    peak, least = of.profile_peak, _at_least(of, kv_cache_bytes)
    allocated = of.figure("profile_after_allocated_peak_bytes")
    # a reading below what tensors held was not taken at the peak: what was reserved is not known
    if peak is None or (allocated is not None and peak.reserved < allocated):
        return ServingPeak([], None, least, DERIVED)
    non_torch, over = (MODELLED, MODELLED) if of.simulated else (MEASURED, DERIVED)
    late_torch, late_device = _late(of, peak, kv_cache_bytes)
    worst, most = text("the worst reading of profile_run"), text("most at a reading of profile_run")
    end = text("after warm_up")
    missing = of.nothing_later or text("the run did not get through its warm-up")
    held = {
        "reserved_peak": Reading(peak.reserved, MEASURED, worst),
        "non_torch_peak": Reading(peak.non_torch, non_torch, most),
        "late_torch": Reading(late_torch, DERIVED, end, missing),
        "late_device": Reading(late_device, over, end, missing),
    }
    graph = of.figure("graph_bytes")
    if late_torch is None and late_device is None and graph is not None:
        where = text("the engine's figure for its graph capture")
        held["graph"] = Reading(max(0, graph), non_torch, where)
    total = sum(only_known(each.bytes for each in held.values()))
    if later is not None and later > total:
        where = text("the worst reading after kv_cache_alloc")
        held["held_later"] = Reading(later - total, non_torch, where)
        total = later
    hows = [ESTIMATED if each.bytes is None else each.how for each in held.values()]
    items = [QUANTITIES[name].named(reading) for name, reading in held.items()]
    # the allocator has released all that it can before it fails
    return ServingPeak(items, total, largest([least, failed]), weakest(hows))


def _late(of: Moments, peak: ProfilePeak, kv_cache_bytes: int) -> tuple[Amount, Amount]:
    """Return what came after the profile run and stays, bytes, over its peak: torch, non-torch."""
    end, start = of.end_of("warm_up"), peak.end
    if start is None or end is None:
        return None, None
    torch = minus(growth(start, end, "reserved_bytes"), kv_cache_bytes)
    tensors = minus(growth(start, end, ALLOCATED), kv_cache_bytes)
    pools = minus(end.graph_pool_bytes, start.graph_pool_bytes or 0)
    if torch is not None and tensors is not None and pools is not None:
        # blocks of the default pool without a tensor are used by the next peak, those of graphs not
        torch = max(tensors, min(torch, tensors + pools))
    # the next peak takes the operator workspace again
    again = minus(peak.workspace, end.npu_workspace_bytes)
    again = peak.cleared if again is None else max(0, again)
    device = minus(end.non_torch_bytes, peak.non_torch - again)
    return floor_zero(torch), floor_zero(device)


def _later(of: Moments, kv_cache_bytes: int) -> Amount:
    """Return the most that was held beside the KV cache once it stood, bytes."""
    stands, total = first_of(of.spans, "kv_cache_alloc"), of.figure("device_total_bytes")
    if stands is None or stands.after is None:
        return None

    def in_use(at: Snapshot) -> Amount:
        used = minus(either(at.device_total_bytes, total), at.device_free_bytes)
        return either(used, sum_or_none([at.reserved_bytes, at.non_torch_bytes]))

    sizes = [in_use(stands.after)]
    for span in of.spans:
        if span.order > stands.order:
            edges = [edge.snapshot for edge in span.edges]
            sizes += map(in_use, edges)
            # the reserved peak within the phase, and the non-torch memory that was there: at least
            # the lesser of both edges; at that moment it is not known
            outside = [edge.non_torch_bytes for edge in edges]
            high = peak_between(span)
            mapped = not any(edge.unmapped_bytes for edge in edges)
            if mapped and high is not None and None not in outside:
                sizes.append(high + min(size or 0 for size in outside))
    return minus(largest(sizes), kv_cache_bytes)


def _at_least(of: Moments, kv_cache_bytes: int) -> Amount:
    """Return what is held at the peak when the allocator has released all that it can, bytes."""
    peak, after = of.figure("profile_after_allocated_peak_bytes"), of.moments["profiled"].nearest
    if peak is None or after is None or after.non_torch_bytes is None:
        # the engine's figures: in use at the start, and all that it then measured
        used = minus(of.figure("device_total_bytes"), of.figure("initial_free_bytes"))
        names = ("peak_activation_bytes", "non_torch_increase_bytes", "graph_bytes")
        later = sum(max(0, of.figure(name) or 0) for name in names)
        return sum_or_none([of.figure("weights_bytes"), used, later])
    held = peak + after.non_torch_bytes - (after.npu_workspace_bytes or 0)
    end = of.end_of("warm_up")
    if end is None:
        return held
    outside = minus(end.non_torch_bytes, end.npu_workspace_bytes)
    grown = minus(growth(after, end, ALLOCATED), kv_cache_bytes)
    return (held if outside is None else peak + outside) + max(0, grown or 0)


def suggested(equation: Equation | None, of: Moments, eager: bool) -> dict[str, int]:
    """Return the sizes that the engine suggests, by what they are to fit into.

    Those that a log holds; else, of a start that got so far, computed as the engine does, from its
    own figures; nothing where its release prints none, where a fixed size replaced the equation, or
    where a figure is unknown.

    Args:
        equation: of the engine.
        of: the readings of a rank.
        eager: no graphs are captured, and the engine takes 0 for them.
    """
    printed = {
        limit: either(*(of.figure(name) for name in names)) for limit, (_, names) in _LIMITS.items()
    }
    found = known_items(printed)
    if found or equation is None or not equation.suggests or of.last("warm_up") is None:
        return found
    names = ("weights_bytes", "peak_activation_bytes", "non_torch_increase_bytes")
    graphs = 0 if eager else of.figure("graph_bytes")
    taken = sum_or_none([graphs, *(of.figure(name) for name in names)])
    if taken is None or of.figure("kv_cache_memory_bytes_arg") is not None:
        return {}
    left = {
        limit: minus(of.figure(name), taken + MARGIN_BYTES) for limit, (name, _) in _LIMITS.items()
    }
    return known_items(left)
