"""The allocator's list of segments, divided into operator workspace by stream and graph pools.

torch_npu appends the blocks of its workspace allocator, one per stream, to the segments of the
caching allocator (``torch_npu/csrc/npu/Module.cpp::THNPModule_memorySnapshot``, 2.8 and 2.10);
``reserved_bytes`` does not count them. Nothing marks them, but the caching allocator's own come
first and are as large as what it says it has reserved.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

Fields = dict[str, Any]


def divide(segments: Iterable[Fields], device: int, reserved: int) -> Fields:
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
    left, graph_pools = reserved, 0
    streams: Counter[str] = Counter()
    whole = not reserved  # the caching allocator's own add up to what it has reserved
    for segment in segments:
        if segment["device"] == device:
            size = segment["total_size"]
            if whole:
                streams[str(segment.get("stream", 0))] += size
            elif is_private(segment):
                graph_pools += size
            left -= size
            whole = whole or left == 0
    return {
        "npu_workspace_bytes": -left if left <= 0 else None,
        # else the order is another one: the sum holds nevertheless
        "npu_workspace_streams": dict(+streams) if whole else None,
        "graph_pool_bytes": graph_pools if whole else None,
    }


def is_private(segment: Fields) -> bool:
    return tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)


def pools_of(
    segments: Iterable[Fields], device: int, reserved: int, requested: int | None
) -> list[Fields] | None:
    """Add up the caching allocator's segments of a device, by pool and stream.

    Args:
        segments: of all devices, as the allocator lists them, operator workspace last.
        device: index of the device.
        reserved: bytes that the caching allocator holds on it.
        requested: bytes of the allocation that failed; None where nobody said.

    Returns:
        ``failures.Pool`` keys per pool and stream, or None where the caching allocator's own
        segments cannot be told from others. Free blocks are those that no tensor and no stream
        holds; ``pending_bytes`` wait for a stream's work before they are free.
    """
    pools: dict[tuple[bool, bool, str], list[Fields]] = defaultdict(list)
    for segment in segments:
        if segment["device"] == device and reserved != 0:
            small, stream = segment.get("segment_type") == "small", str(segment.get("stream", 0))
            pools[is_private(segment), small, stream].append(segment)
            reserved -= segment["total_size"]
    rows: list[Fields] = []
    for (private, small, stream), members in pools.items():
        sizes: dict[str, list[int]] = defaultdict(list)
        for segment in members:
            for block in segment["blocks"]:
                sizes[block["state"]].append(block["size"])
        allocated, free = sizes.pop("active_allocated", []), sizes.pop("inactive", [])
        pending = sum(map(sum, sizes.values()))  # by its spellings
        rows.append({
            "private": private,
            "small": small,
            "stream": stream,
            "expandable": any(segment.get("is_expandable") for segment in members),
            "total_bytes": sum(segment["total_size"] for segment in members),
            "allocated_bytes": sum(allocated),
            "pending_bytes": pending,
            "free_bytes": sum(free),
            "free_blocks": len(free),
            "largest_free_bytes": max(free, default=0),
            "fitting_bytes": None
            if requested is None
            else sum(size for size in free if size >= requested),
        })  # fmt: skip
    return rows if reserved == 0 else None
