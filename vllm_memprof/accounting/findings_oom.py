"""The finding of a run that ran out of device memory under hooks: in which phase, what was missing, what to change.

Listed in ``FINDINGS`` as in ``findings.py``. A log does not tell the phase; what its message tells is divided there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vllm_memprof.accounting.kv import worth_in_tokens
from vllm_memprof.accounting.model import Finding, Oom, RankReport
from vllm_memprof.record.loader import Run
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import ancestors, first_of
from vllm_memprof.units import format_gib, minus

#: Phase -> what makes it need less, for those before the KV cache is sized: its size is not to blame.
_BEFORE_KV = {
    "weight_load": "more ranks (--tensor-parallel-size), or weights of fewer bits (--quantization)",
    "mm_profile": "a lower --max-num-batched-tokens, or fewer images per prompt (--limit-mm-per-prompt)",
    "profile_run": "a lower --max-num-batched-tokens or --max-num-seqs",
}


def _out_of_memory(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """An allocation that the device had no memory for, in a phase that is known."""
    for rank in ranks:
        failure = first_of(rank.phases, "oom")
        if rank.oom is None or failure is None or failure.parent is None:
            continue
        around = [span.phase for span in ancestors(rank.phases, failure)]
        wanted, free = rank.oom.requested_bytes, rank.oom.free_bytes
        missing = minus(wanted, free)
        missing = (
            missing if missing is None or missing > 0 else None
        )  # free, yet not to be had: in pieces
        yield Finding(
            id="out-of-memory",
            severity="error",
            rank=rank.rank,
            label=rank.label,
            bytes=missing,
            kv_tokens=None if missing is None else worth_in_tokens(rank.kv, missing),
            title=f"The device ran out of memory in {around[0]}",
            evidence=_evidence(rank, rank.oom),
            action=_action(rank, around, missing or 0),
        )


def _evidence(rank: RankReport, oom: Oom) -> str:
    sizes = {
        "{} GiB were asked for": oom.requested_bytes,
        "{} GiB free": oom.free_bytes,
        "reserved {} GiB": oom.reserved_bytes,
        "allocated {} GiB": oom.allocated_bytes,
        "outside this process's allocator {} GiB": oom.other_bytes,
    }
    parts = [text.format(format_gib(size, 4)) for text, size in sizes.items() if size is not None]
    used, before = minus(oom.device_total_bytes, oom.free_bytes), _used(_kv_allocated(rank))
    grown = minus(used, before)
    return ", ".join(parts) + (
        f"; taken since kv_cache_alloc: {format_gib(grown, 4)} GiB" if grown else ""
    )


def _action(rank: RankReport, around: list[str], missing: int) -> str:
    if _kv_allocated(rank) is None:
        return next((_BEFORE_KV[phase] for phase in around if phase in _BEFORE_KV), "")
    budget = rank.budget
    granted, utilization = budget.engine_kv_cache_bytes, budget.gpu_memory_utilization
    choices = []
    if granted is not None and granted > missing and budget.takes_fixed_size:
        choices.append(f"--kv-cache-memory-bytes below {granted - missing}")
    if utilization is not None and budget.override is None:
        choices.append(f"--gpu-memory-utilization below {utilization:g}")
    if "graph_capture" in around:
        choices.append("--enforce-eager (captures no graphs)")
    return (
        f"{', or '.join(choices)}; what the rest of {around[0]} takes is not known"
        if choices
        else ""
    )


def _kv_allocated(rank: RankReport) -> Snapshot | None:
    """The reading after the KV cache had been allocated; None where the run did not get there."""
    return next(
        (
            span.after
            for span in rank.phases
            if span.phase == "kv_cache_alloc" and span.error is None
        ),
        None,
    )


def _used(snapshot: Snapshot | None) -> int | None:
    return (
        None if snapshot is None else minus(snapshot.device_total_bytes, snapshot.device_free_bytes)
    )


FINDINGS: tuple[Callable[[Run, list[RankReport]], Iterator[Finding]], ...] = (_out_of_memory,)
