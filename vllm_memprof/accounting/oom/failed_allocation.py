"""The allocation that failed: the engine's message, completed by readings.

Besides: the phases that it failed in, and the allocator's free memory divided into blocks that were
large enough, too small, and out of reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllm_memprof.accounting.model import (
    DERIVED,
    MEASURED,
    ComponentRow,
    FreeBlocks,
    Oom,
    RankReport,
)
from vllm_memprof.accounting.owners.in_torch import divide_allocated, torch_owners
from vllm_memprof.accounting.owners.outside_torch import EdgeTime
from vllm_memprof.accounting.readings.startup import grown_by
from vllm_memprof.record.codec import from_json
from vllm_memprof.record.failures import PROFILE, Pool, StepItem, StepReading, StepRequest, stage_of
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import BEFORE, ancestors, first_of, last_of
from vllm_memprof.text import Text, text
from vllm_memprof.units import GIB, format_gib, minus

#: What the allocator asks the device for on behalf of a small request (up to 1 MiB, which is
#: served from pools of its own): kSmallBuffer.
#: (torch, CUDACachingAllocator.cpp, and torch_npu, NPUCachingAllocator.cpp)
_SMALL_SEGMENT_BYTES = 2 << 20
#: Part of a step -> what it is.
STAGE_TITLES = {
    "mm_encoder": text("multimodal encoder"),
    "mm_merge": text("merge of multimodal embeddings"),
    "mm_gather": text("gathering of encoder outputs"),
    "mm_cache_insert": text("encoder outputs into the encoder cache"),
    "mm_cache_evict": text("encoder outputs out of the encoder cache"),
    "embedding": text("token embeddings"),
    "model_forward": text("language model"),
    "logits": text("logits"),
    "sampling": text("sampling"),
}
HELD, BEING_ALLOCATED, NOT_YET = "held", "being_allocated", "not_yet"
_ALLOCATION = "kv_cache_alloc"
_BEFORE = ("device_init", "hccl_init", "weight_load", "mm_profile", "profile_run", "kv_cache_plan")
_AFTER = (
    "graph_capture",
    "warm_up",
    "atb_warm_up",
    "kernel_warm_up",
    "request",
    "sleep",
    "wake_up",
)
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

    def told(name: str, read: int | None = None) -> int | None:
        value = span.integer(name)
        return read if value is None else value

    total = told("device_total_bytes")
    allocated = told("allocated_bytes", snapshot.allocated_bytes)
    reserved = told("reserved_bytes", snapshot.reserved_bytes)
    # the allocator's own figure at the failure is nearer to it than a reading after it
    free = told("free_bytes", told("device_free_bytes", snapshot.device_free_bytes))
    if free is None:
        free = minus(minus(total, reserved), span.integer("non_torch_bytes"))
    process_bytes = span.integer("process_bytes")
    used = minus(total, free)
    asked_by = None
    if span.detail.get("npu_workspace"):
        asked_by = "npu_workspace"
    elif span.detail.get("outside_torch"):
        asked_by = "runtime"
    around = [each.phase for each in ancestors(process.phases, span)]
    # where only the peak of allocated memory is known, at least this much of the segments was free
    held = told("allocated_peak_bytes") if allocated is None else allocated
    counters, index = run.oom_counters, process.identity.device_index
    failure = next((each for each in process.failures if each.oom == span.id), None)
    moment = span.detail.get("moment")
    requests = _step_at(moment) if failure is None else failure.requests
    # in the order in which requests began; of several in the step the first with encoded items
    begun = [record.id for each in run.whole.processes for record in each.served.requests]
    encoded = [each for each in requests or [] if any(item.encoded for item in each.items)]
    first = next(iter(encoded or (requests if len(requests or []) == 1 else None) or []), None)
    in_turn = begun.index(first.id) + 1 if first is not None and first.id in begun else None
    chain = [] if failure is None else failure.chain
    stage = span.string("stage")
    if stage is None:
        stage = stage_of(chain, any(request.items for request in requests or []))
    if stage is None and isinstance(moment, Mapping):
        stage = moment.get("stage")
    phase = around[0] if around else span.string("phase")
    warm = last_of(process.phases, "warm_up")
    served = warm is not None and warm.after is not None and warm.error is None
    if phase is None and (requests or served):  # after the warm-up it is a request
        phase = "request"
    readings = span.detail.get("readings")
    readings = readings if isinstance(readings, list) else []
    blocks = None
    if failure is not None and failure.pools:
        asked = told("requested_bytes")
        blocks = divide_free(failure.pools, asked, allocated, reserved)
    oom = Oom(
        requested_bytes=told("requested_bytes"),
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
        graph_pools_bytes=span.integer("graph_pools_bytes"),
        asked_by=asked_by,
        phase=phase,
        last_phase=span.string("last_stage"),
        # the csv of torch_npu is rounded
        components=counters.get(-1 if index is None else index)
        if snapshot.components is None
        else snapshot.components,
        requested_half_unit_bytes=span.integer("requested_half_unit_bytes") or 0,
        stage=stage,
        site=span.string("site") if failure is None else failure.site,
        chain=chain,
        requests=requests,
        at_request=span.integer("at_request") or in_turn,
        request_count=span.integer("request_count"),
        input=span.string("input"),
        readings=[from_json(StepReading, each) for each in readings],
        free_blocks=blocks,
        allocator_settings=None if failure is None else failure.allocator_settings,
    )
    return replace(oom, owners=_owners(process, oom, None if failure is None else failure.snapshot))


def _step_at(moment: object) -> list[StepRequest] | None:
    """Return the requests of the step that was under way, as the sampler noted them."""
    if not isinstance(moment, Mapping):
        return None
    items: dict[str, list[StepItem]] = {}
    for item in moment.get("items") or []:
        told = {**item, "encoded": True}
        items.setdefault(str(item.get("request")), []).append(from_json(StepItem, told))
    return [
        StepRequest(str(name), tokens, None, items.get(str(name), []))
        for name, tokens in moment.get("requests") or []
    ]


def _owners(process: ProcessRecord, oom: Oom, after: Snapshot | None) -> list[ComponentRow]:
    """Divide the device at the failure, as far as the figures go; see ``Oom.owners``.

    Weights and KV cache are parts of what was allocated: what their phases added to it. They are
    left out where they would be more than it, being figures of another moment.

    Args:
        process: the worker.
        oom: its failed allocation.
        after: the reading after the failure, which has the owners outside torch.
    """
    allocated = ComponentRow("allocated", oom.allocated_bytes, MEASURED)
    if oom.allocated_bytes is None:  # a message that gives the peak alone
        peak = minus(oom.reserved_bytes, oom.fragmentation_bytes)
        allocated = ComponentRow("allocated_peak", peak, MEASURED)
    rows = [
        allocated,
        ComponentRow("reserved_not_allocated", oom.fragmentation_bytes, DERIVED),
    ]
    parts = _of_allocated(process, oom.allocated_bytes)
    known = sum(part.bytes or 0 for part in parts)
    if oom.allocated_bytes is not None and parts and known <= oom.allocated_bytes:
        rest = oom.allocated_bytes - known
        rows[1:1] = [*parts, ComponentRow("other_tensors", rest, DERIVED, part_of="allocated")]
    workspace = None if after is None else after.npu_workspace_bytes
    others = oom.other_processes_bytes
    if others is None and after is not None:
        others = after.other_processes_bytes
    outside = minus(minus(oom.other_bytes, workspace or 0), others or 0)
    if workspace:
        rows.append(ComponentRow("npu_workspace", workspace, MEASURED))
    name = "outside_allocator" if others is None else "outside_torch"
    rows.append(ComponentRow(name, outside, DERIVED))
    if others is not None:
        rows.append(ComponentRow("other_processes", others, MEASURED))
    rows.append(ComponentRow("free", oom.free_bytes, MEASURED))
    return rows


def _of_allocated(process: ProcessRecord, allocated: int | None) -> list[ComponentRow]:
    """Return what start-up phases hold of ``allocated``, each with its own owners apart."""
    span = first_of(process.phases, "oom")
    snapshot = None if span is None else span.after or span.before
    if span is None or snapshot is None:
        divided = []
    else:
        at = EdgeTime(snapshot.t_ns or 0, span.order, BEFORE)
        rows = divide_allocated(torch_owners(process.phases), allocated, at)
        divided = [row for row in rows if row.bytes]
    kv_cache = _added(process, "kv_cache_alloc", None)
    for row in divided:
        if row.component == "kv_connector":  # its phase lies in the other's
            kv_cache = minus(kv_cache, row.bytes)
    loaded = any(row.component in ("target_weights", "draft_weights", "lora") for row in divided)
    weights = None if loaded else _added(process, "weight_load", "weights_bytes")
    parts = [
        ComponentRow(name, size, MEASURED, part_of="allocated")
        for name, size in (("weights", weights), ("kv_cache", kv_cache))
        if size
    ]
    return [*parts, *(replace(row, source="") for row in divided)]


def _added(process: ProcessRecord, phase: str, figure: str | None) -> int | None:
    """Return what a phase that came to its end has left allocated, or the engine's figure of it."""
    span = last_of(process.phases, phase)
    size: float | None = None if span is None else grown_by(span)
    if size is None and figure is not None:
        size = process.figures.get(figure)
    return None if size is None else int(size)


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
    phases = phases_of(rank, oom)
    done = any(each.phase == _ALLOCATION and each.error is None for each in rank.phases)
    if (done and _ALLOCATION not in phases) or any(phase in _AFTER for phase in phases):
        return HELD
    if _ALLOCATION in phases or any(each.phase == _ALLOCATION for each in rank.phases):
        return BEING_ALLOCATED
    if oom.last_phase in _AFTER_IN_A_LOG:
        return HELD
    return NOT_YET if any(phase in _BEFORE for phase in phases) else None


