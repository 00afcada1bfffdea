"""What an argument would have given in one case of a failed allocation.

Each function yields bytes and figures, nothing where its argument does not apply; ``remedies.toml``
has the words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vllm_memprof.accounting.budget.engine_options import allocator_variable, share_of
from vllm_memprof.accounting.budget.equations import divisor_of
from vllm_memprof.accounting.model import AT_LEAST, EXACT, Oom, RankReport, RunSummary
from vllm_memprof.accounting.oom.failed_allocation import (
    NOT_YET,
    images_of,
    kv_cache_state,
    phases_of,
)
from vllm_memprof.engines import row_of_run
from vllm_memprof.engines.base import Arguments
from vllm_memprof.options import is_expandable
from vllm_memprof.record.spans import DERIVED, ESTIMATED, MEASURED, MODELLED, How, first_of
from vllm_memprof.text import titled
from vllm_memprof.units import MIB, Amount

#: Less than this is not worth a row.
_LEAST_BYTES = MIB
#: Parts of a step whose tensors grow with the pixels, or with the tokens, that they are given.
_BY_PIXELS = ("mm_encoder", "mm_merge", "mm_gather")
_BY_TOKENS = ("model_forward", "embedding", "logits", "mm_merge", "mm_gather")
#: Images are made this much smaller at most, by factors of 2 of their pixels.
_SMALLEST_SHARE = 1 / 16


@dataclass(frozen=True)
class Case:
    """A failed allocation and the run around it."""

    rank: RankReport
    oom: Oom
    run: RunSummary
    max_batched_tokens: Amount
    for_weights: bool = False  # named so: the weights did not fit, whatever the phase

    @property
    def logged(self) -> bool:
        """Return whether it was read from a log, not recorded by hooks."""
        return self.run.evidence.partial

    @property
    def arguments(self) -> Arguments:
        """Return what the engine calls its options."""
        return row_of_run(self.run.engine).arguments

    @property
    def phases(self) -> list[str]:
        """Return the phases in which it failed, the innermost first."""
        return phases_of(self.rank, self.oom)

    @property
    def has_kv_cache(self) -> bool | None:
        """Return whether the KV cache was on the device, or being allocated; None: not known."""
        state = kv_cache_state(self.rank, self.oom)
        return (False if self.for_weights else None) if state is None else state != NOT_YET

    @property
    def needed(self) -> int | None:
        """Return the bytes that would have to be free besides, at least; roundings included."""
        if self.oom.requested_bytes is None:
            return None
        missing = self.oom.missing_bytes
        size = self.oom.requested_bytes if missing is None else missing
        rounded = self.rank.rounding("oom_requested_bytes", "oom_free_bytes")
        return size + max(rounded, self.oom.requested_half_unit_bytes)

    @property
    def multimodal(self) -> bool:
        """Return whether images are to do with it."""
        stages = [self.oom.stage, *(each.stage for each in self.oom.readings)]
        return (
            "mm_profile" in self.phases
            or any(stage in _BY_PIXELS for stage in stages)
            or any(request.items for request in self.oom.requests or [])
        )


@dataclass(frozen=True)
class Estimate:
    """What an argument gives in one case. What is None is as its row says."""

    bytes: Amount  # None: not known
    figures: Mapping[str, object]  # by the names that the sentences of the row have for them
    bound: str | None = None
    how: How | None = None
    unsure: bool = False  # whether it applies is not known
    surely: bool = False  # the allocation would not have been made at all


def expandable_segments(case: Case) -> Iterator[Estimate]:
    """Free blocks that were too small, as pages that a growing segment takes over."""
    oom, blocks, env = case.oom, case.oom.free_blocks, case.run.env
    variable = allocator_variable(case.run)
    setting, size = oom.allocator_settings, oom.fragmentation_bytes
    if setting is None and not case.logged:
        setting = env.get(variable, env.get("PYTORCH_ALLOC_CONF"))
    if is_expandable(setting):
        return
    if blocks is not None:
        free = (blocks.too_small_bytes or 0) + blocks.other_streams_bytes + blocks.other_pools_bytes
        # what was freed after the failure gave nothing
        size = 0 if blocks.expandable else free if size is None else min(free, size)
    if size is not None and size >= _LEAST_BYTES:
        by_log = blocks is None and is_expandable(env.get(variable))
        yield Estimate(size, {"variable": variable, "blocks": blocks, "set_by_log": by_log})


def kv_cache_memory(case: Case) -> Iterator[Estimate]:
    """The KV cache, smaller by what was missing; nothing where the serving peak needs more."""
    budget, needed = case.rank.budget, case.needed
    granted = budget.engine_kv_cache_bytes
    if not budget.takes_fixed_size or budget.equation is None or any(room_for_the_peak(case)):
        return
    if granted is not None and needed is not None and granted > needed:
        rounded = case.rank.half_units.get("kv_cache_bytes", 0)
        size = granted - rounded - needed
        yield Estimate(needed, {"size": size}, bound=AT_LEAST if rounded else EXACT)


def room_for_the_peak(case: Case) -> Iterator[Estimate]:
    """The KV cache that leaves what the serving peak needs, where that is more than was missing."""
    granted, headroom = case.rank.budget.engine_kv_cache_bytes, case.rank.budget.headroom_bytes
    if not case.rank.budget.takes_fixed_size or granted is None or headroom is None:
        return
    if granted > -headroom > (case.needed or 0):
        how = MODELLED if case.run.simulated else DERIVED
        yield Estimate(-headroom, {"size": granted + headroom}, how=how)


def utilization(case: Case) -> Iterator[Estimate]:
    """The KV cache, by the engine's share of the device."""
    budget, needed, granted = case.rank.budget, case.needed, case.rank.budget.engine_kv_cache_bytes
    asked = share_of(case.rank, case.run.engine)
    total, parts = asked.base_bytes, divisor_of(budget.equation)
    if asked.option == "--gpu-memory-utilization":
        total = total or case.oom.device_total_bytes
    figures = {
        "option": asked.option,
        "engines_grounds": titled(case.arguments.share_grounds),
    }
    if budget.override is not None:
        return
    if needed is None or total is None:
        yield Estimate(None, {**figures, "share_unknown": True})
    elif granted is None or granted > needed:
        share = needed * parts / total
        if asked.value is None:
            less = math.ceil(share * 100) / 100
            yield Estimate(int(less * total / parts), {**figures, "less": less})
            return
        # a step of 0.01 downwards, and no smaller one than that
        lower = math.floor((asked.value - max(share, 0.01)) * 100 + 1e-6) / 100
        if lower > 0:
            size = int((asked.value - lower) * total / parts)
            yield Estimate(size, {**figures, "share": lower})


