"""The allocator's list of segments, divided into operator workspace by stream and graph pools.

torch_npu appends the blocks of its workspace allocator, one per stream, to the segments of the
caching allocator (``torch_npu/csrc/npu/Module.cpp::THNPModule_memorySnapshot``, 2.8 and 2.10);
``reserved_bytes`` does not count them. Nothing marks them, but the caching allocator's own come
first and are as large as what it says it has reserved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_memprof.capture.snapshot import SnapshotDict

_SUMS = ("total_bytes", "allocated_bytes", "pending_bytes",
         "free_bytes", "free_blocks", "largest_free_bytes")  # fmt: skip


def divide(segments: Sequence[Mapping[str, Any]], device: int, reserved: int) -> SnapshotDict:
    """Return the figures of a snapshot that only the segments have.

    Args:
        segments: of all devices, as the allocator lists them.
        device: index of the device.
        reserved: bytes that the caching allocator holds on it.

    Returns:
        ``npu_workspace_bytes``, ``npu_workspace_streams`` ({stream: bytes}) and
        ``graph_pool_bytes`` (segments of private pools). None each where the two allocators cannot
        be told apart, as under a pluggable allocator.
    """
    listed = pools = 0
    whole = not reserved  # the caching allocator's own add up to what it has reserved
    streams: dict[str, int] = {}
    for segment in segments:
        if segment["device"] != device:
            continue
        size = int(segment["total_size"])
        if whole and size:
            stream = str(segment.get("stream", 0))
            streams[stream] = streams.get(stream, 0) + size
        elif not whole and _is_private(segment):
            pools += size
        listed += size
        whole = whole or listed == reserved
    return {
        "npu_workspace_bytes": listed - reserved if listed >= reserved else None,
        # else the order is another one: the sum holds nevertheless
        "npu_workspace_streams": streams if whole else None,
        "graph_pool_bytes": pools if whole else None,
    }


def _is_private(segment: Mapping[str, Any]) -> bool:
    return tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)


def pools_of(
    segments: Sequence[Mapping[str, Any]], device: int, reserved: int, requested: int | None
) -> list[dict[str, object]] | None:
    """Add up the caching allocator's segments of a device, by pool and stream.

    Args:
        segments: of all devices, as the allocator lists them, operator workspace last.
        device: index of the device.
        reserved: bytes that the caching allocator holds on it.
        requested: bytes of the allocation that failed; None where nobody said.

    Returns:
        ``schema.POOL`` keys per pool and stream, or None where the caching allocator's own segments
        cannot be told from others. Free blocks are those that no tensor and no stream holds;
        ``pending_bytes`` wait for a stream's work before they are free.
    """
    pools: dict[tuple[object, ...], dict[str, Any]] = {}
    total = 0
    for segment in segments:
        if segment["device"] != device or total == reserved:
            continue
        size = int(segment["total_size"])
        total += size
        private, small = _is_private(segment), segment.get("segment_type") == "small"
        stream = int(segment.get("stream", 0))
        pool = pools.setdefault(
            (private, small, stream),
            {
                "private": private,
                "small": small,
                "stream": str(stream),
                "expandable": False,
                **dict.fromkeys(_SUMS, 0),
                "fitting_bytes": None if requested is None else 0,
            },
        )
        pool["expandable"] |= bool(segment.get("is_expandable", False))
        pool["total_bytes"] += size
        for block in segment["blocks"]:
            length, state = int(block["size"]), str(block["state"])
            if state == "active_allocated":
                pool["allocated_bytes"] += length
            elif state == "inactive":
                pool["free_bytes"] += length
                pool["free_blocks"] += 1
                pool["largest_free_bytes"] = max(pool["largest_free_bytes"], length)
                if requested is not None and length >= requested:
                    pool["fitting_bytes"] += length
            else:  # active_pending_free, by its spellings
                pool["pending_bytes"] += length
    return list(pools.values()) if total == reserved else None
