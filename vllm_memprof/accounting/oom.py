"""The allocation that failed: the engine's message, completed by readings."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_memprof.accounting.model import Oom
from vllm_memprof.record.loader import ProcessRecord
from vllm_memprof.record.oom_files import Counters
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import ancestors, first_of
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
    return Oom(
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
        phase=around[0] if around else span.string("phase"),
        last_phase=span.string("last_stage"),
        # the csv of torch_npu is rounded
        components=counters.get(-1 if index is None else index)
        if snapshot.components is None
        else snapshot.components,
    )
