"""What would have let a failed allocation pass: a table of arguments, each with what it gives.

Each row of ``REMEDIES`` looks at one case and returns the bytes that it gives and on what grounds,
or None where it does not apply. What cannot be quantified says so; a row that gives too little
alone says that too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from vllm_memprof.accounting.engine_options import share_of
from vllm_memprof.accounting.equations import divisor_of
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
from vllm_memprof.accounting.oom import NOT_YET, kv_cache_state, phases_of
from vllm_memprof.engines import row_of_run
from vllm_memprof.record.failures import StepItem
from vllm_memprof.record.spans import Span, first_of
from vllm_memprof.text import Text, text
from vllm_memprof.units import MIB, minus

#: Less than this is not worth a row.
_LEAST_BYTES = MIB
#: Parts of a step whose tensors grow with the pixels, or with the tokens, that they are given.
_BY_PIXELS = ("mm_encoder", "mm_merge", "mm_gather")
_BY_TOKENS = ("model_forward", "embedding", "logits", "mm_merge", "mm_gather")
#: Images are made this much smaller at most, by factors of 2 of their pixels.
_SMALLEST_SHARE = 1 / 16
_EXPANDABLE = "expandable_segments:true"
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

    @property
    def images(self) -> list[StepItem]:
        """Return the images that the encoder got in the step, of known size."""
        return [
            item
            for request in self.oom.requests or []
            for item in request.items
            if item.encoded and item.size is not None
        ]


@dataclass(frozen=True)
class RemedyEstimate:
    """What an argument gives in one case."""

    argument: str
    bytes: int | None
    bound: str | None
    how: str | None
    grounds: str
    unsure: bool = False  # whether it applies is not known
    surely: bool = False  # the allocation would not have been made at all


@dataclass(frozen=True)
class RemedyRow:
    id: str
    gives: Callable[[Case], Iterator[RemedyEstimate]]


def remedies(case: Case) -> list[Remedy]:
    """Return every remedy that applies, in the order of the table."""
    return [
        Remedy(
            row.id,
            given.argument,
            given.bytes,
            given.bound,
            given.how,
            _enough(case, given),
            given.grounds,
        )
        for row in REMEDIES
        if row.id not in row_of_run(case.engine).arguments.without
        for given in row.gives(case)
    ]


def _enough(case: Case, given: RemedyEstimate) -> bool | None:
    """Return whether the bytes alone let the allocation pass; None: not known."""
    if given.surely:
        return True
    if given.bytes is None or case.needed is None or given.unsure:
        return None
    covers = given.bytes >= case.needed
    match given.bound:
        case "exact":
            return covers
        case "at_most":
            return None if covers else False
        case _:
            return True if covers else None


def _expandable_segments(case: Case) -> Iterator[RemedyEstimate]:
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
            f"{variable}=expandable_segments:True", size, AT_MOST, DERIVED, grounds
        )


def _kv_cache_memory(case: Case) -> Iterator[RemedyEstimate]:
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
    yield RemedyEstimate(argument, needed, bound, DERIVED, grounds, unsure=unsure)


def _room_for_the_peak(case: Case) -> Iterator[RemedyEstimate]:
    """The KV cache that leaves what the serving peak needs, where that is more than was missing."""
    budget, needed = case.rank.budget, case.needed
    granted, spare = budget.engine_kv_cache_bytes, budget.spare_bytes
    if case.has_kv_cache is False or not budget.takes_fixed_size or granted is None:
        return
    if spare is None or granted <= -spare or -spare <= (needed or 0):
        return
    grounds = text("the reserved peak of the profile run, and what came after it, fit then")
    how = MODELLED if case.simulated else DERIVED
    unsure = case.has_kv_cache is None
    argument = f"--kv-cache-memory-bytes {granted + spare}"
    yield RemedyEstimate(argument, -spare, EXACT, how, grounds, unsure=unsure)


def _utilization(case: Case) -> Iterator[RemedyEstimate]:
    budget, needed = case.rank.budget, case.needed
    asked = share_of(case.rank, case.engine)
    total, option = asked.base_bytes, asked.option
    if option == "--gpu-memory-utilization":
        total = total or case.oom.device_total_bytes
    if case.has_kv_cache is False or budget.override is not None:
        return
    unknown = text("what was asked for is not known")
    if needed is None or total is None:
        yield RemedyEstimate(text("a lower {option}", option=option), None, None, None, unknown)
        return
    granted = budget.engine_kv_cache_bytes
    if granted is not None and granted <= needed:
        return
    parts, utilization = divisor_of(budget.equation), asked.value
    lower = math.ceil(needed * parts / total * 10_000) / 10_000
    grounds = row_of_run(case.engine).arguments.share_grounds
    unsure = case.has_kv_cache is None
    if unsure:
        grounds = text("{grounds}, if it was allocated already", grounds=grounds)
    if utilization is None:
        argument = text("{option} lower by {share:.4f}", option=option, share=lower)
        size = int(lower * total / parts)
        yield RemedyEstimate(argument, size, EXACT, DERIVED, grounds, unsure=unsure)
        return
    share = math.floor((utilization - lower) * 10_000 + 1e-6) / 10_000
    if share > 0:
        given = int((utilization - share) * total / parts)
        yield RemedyEstimate(f"{option} {share:.4f}", given, EXACT, DERIVED, grounds, unsure=unsure)


def _image_size(case: Case) -> Iterator[RemedyEstimate]:
    """The failed allocation itself, where it grows with the pixels of the images in the step."""
    if not _multimodal(case):
        return
    option, requested, images = "--mm-processor-kwargs", case.oom.requested_bytes, case.images
    if case.oom.stage not in _BY_PIXELS or requested is None or not images:
        argument = text('{option} with a lower "max_pixels"', option=option)
        reason = text("the images of the step, or the part of it that failed, are not known")
        yield RemedyEstimate(argument, None, None, None, reason)
        return
    pixels = [width * height for width, height in (item.size or [0, 0] for item in images)]
    share = 0.5
    while True:
        limit = int(max(pixels) * share)
        given = int(requested * (1 - sum(min(each, limit) for each in pixels) / sum(pixels)))
        if share <= _SMALLEST_SHARE or (case.needed is not None and given >= case.needed):
            break
        share /= 2
    yield RemedyEstimate(
        f"{option} '{{\"max_pixels\": {limit}}}'",
        given,
        AT_LEAST,
        ESTIMATED,
        text(
            "of the failed allocation alone, if it grows with the pixels of the images encoded in "
            "the step ({pixels:,}); other tensors of the part shrink too",
            pixels=sum(pixels),
        ),
    )


def _images_per_prompt(case: Case) -> Iterator[RemedyEstimate]:
    """The failed allocation, where one request brought several images into the step."""
    if not _multimodal(case):
        return
    option, requested = "--limit-mm-per-prompt", case.oom.requested_bytes
    known = case.oom.requests is not None and case.oom.stage in _BY_PIXELS
    if requested is None or not known:
        argument = text("{option} with fewer images", option=option)
        reason = text("how many images the step had is not known")
        yield RemedyEstimate(argument, None, None, None, reason)
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
        int(requested * (1 - kept / every)),
        AT_LEAST,
        ESTIMATED,
        text(
            "of the failed allocation alone, if it grows with the pixels: a prompt of the step has "
            "{most} images",
            most=most,
        ),
    )


def _batched_tokens(case: Case) -> Iterator[RemedyEstimate]:
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
        yield RemedyEstimate(text("a lower {option}", option=option), None, None, None, reason)
        return
    after = tokens // 2
    total = tokens if profiling else sum(size or 0 for size in scheduled)
    yield RemedyEstimate(
        f"{option} {after}",
        int(requested * (1 - min(after, total) / total)),
        AT_LEAST,
        ESTIMATED,
        text(
            "of the failed allocation alone, if it grows with the {tokens:,} tokens of the step",
            tokens=total,
        ),
    )


def _fewer_graphs(case: Case) -> Iterator[RemedyEstimate]:
    """Graphs that were captured, or were being captured."""
    capture, options = (
        first_of(case.rank.phases, "graph_capture"),
        row_of_run(case.engine).arguments,
    )
    if case.eager or case.has_kv_cache is False:
        return
    how = MODELLED if case.simulated else MEASURED
    if "graph_capture" in case.phases:
        taken = None if capture is None else _taken_since(case, capture)
        grounds = text("taken since graph_capture began; without graphs nothing is captured")
        if taken is None or taken <= 0:
            taken, grounds = None, text("without graphs nothing is captured")
        bound, source = (None, None) if taken is None else (AT_LEAST, how)
        yield RemedyEstimate(options.no_graphs, taken, bound, source, grounds, surely=True)
        fewer = text("fewer sizes in {option}", option=options.graph_sizes)
        if options.largest_graph is not None:
            fewer = text("a lower {option}", option=options.largest_graph)
        reason = text("how many bytes a graph of each size takes was not measured")
        yield RemedyEstimate(fewer, None, None, None, reason)
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
        yield RemedyEstimate(argument, size, EXACT, how_known, grounds, unsure=subtracted)


def _taken_since(case: Case, span: Span) -> int | None:
    """Return by how much the device got fuller from the begin of a phase to the failure, bytes."""
    oom, at = case.oom, span.before
    if at is None:
        return None
    used = minus(oom.device_total_bytes, oom.free_bytes)
    return minus(used, minus(at.device_total_bytes, at.device_free_bytes))


def _other_processes(case: Case) -> Iterator[RemedyEstimate]:
    oom = case.oom
    device = text("the device")
    if oom.device is not None:
        device = text("device {device}", device=oom.device)
    end = text("end what else is on {device}, or take another one", device=device)
    size = next((row.bytes for row in oom.owners if row.component == "other_processes"), None)
    if size and size >= _LEAST_BYTES:
        yield RemedyEstimate(
            end, size, EXACT, MEASURED, text("what other processes held on the device")
        )
    outside, total = oom.other_bytes, oom.device_total_bytes
    if size is None and outside is not None and total is not None and outside > total // 3:
        grounds = text(
            "outside this process's allocator: other processes, and what this one holds outside "
            "torch"
        )
        yield RemedyEstimate(end, outside, AT_MOST, DERIVED, grounds)


def _lora_slots(case: Case) -> Iterator[RemedyEstimate]:
    """Buffers that grow with the number of adapters and with their rank."""
    held = _held(case, "lora")
    if held is not None:
        argument = text(
            "a lower {first} or {second}", first="--max-loras", second="--max-lora-rank"
        )
        grounds, unsure = _less_weights(case, text("all LoRA slots: they grow with both"))
        yield RemedyEstimate(argument, held, AT_MOST, DERIVED, grounds, unsure=unsure)


def _draft_model(case: Case) -> Iterator[RemedyEstimate]:
    held = _held(case, "draft_weights")
    if held is not None:
        argument = text("without {option}", option="--speculative-config")
        grounds, unsure = _less_weights(case, text("the draft model"))
        yield RemedyEstimate(argument, held, AT_LEAST, DERIVED, grounds, unsure=unsure)


def _held(case: Case, owner: str) -> int | None:
    """Return what an owner held at the failure, where that is worth a row."""
    size = next((row.bytes for row in case.oom.owners if row.component == owner), None)
    return None if size is None or size < _LEAST_BYTES else size


def _less_weights(case: Case, grounds: Text) -> tuple[Text, bool]:
    """Return the grounds of a row that makes the weights smaller, and whether it is unsure."""
    if case.has_kv_cache is False:
        return grounds, False
    more = text(
        "{grounds}; the equation subtracts the weights, so that the KV cache grows by as much",
        grounds=grounds,
    )
    return more, True


def _less_per_device(case: Case) -> Iterator[RemedyEstimate]:
    """More ranks, or fewer bits, where the weights did not fit or the phase is not known."""
    if "weight_load" in case.phases or not case.phases:
        more = text("more ranks ({option})", option=row_of_run(case.engine).arguments.ranks)
        yield RemedyEstimate(more, None, None, None, _UNKNOWN_SHARE)
        fewer = text("weights of fewer bits ({option})", option="--quantization")
        yield RemedyEstimate(fewer, None, None, None, _UNKNOWN_SHARE)


def _sequences(case: Case) -> Iterator[RemedyEstimate]:
    if "profile_run" in case.phases and "mm_profile" not in case.phases:
        argument = text("a lower {option}", option="--max-num-seqs")
        yield RemedyEstimate(argument, None, None, None, _UNKNOWN_SHARE)


def _steps(case: Case) -> Iterator[RemedyEstimate]:
    """Smaller steps of an engine that runs none of full size before it serves."""
    if case.has_kv_cache is False or "graph_capture" in case.phases:
        return
    for option in row_of_run(case.engine).arguments.steps:
        argument = text("a lower {option}", option=option)
        yield RemedyEstimate(argument, None, None, None, _UNKNOWN_SHARE)


def _multimodal(case: Case) -> bool:
    """Return whether images are to do with it."""
    return (
        "mm_profile" in case.phases
        or case.oom.stage in ("mm_encoder", "mm_merge", "mm_gather")
        or any(request.items for request in case.oom.requests or [])
        or any(each.stage in _BY_PIXELS for each in case.oom.readings)
    )


#: In the order in which they are worth trying.
REMEDIES: tuple[RemedyRow, ...] = (
    RemedyRow("room_for_the_peak", _room_for_the_peak),
    RemedyRow("expandable_segments", _expandable_segments),
    RemedyRow("kv_cache_memory", _kv_cache_memory),
    RemedyRow("utilization", _utilization),
    RemedyRow("fewer_graphs", _fewer_graphs),
    RemedyRow("other_processes", _other_processes),
    RemedyRow("lora_slots", _lora_slots),
    RemedyRow("draft_model", _draft_model),
    RemedyRow("less_per_device", _less_per_device),
    RemedyRow("image_size", _image_size),
    RemedyRow("images_per_prompt", _images_per_prompt),
    RemedyRow("batched_tokens", _batched_tokens),
    RemedyRow("sequences", _sequences),
    RemedyRow("steps", _steps),
)
