"""Findings of a run that ran out of device memory: in which phase, and what the allocator held."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.budget.engine_options import allocator_variable
from vllm_memprof.accounting.findings.rules import WARNING_BYTES, Context, Found
from vllm_memprof.accounting.model import Oom, RankReport
from vllm_memprof.accounting.oom.failed_allocation import (
    HELD,
    gib_of,
    images_of,
    kv_cache_state,
    merge_not_profiled,
)
from vllm_memprof.accounting.oom.remedies import room_for
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.options import is_expandable
from vllm_memprof.text import text
from vllm_memprof.units import Amount, minus


def out_of_memory(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find the allocation that failed, what held the device, and what gives enough room."""
    oom = rank.oom
    if oom is None:
        return
    kv_cache = kv_cache_state(rank, oom)
    allocated, split = oom.allocated_bytes, oom.process_non_torch_bytes is not None
    # a message that gives the peak alone
    peak = minus(oom.reserved_bytes, oom.fragmentation_bytes) if allocated is None else None
    outside = None if split else oom.other_bytes
    name, largest = _largest(rank, oom, kv_cache == HELD, outside, peak)
    sizes = {
        "requested": oom.requested_bytes,
        "unused": oom.free_bytes,
        "reserved": oom.reserved_bytes,
        "allocated": allocated,
        "peak": peak,
        "graphs": oom.graph_pools_bytes,
        "outside": outside,
        "process": oom.process_non_torch_bytes,
        "of_others": oom.other_processes_bytes,
        "largest": largest or None,
    }
    spans = (s.after for s in rank.phases if s.phase == "kv_cache_alloc" and s.error is None)
    images = ", ".join(f"{width}x{height}" for width, height in images_of(oom)[:8])
    yield Found(
        oom.missing_bytes,
        {
            **vars(oom),
            "stage": TITLES["stages"].get(oom.stage or ""),
            "images": images,
            "holder": name,
            "grown": oom.taken_since(next(spans, None)) or None,
            "unknown": oom.phase is None,
            "merge": merge_not_profiled(oom),
            **room_for(rank, oom, kv_cache),
            **{name: size and gib_of(rank, size) for name, size in sizes.items()},
            **{flag: True for flag in (oom.asked_by, oom.last_phase) if flag is not None},
        },
    )


def _largest(
    rank: RankReport, oom: Oom, has_kv_cache: bool, outside: Amount, peak: Amount
) -> tuple[str, int]:
    """Return (name, bytes) of what held most of the device, by the figures that divide it."""
    tensors = oom.allocated_bytes
    weights = rank.figures.get("weights_bytes") if oom.phase != "weight_load" else None
    granted = rank.budget.engine_kv_cache_bytes if has_kv_cache else None
    parts = int(weights or 0) + (granted or 0)
    if tensors is not None and parts > tensors:
        weights, granted, parts = None, None, 0  # figures of another moment
    held = (
        (text("reserved but not allocated"), oom.fragmentation_bytes),
        (text("memory outside this process's allocator"), outside),
        (text("memory outside torch in this process"), oom.process_non_torch_bytes),
        (text("other processes"), oom.other_processes_bytes if outside is None else None),
        (text("tensors (at most)"), peak),
        (text("other tensors") if parts else text("tensors"), minus(tensors, parts)),
        (text("weights"), int(weights or 0)),
        (text("KV cache"), granted),
    )
    return max(((name, size or 0) for name, size in held), key=lambda entry: entry[1])


def fragmentation(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find segments that the allocator held at an OOM without a tensor in them."""
    oom = rank.oom
    if oom is None or oom.fragmentation_bytes is None:
        return
    size, wanted, free = oom.fragmentation_bytes, oom.requested_bytes, oom.free_bytes
    if size < WARNING_BYTES or (wanted or 0) > size + (free or 0):
        return
    reserved, blocks = oom.reserved_bytes or 0, oom.free_blocks
    grows = is_expandable(oom.allocator_settings) or (blocks is not None and blocks.expandable)
    stale = blocks is not None and not blocks.exact
    yield Found(
        size,
        {
            **vars(oom),
            "peak": oom.allocated_bytes is None and reserved - size,
            "allocated": oom.allocated_bytes is not None and reserved - size,
            "setting": not grows and f"{allocator_variable(run.run.info)}=expandable_segments:True",
            "largest": blocks is not None
            and (blocks.exact or blocks.freed_bytes is not None)
            and blocks.largest_bytes,
            "freed": blocks is not None and stale and blocks.freed_bytes,
        },
    )