def image_size(case: Case) -> Iterator[Estimate]:
    """The failed allocation itself, where it grows with the pixels of the images in the step."""
    requested, images = case.oom.requested_bytes, images_of(case.oom)
    if not case.multimodal:
        return
    if case.oom.stage not in _BY_PIXELS or requested is None or not images:
        yield Estimate(None, {})
        return
    pixels = [width * height for width, height in images]
    share = 0.5
    while True:
        limit = int(max(pixels) * share)
        given = int(requested * (1 - sum(min(each, limit) for each in pixels) / sum(pixels)))
        if share <= _SMALLEST_SHARE or (case.needed is not None and given >= case.needed):
            break
        share /= 2
    yield Estimate(given, {"limit": limit, "pixels": sum(pixels)})


def images_per_prompt(case: Case) -> Iterator[Estimate]:
    """The failed allocation, where one request brought several images into the step."""
    requested, requests = case.oom.requested_bytes, case.oom.requests
    if not case.multimodal:
        return
    if requested is None or requests is None or case.oom.stage not in _BY_PIXELS:
        yield Estimate(None, {})
        return
    sizes = [[item.size for item in request.items if item.encoded] for request in requests]
    pixels = [[size[0] * size[1] for size in each if size is not None] for each in sizes]
    most = max(map(len, sizes), default=0)
    if most > 1 and sum(map(len, sizes)) == sum(map(len, pixels)):  # else it changes nothing
        kept = sum(max(each, default=0) for each in pixels)
        yield Estimate(int(requested * (1 - kept / sum(map(sum, pixels)))), {"most": most})


