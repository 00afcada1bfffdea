"""The C functions that memprof reads or wraps, over one global account."""

from __future__ import annotations

from typing import Any

TOTAL = 1000
allocated = reserved = 0
allocated_peak = reserved_peak = 0
handed_out = 0
workspace = 0
unmapped = 0  # counted by the allocator, not on the device
other = 10  # runtime context
observers: list[Any] = []
listings: list[int] = []  # bytes reserved whenever the segments were listed
forbidden: list[str] = []  # whatever an observer must not do


def allocate(size: int, cached: int = 0) -> None:
    global allocated, reserved, allocated_peak, reserved_peak, handed_out
    allocated += size
    handed_out += size
    reserved = max(reserved, allocated + cached)
    allocated_peak, reserved_peak = max(allocated_peak, allocated), max(reserved_peak, reserved)


def release(size: int) -> None:
    global allocated
    allocated -= size


def free() -> int:
    return TOTAL - reserved + unmapped - workspace - other


def _npu_getDevice() -> int:
    return 0


def _npu_memoryStats(device: int) -> dict[str, Any]:
    return {
        "allocated_bytes": {
            "all": {"current": allocated, "peak": allocated_peak, "allocated": handed_out}
        },
        "reserved_bytes": {"all": {"current": reserved, "peak": reserved_peak}},
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _npu_memorySnapshot() -> dict[str, Any]:
    listings.append(reserved)
    blocks = [
        {"size": allocated, "state": "active_allocated"},
        {"size": reserved - allocated, "state": "inactive"},
    ]
    return {
        "segments": [
            {"device": 0, "total_size": reserved, "blocks": blocks},
            {"device": 0, "total_size": workspace, "blocks": []},
        ]
    }


def _npu_emptyCache() -> None:
    global reserved, workspace
    reserved, workspace = allocated, 0


def _npu_resetPeakMemoryStats(device: int) -> None:
    global allocated_peak, reserved_peak
    allocated_peak, reserved_peak = allocated, reserved


def _npu_attach_out_of_memory_observer(callback: Any) -> None:
    observers.append(callback)
