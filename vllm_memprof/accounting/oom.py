"""The allocation that failed: the engine's message, completed by readings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllm_memprof.accounting.forensics import divide_free
from vllm_memprof.accounting.model import DERIVED, MEASURED, ComponentRow, Oom
from vllm_memprof.accounting.owners import EdgeTime
from vllm_memprof.accounting.torch_owners import divide_allocated, torch_owners
from vllm_memprof.record.codec import from_json
from vllm_memprof.record.failures import StepItem, StepReading, StepRequest, stage_of
from vllm_memprof.record.loader import ProcessRecord
from vllm_memprof.record.oom_files import Counters
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span, ancestors, first_of, last_of
from vllm_memprof.units import minus


def failed_allocation(process: ProcessRecord, counters: Mapping[int, Counters]) -> Oom | None:
    """Return the allocation that failed; what the engine's message says comes before readings.

    Args:
        process: one worker.
        counters: of the runtime at the failure, by device index, as torch_npu wrote them.
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
    index = process.identity.device_index
    failure = next((each for each in process.failures if each.oom == span.id), None)
    moment = span.detail.get("moment")
    requests = _step_at(moment) if failure is None else failure.requests
    chain = [] if failure is None else failure.chain
    stage = span.string("stage")
    if stage is None:
        stage = stage_of(chain, any(request.items for request in requests or []))
    if stage is None and isinstance(moment, Mapping):
        stage = moment.get("stage")
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
        phase=_phase(process, span, around, requests),
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
        at_request=span.integer("at_request"),
        request_count=span.integer("request_count"),
        input=span.string("input"),
        readings=[from_json(StepReading, each) for each in _list(span, "readings")],
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


def _list(span: Span, name: str) -> list[object]:
    value = span.detail.get(name)
    return value if isinstance(value, list) else []


def _phase(
    process: ProcessRecord,
    span: Span,
    around: list[str],
    requests: list[StepRequest] | None,
) -> str | None:
    """Return the innermost phase of a failure; after the warm-up it is a request."""
    if around or span.string("phase") is not None:
        return around[0] if around else span.string("phase")
    warm = last_of(process.phases, "warm_up")
    served = warm is not None and warm.after is not None and warm.error is None
    return "request" if requests or (served) else None


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
        at = EdgeTime(snapshot.t_ns or 0, span.order, "before")
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
    if span is not None and span.error is None and span.before is not None and span.after:
        grown = minus(span.after.allocated_bytes, span.before.allocated_bytes)
        if grown is not None:
            return grown
    size = None if figure is None else process.figures.get(figure)
    return None if size is None else int(size)
