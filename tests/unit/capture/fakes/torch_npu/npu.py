"""Stand-in for torch_npu.npu."""

from __future__ import annotations

from typing import Any

from . import _C

initialized = False
capturing = False


def is_initialized() -> bool:
    return initialized


def is_current_stream_capturing() -> bool:
    return capturing


def mem_get_info(device: int) -> tuple[int, int]:
    assert initialized, "a reading initialised the device"
    assert not capturing, "a device reading while capturing"
    return _C.free(), _C.TOTAL


def memory_snapshot() -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = _C._npu_memorySnapshot()["segments"]
    return segments


def get_device_name(device: int) -> str:
    return "FakeNPU"


def empty_cache() -> None:
    _C._npu_emptyCache()


def reset_peak_memory_stats() -> None:
    _C._npu_resetPeakMemoryStats(0)
