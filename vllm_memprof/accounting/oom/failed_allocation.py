"""The allocation that failed: the engine's message, completed by readings.

Besides: the phases that it failed in, and the allocator's free memory divided into blocks that were
large enough, too small, and out of reach.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_memprof.accounting.model import FreeBlocks, Oom, RankReport
from vllm_memprof.accounting.owners.in_torch import divide_allocated, torch_owners
from vllm_memprof.accounting.owners.outside_torch import EdgeTime
from vllm_memprof.accounting.readings.startup import grown_by
from vllm_memprof.record.codec import from_json
from vllm_memprof.record.failures import (
    PROFILE,
    Failure,
    Item,
    Pool,
    StepReading,
    StepRequest,
    stage_of,
)
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import (
    BEFORE,
    DERIVED,
    MEASURED,
    ComponentRow,
    Span,
    ancestors,
    first_of,
    last_of,
)
from vllm_memprof.text import sentences
from vllm_memprof.units import GIB, Amount, either, format_gib, minus

#: What the allocator asks the device for on behalf of a small request (up to 1 MiB, which is
#: served from pools of its own): kSmallBuffer.
#: (torch, CUDACachingAllocator.cpp, and torch_npu, NPUCachingAllocator.cpp)
_SMALL_SEGMENT_BYTES = 2 << 20
HELD, BEING_ALLOCATED, NOT_YET = "held", "being_allocated", "not_yet"
_ALLOCATION = "kv_cache_alloc"
_BEFORE = {"device_init", "hccl_init", "weight_load", "mm_profile", "profile_run", "kv_cache_plan"}
_AFTER = {
    "graph_capture",
    "warm_up",
    "atb_warm_up",
    "kernel_warm_up",
    "request",
    "sleep",
    "wake_up",
}
#: Of a log: a line of these phases precedes the message.
_AFTER_IN_A_LOG = ("graph_capture", "warm_up")


def failed_allocation(run: Run, process: ProcessRecord) -> Oom | None:
    """Return the allocation that failed; what the engine's message says comes before readings.

    Args:
        run: with the runtime's counters at the failure, by device index, as torch_npu wrote them.
        process: one worker.
    """
    span = first_of(process.phases, "oom")
    if span is None:
        return None
    snapshot = span.after or span.before or Snapshot(t_ns=0)
    detail: Mapping[str, Any] = span.detail
    counters, index = run.oom_counters, process.identity.device_index
    failures = (each for each in process.failures if each.oom == span.id)
    failure = next(failures, Failure("", requests=_step_at(detail.get("moment"))))

    def told(name: str, read: int | None = None) -> int | None:
        return either(span.integer(name), read)

    total, asked = told("device_total_bytes"), told("requested_bytes")
    allocated = told("allocated_bytes", snapshot.allocated_bytes)
    reserved = told("reserved_bytes", snapshot.reserved_bytes)
    # the allocator's own figure at the failure is nearer to it than a reading after it
    free = told("free_bytes", told("device_free_bytes", snapshot.device_free_bytes))
    if free is None:
        free = minus(minus(total, reserved), told("non_torch_bytes"))
    used, process_bytes = minus(total, free), told("process_bytes")
    # where only the peak of allocated memory is known, at least this much of the segments was free
    held = told("allocated_peak_bytes") if allocated is None else allocated
    # as the log tells it, the call chain, or the sampler
    multimodal = any(request.items for request in failure.requests or [])
    stage = detail.get("stage") or stage_of(failure.chain, multimodal)
    stage = stage or (detail.get("moment") or {}).get("stage")
    phase = next((each.phase for each in ancestors(process.phases, span)), span.string("phase"))
    warm = last_of(process.phases, "warm_up")
    served = warm is not None and warm.after is not None and warm.error is None
    if phase is None and (failure.requests or served):  # after the warm-up it is a request
        phase = "request"
    # which request it was, counted from 1 in the order in which they began; of several in the step
    # the first with encoded items
    begun = [record.id for each in run.whole.processes for record in each.served.requests]
    step = failure.requests or []
    encoded = [each for each in step if any(item.encoded for item in each.items)]
    first = next(iter(encoded or (step if len(step) == 1 else [])), None)
    in_turn = begun.index(first.id) + 1 if first is not None and first.id in begun else None
    asked_by = "npu_workspace" if detail.get("npu_workspace") else None
    if asked_by is None and detail.get("outside_torch"):
        asked_by = "runtime"
    oom = Oom(
        requested_bytes=asked,
        device_total_bytes=total,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        free_bytes=free,
        active_bytes=told("active_bytes"),
        device=span.string("device"),
        fragmentation_bytes=minus(reserved, held),
        other_bytes=minus(used, reserved),
        process_bytes=process_bytes,
        process_non_torch_bytes=minus(process_bytes, reserved),
        other_processes_bytes=minus(used, process_bytes),
        graph_pools_bytes=told("graph_pools_bytes"),
        asked_by=asked_by,
        phase=phase,
        last_phase=span.string("last_stage"),
        # the csv of torch_npu is rounded
        components=snapshot.components or counters.get(-1 if index is None else index),
        requested_half_unit_bytes=told("requested_half_unit_bytes") or 0,
        stage=stage,
        site=failure.site or span.string("site"),
        chain=failure.chain,
        requests=failure.requests,
        at_request=told("at_request") or in_turn,
        request_count=told("request_count"),
        input=span.string("input"),
        readings=[from_json(StepReading, each) for each in detail.get("readings") or []],
        free_blocks=divide_free(failure.pools or [], asked, allocated, reserved),
        allocator_settings=failure.allocator_settings,
    )
    return replace(oom, owners=_owners(process, span, oom, failure.snapshot or Snapshot(t_ns=0)))


def _step_at(moment: Any) -> list[StepRequest] | None:
    """Return the requests of the step that was under way, as the sampler noted them."""
    if moment is None:
        return None
    items: dict[str, list[Item]] = {}
    for item in moment.get("items") or []:
        told = {**item, "encoded": True}
        items.setdefault(str(item.get("request")), []).append(from_json(Item, told))
    return [
        StepRequest(str(name), tokens, None, items.get(str(name), []))
        for name, tokens in moment.get("requests") or []
    ]


def _owners(process: ProcessRecord, span: Span, oom: Oom, after: Snapshot) -> list[ComponentRow]:
    """Divide the device at the failure, as far as the figures go; see ``Oom.owners``.

    What the start-up phases hold is a part of what was allocated, and left out where it would be
    more than it, being figures of another moment.

    Args:
        process: the worker.
        span: of the failure.
        oom: the failed allocation.
        after: the reading after the failure, which has the owners outside torch.
    """
    at, allocated = span.after or span.before, oom.allocated_bytes
    divided: list[ComponentRow] = []
    if at is not None:
        edge = EdgeTime(at.t_ns or 0, span.order, BEFORE)
        divided = divide_allocated(torch_owners(process.phases), allocated, edge)
    sizes = {row.component: row.bytes for row in divided if row.bytes}
    loaded, planned = (last_of(process.phases, name) for name in ("weight_load", "kv_cache_alloc"))
    # the connector's phase lies in the other's
    kv_cache = None if planned is None else grown_by(planned)
    kv_cache = minus(kv_cache, sizes.get("kv_connector") or 0)
    weights: float | None = None if loaded is None else grown_by(loaded)
    if weights is None:
        weights = process.figures.get("weights_bytes")
    if sizes.keys() & {"target_weights", "draft_weights", "lora"}:
        weights = None
    parts = [
        ComponentRow(name, int(size), MEASURED, part_of="allocated")
        for name, size in (("weights", weights), ("kv_cache", kv_cache))
        if size
    ] + [replace(row, source="") for row in divided if row.bytes]
    rest = None if allocated is None else allocated - sum(part.bytes or 0 for part in parts)
    if not parts or rest is None or rest < 0:
        parts = []
    else:
        parts.append(ComponentRow("other_tensors", rest, DERIVED, part_of="allocated"))
    # a message may give the peak alone
    peak = minus(oom.reserved_bytes, oom.fragmentation_bytes)
    workspace = after.npu_workspace_bytes
    others = either(oom.other_processes_bytes, after.other_processes_bytes)
    outside = minus(minus(oom.other_bytes, workspace or 0), others or 0)
    rows = [
        ComponentRow("allocated_peak", peak, MEASURED)
        if allocated is None
        else ComponentRow("allocated", allocated, MEASURED),
        *parts,
        ComponentRow("reserved_not_allocated", oom.fragmentation_bytes, DERIVED),
        ComponentRow("npu_workspace", workspace or None, MEASURED),
        ComponentRow("outside_allocator" if others is None else "outside_torch", outside, DERIVED),
        ComponentRow("other_processes", others, MEASURED),
        ComponentRow("free", oom.free_bytes, MEASURED),
    ]
    optional = ("npu_workspace", "other_processes")
    return [row for row in rows if row.bytes is not None or row.component not in optional]


def phases_of(rank: RankReport, oom: Oom) -> list[str]:
    """Return the phases in which it failed, the innermost first; the message's where none was
    recorded."""
    failure = first_of(rank.phases, "oom")
    around = [] if failure is None else [each.phase for each in ancestors(rank.phases, failure)]
    return around or ([] if oom.phase is None else [oom.phase])


def kv_cache_state(rank: RankReport, oom: Oom) -> str | None:
    """Return `HELD`, `BEING_ALLOCATED` or `NOT_YET` for the KV cache at the failure.

    None: nothing tells.
    """
    phases = set(phases_of(rank, oom))
    allocations = [each for each in rank.phases if each.phase == _ALLOCATION]
    done = _ALLOCATION not in phases and any(each.error is None for each in allocations)
    if done or phases & _AFTER:
        return HELD
    if _ALLOCATION in phases or allocations:
        return BEING_ALLOCATED
    if oom.last_phase in _AFTER_IN_A_LOG:
        return HELD
    return NOT_YET if phases & _BEFORE else None


def divide_free(
    pools: list[Pool],
    requested: Amount,
    allocated: Amount,
    reserved: Amount,
) -> FreeBlocks | None:
    """Divide the free memory of the allocator's segments by whether it could have been used.

    Nothing tells the stream that asked. It is taken to be the one with the most allocated memory.

    Args:
        pools: as they were read after the failure.
        requested: bytes of the segment that the allocator asked the device for.
        allocated: bytes, at the failure.
        reserved: bytes, at the failure.

    Returns:
        None where there is no segment.
    """
    held: Counter[str] = Counter()
    for pool in pools:
        if not pool.private:
            held[pool.stream] += pool.allocated_bytes
    if not held:
        return None
    small = requested is not None and requested <= _SMALL_SEGMENT_BYTES
    stream = max(held, key=held.__getitem__)
    asked = [
        pool for pool in pools if (pool.private, pool.small, pool.stream) == (False, small, stream)
    ]
    free: Counter[str] = Counter()
    for pool in pools:
        other = "pools" if pool.small != small else "streams"
        free["graphs" if pool.private else "asked" if pool in asked else other] += pool.free_bytes
    fitting = None if requested is None else sum(pool.fitting_bytes or 0 for pool in asked)
    freed = minus(allocated, sum(pool.allocated_bytes for pool in pools))
    return FreeBlocks(
        stream=stream,
        streams=len(held),
        small=small,
        expandable=any(pool.expandable for pool in asked),
        exact=freed == 0 and reserved == sum(pool.total_bytes for pool in pools),
        freed_bytes=freed,
        largest_bytes=max((pool.largest_free_bytes for pool in asked), default=0),
        fitting_bytes=fitting,
        too_small_bytes=minus(free["asked"], fitting),
        other_streams_bytes=free["streams"],
        other_pools_bytes=free["pools"],
        graph_pools_bytes=free["graphs"],
        pending_bytes=sum(pool.pending_bytes for pool in pools),
    )


def images_of(oom: Oom) -> list[tuple[int, int]]:
    """Return width and height of the images that the encoder got in the step, where known."""
    return [
        (item.size[0], item.size[1])
        for request in oom.requests or []
        for item in request.items
        if item.encoded and item.size is not None
    ]


def merge_not_profiled(oom: Oom) -> str | None:
    """Return what a log notes of a merge of embeddings that its profile has none of; else None."""
    profiled = {each.stage for each in oom.readings if each.moment == PROFILE}
    served = [each for each in oom.readings if each.moment != PROFILE]
    merge = next((each for each in served if each.stage == "mm_merge"), None)
    if merge is None or not profiled or "mm_merge" in profiled:
        return None
    same = (each for each in served if each.moment == merge.moment)
    more = next((merge.bytes - each.bytes for each in same if each.stage == "mm_encoder"), None)
    return sentences(
        [
            "the merge of multimodal embeddings took {bytes:gib3} GiB for {moment}",
            "{more:gib3} GiB more than the encoder",
            "what the log notes of its profile has no merge",
        ],
        {**vars(merge), "more": more},
    )


def gib_of(rank: RankReport, size: Amount) -> str:
    """Return GiB with as many digits as are known: a log prints two, or MiB."""
    logged = "oom_requested_bytes" in rank.figures or "oom_reserved_bytes" in rank.figures
    return format_gib(size, 2 if logged and size is not None and abs(size) >= GIB else 4)
