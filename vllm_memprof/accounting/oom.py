"""The allocation that failed: the engine's message, completed by readings."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_memprof.accounting.model import Oom
from vllm_memprof.record.loader import ProcessRecord
from vllm_memprof.record.oom_files import Counters
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import first_of
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
        other_bytes=minus(minus(total, free), reserved),
        # the csv of torch_npu is rounded
        components=counters.get(-1 if index is None else index)
        if snapshot.components is None
        else snapshot.components,
    )
