"""Findings of a run that ran out of device memory: in which phase, and what the allocator held."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.budget.engine_options import is_cuda
from vllm_memprof.accounting.findings.needs import NOTHING, OOM_TOLD
from vllm_memprof.accounting.findings.registry import (
    ERROR,
    WARNING,
    WARNING_BYTES,
    Found,
    RankContext,
    finding,
    known,
)
from vllm_memprof.accounting.model import Oom, RankReport
from vllm_memprof.accounting.oom.failed_allocation import (
    HELD,
    gib_of,
    kv_cache_state,
    merge_not_profiled,
    where,
)
from vllm_memprof.accounting.oom.remedies import room_for
from vllm_memprof.text import join, text
from vllm_memprof.units import minus

_ASKED_BY = {
    "npu_workspace": text("for an operator's workspace, outside the caching allocator"),
    "runtime": text("by the runtime, for a library outside torch"),
}
_LAST_PHASE = {
    "weight_load": text("the weights are loaded"),
    "profile_run": text("figures of the profile run"),
    "kv_cache_plan": text("the KV cache is sized"),
    "graph_capture": text("graphs are captured"),
    "warm_up": text("the engine is warm"),
}


@finding(
    "out-of-memory",
    severity=ERROR,
    title=text("The device ran out of memory"),
    needs=OOM_TOLD,
)
def out_of_memory(context: RankContext) -> Iterator[Found]:
    """Find the allocation that failed, what held the device, and what gives enough room.

    Meaning:
        An allocation was asked for that neither the allocator nor the device had room for. Before
        the KV cache exists its size is no cause; after it, a smaller KV cache makes room. A log
        tells the phase by the traceback above the message; else the finding names the last phase
        whose lines come before it.

    Computed:
        - Missing: bytes asked for less bytes free on the device, by the allocator's own message at
          the failure; unknown where more was free than was asked for (free memory in pieces).
        - Outside torch: total - free - reserved. Where the message says what the process held,
          that less reserved is outside torch in this process, and total - free - process is of
          other processes.
        - Largest: of what held the device, as far as the figures divide it.

        Sources of the messages: `torch_npu`, `NPUCachingAllocator.cpp::malloc`,
        `NPUWorkspaceAllocator.cpp`; torch, `CUDACachingAllocator.cpp`; CANN runtime, EL0004.

    To do:
        What the finding names, with the bytes that each argument gives: of the table "What would
        have let it pass" those that are enough alone, else those that may be. What leaves room for
        the whole serving peak comes first; where that is not known, each is the least that is
        needed, as what the rest of the phase would have taken is not known.
    """
    rank = context.rank
    oom = rank.oom
    if oom is None:
        return
    kv_cache = kv_cache_state(rank, oom)
    sentences = [*where(oom), join(", ", _held(rank, oom))]
    if largest := _largest(rank, oom, kv_cache):
        name, size = largest
        sentences.append(
            text("the largest: {name}, {size} GiB", name=name, size=gib_of(rank, size))
        )
    planned = next(
        (s.after for s in rank.phases if s.phase == "kv_cache_alloc" and s.error is None), None
    )
    if grown := oom.taken_since(planned):
        sentences.append(text("taken since kv_cache_alloc: {size:gib4} GiB", size=grown))
    if oom.phase is None:
        last = _LAST_PHASE.get(oom.last_phase or "")
        sentences.append(
            text("the phase is not known")
            if last is None
            else text("the phase is not known; before the message: {last}", last=last)
        )
    if (merge := merge_not_profiled(oom)) is not None:
        sentences.append(merge)
    title = (
        text("The device ran out of memory")
        if oom.phase is None
        else text("The device ran out of memory in {phase}", phase=oom.phase)
    )
    action = room_for(rank, oom, kv_cache)
    yield Found(join("; ", [part for part in sentences if part]), oom.missing_bytes, action, title)


def _held(rank: RankReport, oom: Oom) -> list[str]:
    """Return what was asked for, and who held the device at the failure."""
    parts: list[str] = []
    if oom.requested_bytes is not None:
        asked = text("{size} GiB were asked for", size=gib_of(rank, oom.requested_bytes))
        if oom.asked_by is not None:
            asked = text("{asked} {who}", asked=asked, who=_ASKED_BY[oom.asked_by])
        parts.append(asked)
    split = oom.process_non_torch_bytes is not None
    rows = (
        (text("{size} GiB free"), oom.free_bytes),
        (text("reserved {size} GiB"), oom.reserved_bytes),
        (text("allocated {size} GiB"), oom.allocated_bytes),
        (
            text("allocated {size} GiB at its peak"),
            None if oom.allocated_bytes is not None else _peak(oom),
        ),
        (text("of it in private pools (graphs) {size} GiB"), oom.graph_pools_bytes),
        (text("outside this process's allocator {size} GiB"), None if split else oom.other_bytes),
        (text("outside torch in this process {size} GiB"), oom.process_non_torch_bytes),
        (text("other processes {size} GiB"), oom.other_processes_bytes),
    )
    return parts + known(*((said, size and gib_of(rank, size)) for said, size in rows))


def _peak(oom: Oom) -> int | None:
    """Return the allocated peak, where the message gives that and not what was allocated."""
    return minus(oom.reserved_bytes, oom.fragmentation_bytes)


def _largest(rank: RankReport, oom: Oom, kv_cache: str | None) -> tuple[str, int] | None:
    """Return (name, bytes) of what held most of the device, by the figures that divide it."""
    split = oom.process_non_torch_bytes is not None
    held: list[tuple[str, int | None]] = [
        (text("reserved but not allocated"), oom.fragmentation_bytes),
        (text("memory outside this process's allocator"), None if split else oom.other_bytes),
        (text("memory outside torch in this process"), oom.process_non_torch_bytes),
        (text("other processes"), oom.other_processes_bytes if split else None),
    ]
    tensors = oom.allocated_bytes
    known: list[tuple[str, int]] = []
    weights = rank.figures.get("weights_bytes")
    granted = rank.budget.engine_kv_cache_bytes
    if weights and oom.phase != "weight_load":
        known.append((text("weights"), int(weights)))
    if granted and kv_cache == HELD:
        known.append((text("KV cache"), granted))
    if tensors is not None and sum(size for _, size in known) > tensors:
        known = []  # figures of another moment
    if tensors is not None:
        rest = tensors - sum(size for _, size in known)
        name = text("other tensors") if known else text("tensors")
        held.append((name, rest))
    else:
        held.append((text("tensors (at most)"), _peak(oom)))
    sizes = [(name, size) for name, size in (*held, *known) if size is not None and size > 0]
    return max(sizes, key=lambda entry: entry[1], default=None)


@finding(
    "fragmentation",
    severity=WARNING,
    title=text("At the OOM the allocator held memory that no tensor used"),
    needs=NOTHING,
)
def fragmentation(context: RankContext) -> Iterator[Found]:
    """Find segments that the allocator held at an OOM without a tensor in them.

    Meaning:
        The allocator had reserved memory that was not allocated, in pieces that did not fit the
        request. In one piece, with what was free, it would have been enough.

    Computed:
        Reserved less allocated at the OOM, 128 MiB or more, from the allocator's message; of its
        peak where the message has no other figure. The largest free block is the allocator's own
        list of segments, read after the failure.

    To do:
        Set `expandable_segments:True` in the allocator's variable, and leave `max_split_size_mb`
        out: torch_npu refuses both together.
    """
    oom = context.rank.oom
    if oom is None:
        return
    size, wanted = oom.fragmentation_bytes, oom.requested_bytes
    reserved, free = oom.reserved_bytes or 0, oom.free_bytes
    if size is None or size < WARNING_BYTES or (wanted or 0) > size + (free or 0):
        return
    held = reserved - size
    parts = [
        text("reserved {size:gib} GiB", size=reserved),
        text("allocated {size:gib} GiB at its peak", size=held)
        if oom.allocated_bytes is None
        else text("allocated {size:gib} GiB", size=held),
    ]
    parts += known(
        (text("{size:gib} GiB were asked for"), wanted), (text("{size:gib} GiB free"), free)
    )
    action, blocks, info = "", oom.free_blocks, context.run.info
    could_grow = blocks is not None and blocks.expandable
    if not could_grow and "expandable_segments:true" not in (oom.allocator_settings or "").lower():
        chip = "CUDA" if is_cuda(info.engine, info.device) else "NPU"
        action = text(
            "{setting}, without max_split_size_mb: the two exclude each other",
            setting=f"PYTORCH_{chip}_ALLOC_CONF=expandable_segments:True",
        )
    if blocks is not None and blocks.exact:
        parts.append(text("largest free block {size:gib4} GiB", size=blocks.largest_bytes))
    elif blocks is not None and blocks.freed_bytes is not None:
        parts.append(
            text(
                "largest free block {size:gib4} GiB when it was read, {freed:gib4} GiB freed since",
                size=blocks.largest_bytes,
                freed=blocks.freed_bytes,
            )
        )
    yield Found(join(", ", parts), size, action)
