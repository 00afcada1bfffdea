"""Findings of a run that ran out of device memory: in which phase, and what the allocator held."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.findings.needs import HOOKS, NOTHING
from vllm_memprof.accounting.findings.registry import (
    ERROR,
    INFO,
    WARNING,
    WARNING_BYTES,
    Found,
    RankContext,
    finding,
)
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.record.spans import ancestors, first_of
from vllm_memprof.text import join, text
from vllm_memprof.units import minus

#: Phase -> what makes it need less, for those before the KV cache is sized: its size is no cause.
_BEFORE_KV = {
    "weight_load": text(
        "more ranks (--tensor-parallel-size), or weights of fewer bits (--quantization)"
    ),
    "mm_profile": text(
        "a lower --max-num-batched-tokens, or fewer images per prompt (--limit-mm-per-prompt)"
    ),
    "profile_run": text("a lower --max-num-batched-tokens or --max-num-seqs"),
}


@finding("out-of-memory", severity=ERROR, title=text("The device ran out of memory"), needs=HOOKS)
def out_of_memory(context: RankContext) -> Iterator[Found]:
    """Find the allocation that failed, in a phase that is known.

    Meaning:
        An allocation was asked for that neither the allocator nor the device had room for. Before
        the KV cache exists its size is no cause; after it, a smaller KV cache makes room.

    Computed:
        Bytes asked for less bytes free on the device, by the allocator's own message at the
        failure; unknown where more was free than was asked for (free memory in pieces).
        Source of the message: `torch_npu`, `NPUCachingAllocator.cpp::malloc`.

    To do:
        Before the KV cache: what the finding names for the phase. After it: a smaller KV cache by
        `--kv-cache-memory-bytes` or `--gpu-memory-utilization`. What the rest of the phase would
        have taken is not known, so the named size is an upper bound.
    """
    rank = context.rank
    failure = first_of(rank.phases, "oom")
    if rank.oom is None or failure is None or failure.parent is None:
        return
    oom = rank.oom
    around = [span.phase for span in ancestors(rank.phases, failure)]
    missing = minus(oom.requested_bytes, oom.free_bytes)
    missing = None if missing is not None and missing <= 0 else missing  # free, but in pieces
    sizes = (
        (text("{size:gib4} GiB were asked for", size=oom.requested_bytes), "requested_bytes"),
        (text("{size:gib4} GiB free", size=oom.free_bytes), "free_bytes"),
        (text("reserved {size:gib4} GiB", size=oom.reserved_bytes), "reserved_bytes"),
        (text("allocated {size:gib4} GiB", size=oom.allocated_bytes), "allocated_bytes"),
        (
            text("outside this process's allocator {size:gib4} GiB", size=oom.other_bytes),
            "other_bytes",
        ),
    )
    evidence = join(", ", [said for said, name in sizes if getattr(oom, name) is not None])
    planned = next(
        (s.after for s in rank.phases if s.phase == "kv_cache_alloc" and s.error is None), None
    )
    if planned is not None:
        used = minus(oom.device_total_bytes, oom.free_bytes)
        grown = minus(used, minus(planned.device_total_bytes, planned.device_free_bytes))
        if grown:
            since = text("taken since kv_cache_alloc: {size:gib4} GiB", size=grown)
            evidence = join("; ", [evidence, since])
        action = _smaller_kv_cache(rank, around, missing or 0)
    else:
        action = next((_BEFORE_KV[phase] for phase in around if phase in _BEFORE_KV), "")
    title = text("The device ran out of memory in {phase}", phase=around[0])
    yield Found(evidence, missing, action, title)


def _smaller_kv_cache(rank: RankReport, around: list[str], missing: int) -> str:
    budget = rank.budget
    granted, utilization = budget.engine_kv_cache_bytes, budget.gpu_memory_utilization
    choices = []
    if granted is not None and granted > missing and budget.takes_fixed_size:
        choices.append(text("--kv-cache-memory-bytes below {size}", size=granted - missing))
    if utilization is not None and budget.override is None:
        choices.append(text("--gpu-memory-utilization below {share:g}", share=utilization))
    if "graph_capture" in around:
        choices.append(text("--enforce-eager (captures no graphs)"))
    if not choices:
        return ""
    return text(
        "{choices}; what the rest of {phase} takes is not known",
        choices=join(", or ", choices),
        phase=around[0],
    )


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
        peak where the message has no other figure.

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
    if wanted is not None:
        parts.append(text("{size:gib} GiB were asked for", size=wanted))
    if free is not None:
        parts.append(text("{size:gib} GiB free", size=free))
    chip = "CUDA" if context.run.info.engine == "vllm" else "NPU"
    action = text(
        "{setting}, without max_split_size_mb: the two exclude each other",
        setting=f"PYTORCH_{chip}_ALLOC_CONF=expandable_segments:True",
    )
    enough = wanted is None or size + (free or 0) >= wanted
    severity = WARNING if enough else INFO
    yield Found(join(", ", parts), size, action, severity=severity)
