"""Words of the finding of an OOM: where the allocation failed, and what gives enough room."""

from __future__ import annotations

from vllm_memprof.accounting.model import Oom, RankReport, Remedy
from vllm_memprof.accounting.oom import STAGE_TITLES
from vllm_memprof.record.failures import PROFILE
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import GIB, format_gib

#: Remedies named by the finding; the table under it has all.
_MOST_NAMED = 4
#: Remedies that take from the KV cache. The first makes room for the whole serving peak, not for
#: the failed allocation alone.
_OF_THE_KV_CACHE = ("room_for_the_peak", "kv_cache_memory", "utilization")


def where(oom: Oom) -> list[str]:
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


def room_for(rank: RankReport, oom: Oom, kv_cache: str | None) -> str:
    """Return the remedies to try first: those that are enough alone, else those that may be.

    Args:
        rank: that ran out of memory.
        oom: its failure, with the table of remedies, the better ones first.
        kv_cache: state of the KV cache (`kv_cache_state`); None: not known.
    """
    named = _named(oom)

    def choices(some: list[Remedy]) -> Text:
        return join(", or ", [_phrase(rank, each) for each in some])

    if named and named[0].id == _OF_THE_KV_CACHE[0] and named[0].enough:
        argument = named[0].argument
        return text("{argument} leaves room for the serving peak", argument=argument)
    of_kv = [each for each in named if each.id in _OF_THE_KV_CACHE]
    if kv_cache is None and of_kv:
        others = [each for each in named if each not in of_kv]
        said = [text("if the KV cache was allocated already: {choices}", choices=choices(of_kv))]
        if others:
            said.append(text("in any case: {choices}", choices=choices(others)))
        return join("; ", said)
    chosen = choices(named)
    if oom.phase is None or not any(each.bytes is not None for each in named):
        return chosen
    return text(
        "{choices}; what the rest of {phase} takes is not known",
        choices=chosen,
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