def divide_free(
    pools: list[Pool],
    requested: int | None,
    allocated: int | None,
    reserved: int | None,
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
    common = [pool for pool in pools if not pool.private]
    if not common:
        return None
    small = requested is not None and requested <= _SMALL_SEGMENT_BYTES
    held: dict[str, int] = {}
    for pool in common:
        held[pool.stream] = held.get(pool.stream, 0) + pool.allocated_bytes
    stream = max(held, key=lambda name: held[name])
    same = [pool for pool in common if pool.small == small]
    asked = [pool for pool in same if pool.stream == stream]
    fitting = None if requested is None else sum(pool.fitting_bytes or 0 for pool in asked)
    free = _free(asked)
    left = sum(pool.allocated_bytes for pool in pools)
    held_now = sum(pool.total_bytes for pool in pools)
    freed = None if allocated is None else allocated - left
    return FreeBlocks(
        stream=stream,
        streams=len(held),
        small=small,
        expandable=any(pool.expandable for pool in asked),
        exact=freed == 0 and reserved == held_now,
        freed_bytes=freed,
        largest_bytes=max((pool.largest_free_bytes for pool in asked), default=0),
        fitting_bytes=fitting,
        too_small_bytes=None if fitting is None else free - fitting,
        other_streams_bytes=_free([pool for pool in same if pool.stream != stream]),
        other_pools_bytes=_free([pool for pool in common if pool.small != small]),
        graph_pools_bytes=_free([pool for pool in pools if pool.private]),
        pending_bytes=sum(pool.pending_bytes for pool in pools),
    )


def _free(pools: list[Pool]) -> int:
    return sum(pool.free_bytes for pool in pools)


def images_of(oom: Oom) -> list[tuple[int, int]]:
    """Return width and height of the images that the encoder got in the step, where known."""
    return [
        (item.size[0], item.size[1])
        for request in oom.requests or []
        for item in request.items
        if item.encoded and item.size is not None
    ]


def merge_not_profiled(oom: Oom) -> Text | None:
    """Return what a log notes of a merge of embeddings that its profile has none of; else None."""
    profiled = {each.stage for each in oom.readings if each.moment == PROFILE}
    served = [each for each in oom.readings if each.moment != PROFILE]
    merge = next((each for each in served if each.stage == "mm_merge"), None)
    if merge is None or not profiled or "mm_merge" in profiled:
        return None
    encoder = next(
        (each for each in served if (each.moment, each.stage) == (merge.moment, "mm_encoder")),
        None,
    )
    took = text(
        "the merge of multimodal embeddings took {size} GiB for {moment}",
        size=format_gib(merge.bytes, 3),
        moment=merge.moment,
    )
    if encoder is not None:
        took = text(
            "{took}, {more} GiB more than the encoder",
            took=took,
            more=format_gib(merge.bytes - encoder.bytes, 3),
        )
    return text("{took}; what the log notes of its profile has no merge", took=took)


def gib_of(rank: RankReport, size: int | None) -> str:
    """Return GiB with as many digits as are known: a log prints two, or MiB."""
    logged = "oom_requested_bytes" in rank.figures or "oom_reserved_bytes" in rank.figures
    return format_gib(size, 2 if logged and size is not None and abs(size) >= GIB else 4)
