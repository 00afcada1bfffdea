"""Findings of a run that ran out of device memory: in which phase, and what the allocator held."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.engine_options import is_cuda
from vllm_memprof.accounting.findings.needs import NOTHING, OOM_TOLD
from vllm_memprof.accounting.findings.registry import (
    ERROR,
    INFO,
    WARNING,
    WARNING_BYTES,
    Found,
    RankContext,
    finding,
    known,
)
from vllm_memprof.accounting.forensics import STAGE_TITLES, Remedy
from vllm_memprof.accounting.model import Oom, RankReport
from vllm_memprof.accounting.oom_phases import HELD, kv_cache_state
from vllm_memprof.record.failures import PROFILE
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import GIB, format_gib, minus

#: Remedies named by the finding; the table under it has all.
_MOST_NAMED = 4
#: Remedies that take from the KV cache. The first makes room for the whole serving peak, not for
#: the failed allocation alone.
_OF_THE_KV_CACHE = ("room_for_the_peak", "kv_cache_memory", "utilization")

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
    missing = minus(oom.requested_bytes, oom.free_bytes)
    missing = None if missing is not None and missing <= 0 else missing  # free, but in pieces
    kv_cache = kv_cache_state(rank, oom)
    sentences = [*_where(oom), join(", ", _held(rank, oom))]
    if largest := _largest(rank, oom, kv_cache):
        name, size = largest
        sentences.append(
            text("the largest: {name}, {size} GiB", name=name, size=gib_of(rank, size))
        )
    planned = next(
        (s.after for s in rank.phases if s.phase == "kv_cache_alloc" and s.error is None), None
    )
    if planned is not None:
        used = minus(oom.device_total_bytes, oom.free_bytes)
        grown = minus(used, minus(planned.device_total_bytes, planned.device_free_bytes))
        if grown:
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
    action = _room_for(rank, oom, kv_cache)
    yield Found(join("; ", [part for part in sentences if part]), missing, action, title)


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
    held: list[tuple[str, int | None]] = [
        (text("reserved but not allocated"), oom.fragmentation_bytes)
    ]
    if oom.process_non_torch_bytes is None:
        held.append((text("memory outside this process's allocator"), oom.other_bytes))
    else:
        held.append((text("memory outside torch in this process"), oom.process_non_torch_bytes))
        held.append((text("other processes"), oom.other_processes_bytes))
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
        request. Info where it would not have been enough even in one piece.

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
    if size is None or size < WARNING_BYTES:
        return
    reserved, free = oom.reserved_bytes or 0, oom.free_bytes
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
    enough = wanted is None or size + (free or 0) >= wanted
    severity = WARNING if enough else INFO
    yield Found(join(", ", parts), size, action, severity=severity)


def _where(oom: Oom) -> list[str]:
    """Return the part of the step that failed, and the request and images that it was for."""
    parts: list[str] = []
    if oom.at_request is not None:
        at = text("request {at}", at=oom.at_request)
        if oom.request_count is not None:
            at = text("{request} of {count}", request=at, count=oom.request_count)
        parts.append(at)
    if oom.stage is not None:
        parts.append(text("in the part {stage}", stage=STAGE_TITLES[oom.stage]))
    sizes = [
        f"{item.size[0]}x{item.size[1]}"
        for request in oom.requests or []
        for item in request.items
        if item.encoded and item.size is not None
    ]
    if sizes:
        parts.append(text("images encoded in the step: {sizes}", sizes=", ".join(sizes[:8])))
    return [join(", ", parts)] if parts else []


def merge_not_profiled(oom: Oom) -> Text | None:
    """Return what a log notes of a merge of embeddings that its profile has none of; else None."""
    profiled = {each.stage for each in oom.readings if each.moment == PROFILE}
    served = [each for each in oom.readings if each.moment != PROFILE]
    merge = next((each for each in served if each.stage == "mm_merge"), None)
    if merge is None or not profiled or "mm_merge" in profiled:
        return None
    encoder = next(
        (each for each in served if (each.moment, each.stage) == (merge.moment, "mm_encoder")),
        None,
    )
    took = text(
        "the merge of multimodal embeddings took {size} GiB for {moment}",
        size=format_gib(merge.bytes, 3),
        moment=merge.moment,
    )
    if encoder is not None:
        took = text(
            "{took}, {more} GiB more than the encoder",
            took=took,
            more=format_gib(merge.bytes - encoder.bytes, 3),
        )
    return text("{took}; what the log notes of its profile has no merge", took=took)


def gib_of(rank: RankReport, size: int | None) -> str:
    """Return GiB with as many digits as are known: a log prints two, or MiB."""
    logged = "oom_requested_bytes" in rank.figures or "oom_reserved_bytes" in rank.figures
    return format_gib(size, 2 if logged and size is not None and abs(size) >= GIB else 4)


def _room_for(rank: RankReport, oom: Oom, kv_cache: str | None) -> str:
    """Return the remedies to try first: those that are enough alone, else those that may be.

    Args:
        rank: that ran out of memory.
        oom: its failure, with the table of remedies, the better ones first.
        kv_cache: state of the KV cache (`kv_cache_state`); None: not known.
    """
    named = _named(oom)
    if named and named[0].id == _OF_THE_KV_CACHE[0] and named[0].enough:
        argument = named[0].argument
        return text("{argument} leaves room for the serving peak", argument=argument)
    of_kv = [each for each in named if each.id in _OF_THE_KV_CACHE]
    if kv_cache is None and of_kv:
        others = [each for each in named if each not in of_kv]
        parts = [
            text(
                "if the KV cache was allocated already: {choices}",
                choices=_alternatives(rank, of_kv),
            )
        ]
        if others:
            parts.append(text("in any case: {choices}", choices=_alternatives(rank, others)))
        return join("; ", parts)
    choices = _alternatives(rank, named)
    if oom.phase is None or not any(each.bytes is not None for each in named):
        return choices
    return text(
        "{choices}; what the rest of {phase} takes is not known",
        choices=choices,
        phase=oom.phase,
    )


def _named(oom: Oom) -> list[Remedy]:
    """Return the remedies that a finding names, in the order of the table.

    Memory of others that is most of what was missing comes alone: nothing of the engine's helps as
    much. Remedies of unknown size are named where no other is enough for sure.
    """
    useful = [each for each in oom.remedies if each.enough is not False]
    total = oom.device_total_bytes
    for each in useful:
        of_others = each.bytes if each.id == "other_processes" else None
        if of_others and (total is None or of_others > total // 3):
            return [each]
    named = [each for each in useful if each.bytes is not None or each.enough]
    if not any(each.enough for each in named):
        named += [each for each in useful if each not in named]
    return named[:_MOST_NAMED]


def _alternatives(rank: RankReport, named: list[Remedy]) -> str:
    return join(", or ", [_phrase(rank, each) for each in named])


def _phrase(rank: RankReport, remedy: Remedy) -> str:
    argument = remedy.argument
    if remedy.bytes is None:
        unknown = text("{argument} (by how much is not known)", argument=argument)
        return argument if remedy.enough else unknown
    size = gib_of(rank, remedy.bytes)
    match remedy.bound:
        case "at_most":
            return text("{argument} gives up to {size} GiB", argument=argument, size=size)
        case "at_least":
            return text("{argument} gives at least {size} GiB", argument=argument, size=size)
        case _:
            return text("{argument} gives {size} GiB", argument=argument, size=size)
