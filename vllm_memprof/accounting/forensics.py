"""What is known of a failed allocation besides its size: types, and the allocator's free memory
divided into blocks that were large enough, too small, and out of reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from vllm_memprof.record.codec import Allowed
from vllm_memprof.record.failures import Pool
from vllm_memprof.record.spans import How
from vllm_memprof.text import text

#: Requests up to this size are served from pools of their own.
#: (torch, CUDACachingAllocator.cpp, and torch_npu, NPUCachingAllocator.cpp: kSmallSize)
SMALL_BYTES = 1 << 20
#: What the allocator asks the device for on behalf of a small request: kSmallBuffer.
_SMALL_SEGMENT_BYTES = 2 << 20

EXACT, AT_MOST, AT_LEAST = "exact", "at_most", "at_least"
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


@dataclass(frozen=True)
class FreeBlocks:
    """Reserved memory without a tensor, by the allocator's own segments after the failure; bytes.

    The parts add up to reserved less allocated at that reading.
    """

    stream: str  # whose blocks count as those that could be used
    streams: int  # that have segments, a count
    small: bool  # the pool of small blocks was asked
    expandable: bool  # segments of that pool can grow
    #: Nothing was freed between the failure and the reading; else every figure is of the latter.
    exact: bool
    freed_bytes: int | None  # allocated at the failure less allocated at the reading
    largest_bytes: int  # the largest free block of the pool and stream that were asked
    fitting_bytes: int | None  # in blocks as large as what was asked for; None: not said
    too_small_bytes: int | None
    other_streams_bytes: int  # free blocks of the same pool that belong to other streams
    other_pools_bytes: int  # of the pool for blocks of the other kind, small or large
    graph_pools_bytes: int  # of private pools (captured graphs)
    pending_bytes: int  # freed, but a stream may still use them


@dataclass(frozen=True)
class Remedy:
    """Something that makes room, with the bytes that it gives."""

    id: str
    argument: str
    bytes: int | None  # None: not known, and ``grounds`` says why
    bound: Annotated[str, Allowed((EXACT, AT_MOST, AT_LEAST))] | None
    how: How | None
    #: Whether the allocation would have passed with it alone; None: not known.
    enough: bool | None
    grounds: str


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
