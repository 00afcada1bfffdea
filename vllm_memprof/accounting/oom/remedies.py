"""What would have let a failed allocation pass: a table of arguments, each with what it gives.

Each row of ``REMEDIES`` looks at one case and returns the bytes that it gives and on what grounds,
or None where it does not apply. What cannot be quantified says so; a row that gives too little
alone says that too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from vllm_memprof.accounting.budget.engine_options import share_of
from vllm_memprof.accounting.budget.equations import divisor_of
from vllm_memprof.accounting.model import (
    AT_LEAST,
    AT_MOST,
    DERIVED,
    ESTIMATED,
    EXACT,
    MEASURED,
    MODELLED,
    Oom,
    RankReport,
    Remedy,
)
from vllm_memprof.accounting.oom.failed_allocation import (
    NOT_YET,
    gib_of,
    images_of,
    kv_cache_state,
    phases_of,
)
from vllm_memprof.engines import row_of_run
from vllm_memprof.record.cause import NamedFailure
from vllm_memprof.record.spans import first_of
from vllm_memprof.text import Text, join, text, titled
from vllm_memprof.units import MIB

#: Less than this is not worth a row.
_LEAST_BYTES = MIB
#: Parts of a step whose tensors grow with the pixels, or with the tokens, that they are given.
_BY_PIXELS = ("mm_encoder", "mm_merge", "mm_gather")
_BY_TOKENS = ("model_forward", "embedding", "logits", "mm_merge", "mm_gather")
#: Images are made this much smaller at most, by factors of 2 of their pixels.
_SMALLEST_SHARE = 1 / 16
_EXPANDABLE = "expandable_segments:true"
#: Remedies named by the finding; the table under it has all.
_MOST_NAMED = 4
#: Remedies that take from the KV cache. The first makes room for the whole serving peak, not for
#: the failed allocation alone.
_OF_THE_KV_CACHE = ("room_for_the_peak", "kv_cache_memory", "utilization")
#: Remedies that name no argument of an engine.
_OF_NO_ENGINE = ("expandable_segments", "other_processes")
_UNKNOWN_SHARE = text("how much of the failed phase shrinks with it is not known")


@dataclass(frozen=True)
class Case:
    """A failed allocation and the run around it."""

    rank: RankReport
    oom: Oom
    env: Mapping[str, str]  # of the engine, as recorded
    logged: bool  # read from a log, not recorded by hooks
    simulated: bool
    eager: bool
    cuda: bool
    max_batched_tokens: int | None
    engine: str | None = None

    @property
    def phases(self) -> list[str]:
        """Phases in which it failed, the innermost first."""
        return phases_of(self.rank, self.oom)

    @property
    def has_kv_cache(self) -> bool | None:
        """Return whether the KV cache was on the device, or being allocated; None: not known."""
        state = kv_cache_state(self.rank, self.oom)
        return None if state is None else state != NOT_YET

    @property
    def needed(self) -> int | None:
        """Return the bytes that would have to be free besides, at least; roundings included."""
        if self.oom.requested_bytes is None:
            return None
        missing = self.oom.missing_bytes
        size = self.oom.requested_bytes if missing is None else missing
        names = ("oom_requested_bytes", "oom_free_bytes")
        rounded = sum(self.rank.half_units.get(name, 0) for name in names)
        return size + max(rounded, self.oom.requested_half_unit_bytes)


@dataclass(frozen=True)
class RemedyEstimate:
    """What an argument gives in one case."""

    argument: str
    grounds: str  # where bytes is None: why
    bytes: int | None = None
    bound: str | None = None
    how: str | None = None
    unsure: bool = False  # whether it applies is not known
    surely: bool = False  # the allocation would not have been made at all

    def is_enough(self, needed: int | None) -> bool | None:
        """Return whether the bytes alone let the allocation pass; None: not known."""
        if self.surely:
            return True
        if self.bytes is None or needed is None or self.unsure:
            return None
        covers = self.bytes >= needed
        # at most so much never shows that it is enough, at least so much never that it is not
        sure = self.bound != AT_MOST if covers else self.bound in (EXACT, AT_MOST)
        return covers if sure else None


def remedies(case: Case) -> list[Remedy]:
    """Return every remedy that applies, in the order of the table."""
    found = [
        (name, estimate)
        for name, gives in REMEDIES.items()
        if name not in row_of_run(case.engine).arguments.without
        and (case.engine is not None or not case.logged or name in _OF_NO_ENGINE)
        for estimate in gives(case)
    ]
    return [
        Remedy(name, each.argument, each.bytes, each.bound, each.how,
               each.is_enough(case.needed), each.grounds)
        for name, each in found
    ]  # fmt: skip


def with_values(failure: NamedFailure | None, ranks: list[RankReport]) -> NamedFailure | None:
    """Return a failure whose cures have the values that the remedies of its ranks compute.

    Of several ranks the lowest value counts. It is enough for the allocation that failed, and
    ``at least`` for what came after it.
    """
    if failure is None:
        return None
    values: dict[str, float] = {}
    for rank in ranks:
        for remedy in () if rank.oom is None else rank.oom.remedies:
            option, _, value = remedy.argument.partition(" ")
            if remedy.enough is not False and re.fullmatch(r"\d+(?:\.\d+)?", value):
                values[option] = min(values.get(option, math.inf), float(value))
    cures = [
        replace(cure, value=f"{values[cure.argument]:.12g}", enough="at least")
        if cure.argument in values and cure.value is None
        else cure
        for cure in failure.cures
    ]
    return replace(failure, cures=cures)


def expandable_segments(case: Case) -> Iterator[RemedyEstimate]:
    """Free blocks that were too small, as pages that a growing segment takes over."""
    oom, blocks = case.oom, case.oom.free_blocks
    variable = "PYTORCH_CUDA_ALLOC_CONF" if case.cuda else "PYTORCH_NPU_ALLOC_CONF"
    setting = oom.allocator_settings
    if setting is None and not case.logged:
        setting = case.env.get(variable, case.env.get("PYTORCH_ALLOC_CONF"))
    if _EXPANDABLE in (setting or "").replace(" ", "").lower():
        return
    if blocks is not None:
        if blocks.expandable:
            return
        size = (blocks.too_small_bytes or 0) + blocks.other_streams_bytes + blocks.other_pools_bytes
        if oom.fragmentation_bytes is not None:  # what was freed after the failure gave nothing
            size = min(size, oom.fragmentation_bytes)
        grounds = text(
            "free blocks that were too small or of another pool; whole pages of them can move, so "
            "less than this where blocks in use lie between"
        )
    elif oom.fragmentation_bytes is not None:
        size = oom.fragmentation_bytes
        grounds = text(
            "all that was reserved and not allocated; how it is divided into blocks is not known"
        )
        if _EXPANDABLE in case.env.get(variable, "").lower():
            grounds = text(
                "{grounds}; the log sets it, for which start is not known", grounds=grounds
            )
    else:
        return
    if size >= _LEAST_BYTES:
        yield RemedyEstimate(
            f"{variable}=expandable_segments:True", grounds, size, AT_MOST, DERIVED
        )


def kv_cache_memory(case: Case) -> Iterator[RemedyEstimate]:
    budget, needed = case.rank.budget, case.needed
    granted = budget.engine_kv_cache_bytes
    if case.has_kv_cache is False or not budget.takes_fixed_size or budget.equation is None:
        return
    if granted is None or needed is None or granted <= needed:
        return
    rounded = case.rank.half_units.get("kv_cache_bytes", 0)
    grounds = text("the KV cache is smaller by this much")
    unsure = case.has_kv_cache is None
    argument = f"--kv-cache-memory-bytes {granted - rounded - needed}"
    bound = AT_LEAST if rounded else EXACT
    yield RemedyEstimate(argument, grounds, needed, bound, DERIVED, unsure)


def room_for_the_peak(case: Case) -> Iterator[RemedyEstimate]:
    """The KV cache that leaves what the serving peak needs, where that is more than was missing."""
    budget, needed = case.rank.budget, case.needed
    granted, headroom = budget.engine_kv_cache_bytes, budget.headroom_bytes
    if case.has_kv_cache is False or not budget.takes_fixed_size or granted is None:
        return
    if headroom is None or granted <= -headroom or -headroom <= (needed or 0):
        return
    grounds = text("the reserved peak of the profile run, and what came after it, fit then")
    how = MODELLED if case.simulated else DERIVED
    unsure = case.has_kv_cache is None
    argument = f"--kv-cache-memory-bytes {granted + headroom}"
    yield RemedyEstimate(argument, grounds, -headroom, EXACT, how, unsure)


def utilization(case: Case) -> Iterator[RemedyEstimate]:
    budget, needed = case.rank.budget, case.needed
    asked = share_of(case.rank, case.engine)
    total, option = asked.base_bytes, asked.option
    if option == "--gpu-memory-utilization":
        total = total or case.oom.device_total_bytes
    if case.has_kv_cache is False or budget.override is not None:
        return
    unknown = text("what was asked for is not known")
    if needed is None or total is None:
        yield RemedyEstimate(text("a lower {option}", option=option), unknown)
        return
    granted = budget.engine_kv_cache_bytes
    if granted is not None and granted <= needed:
        return
    parts, share_asked = divisor_of(budget.equation), asked.value
    share_needed = needed * parts / total
    grounds = titled(row_of_run(case.engine).arguments.share_grounds)
    unsure = case.has_kv_cache is None
    if unsure:
        grounds = text("{grounds}, if it was allocated already", grounds=grounds)
    if share_asked is None:
        lower = math.ceil(share_needed * 100) / 100
        argument = text("{option} lower by {share:.2f}", option=option, share=lower)
        size = int(lower * total / parts)
        yield RemedyEstimate(argument, grounds, size, EXACT, DERIVED, unsure)
        return
    # a step of 0.01 downwards, and no smaller one than that
    share = math.floor((share_asked - max(share_needed, 0.01)) * 100 + 1e-6) / 100
    if share > 0:
        given = int((share_asked - share) * total / parts)
        yield RemedyEstimate(f"{option} {share:.2f}", grounds, given, EXACT, DERIVED, unsure)


def image_size(case: Case) -> Iterator[RemedyEstimate]:
    """The failed allocation itself, where it grows with the pixels of the images in the step."""
    if not _multimodal(case):
        return
    option, requested, images = (
        "--mm-processor-kwargs",
        case.oom.requested_bytes,
        images_of(case.oom),
    )
    if case.oom.stage not in _BY_PIXELS or requested is None or not images:
        argument = text('{option} with a lower "max_pixels"', option=option)
        reason = text("the images of the step, or the part of it that failed, are not known")
        yield RemedyEstimate(argument, reason)
        return
    pixels = [width * height for width, height in images]
    share = 0.5
    while True:
        limit = int(max(pixels) * share)
        given = int(requested * (1 - sum(min(each, limit) for each in pixels) / sum(pixels)))
        if share <= _SMALLEST_SHARE or (case.needed is not None and given >= case.needed):
            break
        share /= 2
    yield RemedyEstimate(
        f"{option} '{{\"max_pixels\": {limit}}}'",
        text(
            "of the failed allocation alone, if it grows with the pixels of the images encoded in "
            "the step ({pixels:,}); other tensors of the part shrink too",
            pixels=sum(pixels),
        ),
        given,
        AT_LEAST,
        ESTIMATED,
    )


def images_per_prompt(case: Case) -> Iterator[RemedyEstimate]:
    """The failed allocation, where one request brought several images into the step."""
    if not _multimodal(case):
        return
    option, requested = "--limit-mm-per-prompt", case.oom.requested_bytes
    known = case.oom.requests is not None and case.oom.stage in _BY_PIXELS
    if requested is None or not known:
        argument = text("{option} with fewer images", option=option)
        reason = text("how many images the step had is not known")
        yield RemedyEstimate(argument, reason)
        return
    counts = [
        [item for item in request.items if item.encoded] for request in case.oom.requests or []
    ]
    most = max((len(items) for items in counts), default=0)
    sizes = [item.size for items in counts for item in items]
    if most < 2 or any(size is None for size in sizes):
        return  # one image per prompt: the limit would change nothing
    every = sum(width * height for width, height in (size or [0, 0] for size in sizes))
    kept = 0
    for items in counts:
        kept += max((item.size[0] * item.size[1] for item in items if item.size), default=0)
    yield RemedyEstimate(
        f"{option} '{{\"image\": 1}}'",
        text(
            "of the failed allocation alone, if it grows with the pixels: a prompt of the step has "
            "{most} images",
            most=most,
        ),
        int(requested * (1 - kept / every)),
        AT_LEAST,
        ESTIMATED,
    )


def batched_tokens(case: Case) -> Iterator[RemedyEstimate]:
    """The failed allocation, where it grows with the tokens of a full step."""
    profiling = any(phase in ("profile_run", "mm_profile") for phase in case.phases)
    if not (profiling or "request" in case.phases or case.oom.requests is not None):
        return
    option, tokens = "--max-num-batched-tokens", case.max_batched_tokens
    requested, stage = case.oom.requested_bytes, case.oom.stage
    scheduled = [request.scheduled_tokens for request in case.oom.requests or []]
    full = profiling or (tokens is not None and sum(size or 0 for size in scheduled) > tokens // 2)
    if stage not in _BY_TOKENS or requested is None or tokens is None or not full:
        reason = (
            text("the encoder works on whole images: this limits how many are in a step")
            if stage == "mm_encoder"
            else text("how the failed allocation depends on the tokens of a step is not known")
        )
        yield RemedyEstimate(text("a lower {option}", option=option), reason)
        return
    after = tokens // 2
    total = tokens if profiling else sum(size or 0 for size in scheduled)
    yield RemedyEstimate(
        f"{option} {after}",
        text(
            "of the failed allocation alone, if it grows with the {tokens:,} tokens of the step",
            tokens=total,
        ),
        int(requested * (1 - min(after, total) / total)),
        AT_LEAST,
        ESTIMATED,
    )


def fewer_graphs(case: Case) -> Iterator[RemedyEstimate]:
    """Graphs that were captured, or were being captured."""
    capture, options = (
        first_of(case.rank.phases, "graph_capture"),
        row_of_run(case.engine).arguments,
    )
    if case.eager or case.has_kv_cache is False:
        return
    how = MODELLED if case.simulated else MEASURED
    if "graph_capture" in case.phases:
        taken = None if capture is None else case.oom.taken_since(capture.before)
        grounds = text("taken since graph_capture began; without graphs nothing is captured")
        if taken is None or taken <= 0:
            taken, grounds = None, text("without graphs nothing is captured")
        bound, source = (None, None) if taken is None else (AT_LEAST, how)
        yield RemedyEstimate(options.no_graphs, grounds, taken, bound, source, surely=True)
        fewer = text("fewer sizes in {option}", option=options.graph_sizes)
        if options.largest_graph is not None:
            fewer = text("a lower {option}", option=options.largest_graph)
        reason = text("how many bytes a graph of each size takes was not measured")
        yield RemedyEstimate(fewer, reason)
        return
    graphs = case.rank.figures.get("graph_bytes") or case.oom.graph_pools_bytes
    if not graphs:
        return
    halved = text("half of the sizes in {option}", option=options.graph_sizes)
    if options.largest_graph is not None:
        halved = text("a lower {option}", option=options.largest_graph)
    half = text("half of the captured graphs, if each size takes as much")
    subtracted = any(row.name == "graph" and row.subtracted for row in case.rank.budget.terms)
    for argument, size, how_known, grounds in (
        (options.no_graphs, int(graphs), how, text("all captured graphs")),
        (halved, int(graphs) // 2, ESTIMATED, half),
    ):
        if subtracted:
            grounds = text(
                "{grounds}; the equation subtracts graphs, so that the KV cache grows by what it "
                "subtracts less",
                grounds=grounds,
            )
        yield RemedyEstimate(argument, grounds, size, EXACT, how_known, subtracted)


def other_processes(case: Case) -> Iterator[RemedyEstimate]:
    oom = case.oom
    device = text("the device")
    if oom.device is not None:
        device = text("device {device}", device=oom.device)
    end = text("end what else is on {device}, or take another one", device=device)
    size = next((row.bytes for row in oom.owners if row.component == "other_processes"), None)
    if size and size >= _LEAST_BYTES:
        yield RemedyEstimate(
            end, text("what other processes held on the device"), size, EXACT, MEASURED
        )
    outside, total = oom.other_bytes, oom.device_total_bytes
    if size is None and outside is not None and total is not None and outside > total // 3:
        grounds = text(
            "outside this process's allocator: other processes, and what this one holds outside "
            "torch"
        )
        yield RemedyEstimate(end, grounds, outside, AT_MOST, DERIVED)


def lora_slots(case: Case) -> Iterator[RemedyEstimate]:
    """Buffers that grow with the number of adapters and with their rank."""
    argument = text("a lower {first} or {second}", first="--max-loras", second="--max-lora-rank")
    grounds = text("all LoRA slots: they grow with both")
    yield from _less_weights(case, "lora", argument, grounds, AT_MOST)


def draft_model(case: Case) -> Iterator[RemedyEstimate]:
    argument = text("without {option}", option="--speculative-config")
    yield from _less_weights(case, "draft_weights", argument, text("the draft model"), AT_LEAST)


def _less_weights(
    case: Case, owner: str, argument: Text, grounds: Text, bound: str
) -> Iterator[RemedyEstimate]:
    """Yield what makes the weights smaller, where its owner held enough for a row."""
    held = next((row.bytes for row in case.oom.owners if row.component == owner), None)
    if held is None or held < _LEAST_BYTES:
        return
    unsure = case.has_kv_cache is not False
    if unsure:
        grounds = text(
            "{grounds}; the equation subtracts the weights, so that the KV cache grows by as much",
            grounds=grounds,
        )
    yield RemedyEstimate(argument, grounds, held, bound, DERIVED, unsure)


def less_per_device(case: Case) -> Iterator[RemedyEstimate]:
    """More ranks, or fewer bits, where the weights did not fit or the phase is not known."""
    if "weight_load" in case.phases or not case.phases:
        more = text("more ranks ({option})", option=row_of_run(case.engine).arguments.ranks)
        yield RemedyEstimate(more, _UNKNOWN_SHARE)
        fewer = text("weights of fewer bits ({option})", option="--quantization")
        yield RemedyEstimate(fewer, _UNKNOWN_SHARE)


def sequences(case: Case) -> Iterator[RemedyEstimate]:
    if "profile_run" in case.phases and "mm_profile" not in case.phases:
        argument = text("a lower {option}", option="--max-num-seqs")
        yield RemedyEstimate(argument, _UNKNOWN_SHARE)


def steps(case: Case) -> Iterator[RemedyEstimate]:
    """Smaller steps of an engine that runs none of full size before it serves."""
    if case.has_kv_cache is False or "graph_capture" in case.phases:
        return
    for option in row_of_run(case.engine).arguments.steps:
        argument = text("a lower {option}", option=option)
        yield RemedyEstimate(argument, _UNKNOWN_SHARE)


def _multimodal(case: Case) -> bool:
    """Return whether images are to do with it."""
    return (
        "mm_profile" in case.phases
        or case.oom.stage in ("mm_encoder", "mm_merge", "mm_gather")
        or any(request.items for request in case.oom.requests or [])
        or any(each.stage in _BY_PIXELS for each in case.oom.readings)
    )


#: Id -> what it gives, in the order in which they are worth trying.
REMEDIES: dict[str, Callable[[Case], Iterator[RemedyEstimate]]] = {
    remedy.__name__: remedy
    for remedy in (
        room_for_the_peak,
        expandable_segments,
        kv_cache_memory,
        utilization,
        fewer_graphs,
        other_processes,
        lora_slots,
        draft_model,
        less_per_device,
        image_size,
        images_per_prompt,
        batched_tokens,
        sequences,
        steps,
    )
}


def room_for(rank: RankReport, oom: Oom, kv_cache: str | None) -> str:
    """Return the remedies to try first: those that are enough alone, else those that may be.

    Args:
        rank: that ran out of memory.
        oom: its failure, with the table of remedies, the better ones first.
        kv_cache: state of the KV cache (`kv_cache_state`); None: not known.
    """
    named = _named(oom)
    if not named:
        return text("lower the engine's share of the device, or make its steps smaller")

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