def batched_tokens(case: Case) -> Iterator[Estimate]:
    """The failed allocation, where it grows with the tokens of a full step."""
    profiling = any(phase in ("profile_run", "mm_profile") for phase in case.phases)
    if not (profiling or "request" in case.phases or case.oom.requests is not None):
        return
    tokens, requested, stage = case.max_batched_tokens, case.oom.requested_bytes, case.oom.stage
    scheduled = sum(request.scheduled_tokens or 0 for request in case.oom.requests or [])
    full = profiling or (tokens is not None and scheduled > tokens // 2)
    if stage not in _BY_TOKENS or requested is None or tokens is None or not full:
        yield Estimate(None, {"encoder": stage == "mm_encoder"})
        return
    after, total = tokens // 2, tokens if profiling else scheduled
    given = int(requested * (1 - min(after, total) / total))
    yield Estimate(given, {"after": after, "tokens": total})


def fewer_graphs(case: Case) -> Iterator[Estimate]:
    """Graphs that were captured, or were being captured."""
    options, how = case.arguments, MODELLED if case.run.simulated else MEASURED
    fewer = {"sizes": options.graph_sizes, "largest": options.largest_graph}
    if case.run.eager:
        return
    if "graph_capture" in case.phases:
        capture = first_of(case.rank.phases, "graph_capture")
        taken = None if capture is None else case.oom.taken_since(capture.before)
        taken = taken if (taken or 0) > 0 else None
        figures = {"no_graphs": options.no_graphs, "capturing": True, "taken": taken}
        yield Estimate(taken, figures, AT_LEAST, how, surely=True)
        yield Estimate(None, fewer)
        return
    graphs = int(case.rank.figures.get("graph_bytes") or case.oom.graph_pools_bytes or 0)
    if graphs:
        subtracted = "graph" in case.rank.budget.subtracted
        yield Estimate(graphs, {"no_graphs": options.no_graphs}, how=how, unsure=subtracted)
        yield Estimate(graphs // 2, {**fewer, "half": True}, how=ESTIMATED, unsure=subtracted)


def other_processes(case: Case) -> Iterator[Estimate]:
    """What others held on the device, or at most as much."""
    oom, figures = case.oom, {"device": case.oom.device}
    size = next((row.bytes for row in oom.owners if row.component == "other_processes"), None)
    outside, total = oom.other_bytes, oom.device_total_bytes
    if size is not None and size >= _LEAST_BYTES:
        yield Estimate(size, {**figures, "held": True}, EXACT, MEASURED)
    elif size is None and outside is not None and total is not None and outside > total // 3:
        yield Estimate(outside, figures)


def smaller_weights(case: Case, owner: str) -> Iterator[Estimate]:
    """What makes the weights smaller, where its owner held enough for a row."""
    held = next((each.bytes for each in case.oom.owners if each.component == owner), None)
    if held is not None and held >= _LEAST_BYTES:
        yield Estimate(held, {}, unsure=case.has_kv_cache is not False)


def less_per_device(case: Case) -> Iterator[Estimate]:
    """More ranks, or fewer bits, where the weights did not fit or the phase is not known."""
    if "weight_load" in case.phases or not case.phases:
        yield Estimate(None, {"ranks": case.arguments.ranks})
        yield Estimate(None, {})


def sequences(case: Case) -> Iterator[Estimate]:
    """Fewer requests in the profile run."""
    if "profile_run" in case.phases and "mm_profile" not in case.phases:
        yield Estimate(None, {})


def steps(case: Case) -> Iterator[Estimate]:
    """Smaller steps of an engine that runs none of full size before it serves."""
    if "graph_capture" not in case.phases:
        for option in case.arguments.steps:
            yield Estimate(None, {"option": option})
