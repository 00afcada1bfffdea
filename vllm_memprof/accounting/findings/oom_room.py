"""What gives enough room after an OOM: the remedies of the table that a finding names."""

from __future__ import annotations

from vllm_memprof.accounting.engine_options import is_cuda
from vllm_memprof.accounting.findings.registry import RankContext
from vllm_memprof.accounting.model import Oom, RankReport, Remedy
from vllm_memprof.text import join, text
from vllm_memprof.units import GIB, format_gib

#: Remedies named by the finding; the table under it has all.
_MOST_NAMED = 4
_OF_OTHERS = "other_processes"
#: Makes room for the whole serving peak, not for the failed allocation alone.
_FOR_THE_PEAK = "room_for_the_peak"
#: Remedies that take from the KV cache.
_OF_THE_KV_CACHE = ("room_for_the_peak", "kv_cache_memory", "utilization")


def gib_of(rank: RankReport, size: int | None) -> str:
    """Return GiB with as many digits as are known: a log prints two, or MiB."""
    logged = "oom_requested_bytes" in rank.figures or "oom_reserved_bytes" in rank.figures
    return format_gib(size, 2 if logged and size is not None and abs(size) >= GIB else 4)


def room_for(rank: RankReport, oom: Oom, kv_cache: str | None) -> str:
    """Return the remedies to try first: those that are enough alone, else those that may be.

    Args:
        rank: that ran out of memory.
        oom: its failure, with the table of remedies, the better ones first.
        kv_cache: state of the KV cache (`kv_cache_state`); None: not known.
    """
    named = _named(oom)
    if named and named[0].id == _FOR_THE_PEAK and named[0].enough:
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
        if each.id == _OF_OTHERS and each.bytes and (total is None or each.bytes > total // 3):
            return [each]
    known = [each for each in useful if each.bytes is not None or each.enough]
    if not any(each.enough for each in known):
        known += [each for each in useful if each not in known]
    return known[:_MOST_NAMED]


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


def is_expandable(oom: Oom) -> bool:
    """Return whether the allocator's segments could grow already."""
    if oom.free_blocks is not None and oom.free_blocks.expandable:
        return True
    return "expandable_segments:true" in (oom.allocator_settings or "").lower()


def allocator_variable(context: RankContext) -> str:
    info = context.run.info
    chip = "CUDA" if is_cuda(info.engine, info.device) else "NPU"
    return f"PYTORCH_{chip}_ALLOC_CONF"
