"""Requests, multimodal stages and memory over time of one rank, from what was sampled.

A request has no memory of its own: its figures are those of the rank while it ran, so a row says
with how many others it was in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import nlargest
from operator import attrgetter

from vllm_memprof.accounting.model import MmProfile, Point, RankReport, RequestRow, StageRow
from vllm_memprof.accounting.readings.run import RankReadings
from vllm_memprof.accounting.readings.startup import growth, value
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.record.samples import (
    MediaStage,
    RequestFigures,
    RequestMemory,
    RequestRecord,
    Sample,
)
from vllm_memprof.record.schema import LARGEST, STAGES
from vllm_memprof.record.spans import Span, first_of
from vllm_memprof.units import largest, minus, only_known, product_or_none

#: Points of a curve in a report at most: what lies between two is in their lowest and highest.
MOST_POINTS = 400
#: Figures of the curve: name -> which samples have them.
WORKER, DEVICE, CORE = "samples", "device_samples", "kv_samples"
CURVES: Mapping[str, str] = {
    "allocated_bytes": WORKER,
    "reserved_bytes": WORKER,
    "encoder_cache_bytes": WORKER,
    "device_free_bytes": DEVICE,
    "non_torch_bytes": DEVICE,
    "host_rss_bytes": DEVICE,
    "kv_blocks_used": CORE,
    "running": CORE,
    "waiting": CORE,
}

#: Figure of a curve -> the figure that tells how high it was between two readings.
_PEAK_OF = {"allocated_bytes": "allocated_peak_bytes", "reserved_bytes": "reserved_peak_bytes"}


def sampled(read: RankReadings, rank: RankReport) -> RankReport:
    """Add what was sampled of a rank while it served."""
    run, process = read.run, read.process
    return replace(
        rank,
        requests=request_rows(run, process),
        stages=stage_rows(process),
        samples=points(run, process),
        mm_profile=mm_profile(process) if process.served.samples else None,
        thinned=process.served.thinned,
        dropped=process.served.dropped,
    )


def request_rows(run: Run, process: ProcessRecord) -> list[RequestRow]:
    """Return the requests of a rank, in the order in which they began.

    What the worker read is joined with what its engine core knows; a request that one of them alone
    has a line of is a row with the rest unknown.
    """
    start = run.info.start_t_ns
    cores: dict[str, list[RequestRecord]] = {}
    for core in engine_cores(process, run.serving)[:1]:
        for record in core.served.requests:
            cores.setdefault(record.id, []).append(record)
    pairs = [
        (memory, known.pop(0) if (known := cores.get(memory.id)) else RequestRecord(memory.id))
        for memory in process.served.request_memory
    ]
    dropped = process.served.dropped.get("request_memory")
    pairs += [
        (RequestMemory(record.id), record)
        for waiting in cores.values()
        for record in waiting
        if record.end_ns is None or not dropped
    ]
    pairs.sort(key=lambda pair: pair[0].begin_ns or pair[1].begin_ns or 0)
    return [_row(memory, core, start) for memory, core in pairs]


def engine_cores(process: ProcessRecord, cores: list[ProcessRecord]) -> list[ProcessRecord]:
    """Return those of some engine cores whose requests a process serves; it may be one itself.

    Replicas do not name their engine cores: a core is known by being the parent of its workers. The
    API server serves those of all.
    """
    if process in cores:
        return [process]
    if len(cores) == 1 or not process.is_worker:
        return cores
    who = process.identity
    parent = (who.host, who.ppid)
    return [
        core
        for core in cores
        if who.ppid is not None and (core.identity.host, core.identity.pid) == parent
    ]


def _row(memory: RequestMemory, core: RequestRecord, start: int | None) -> RequestRow:
    items = core.items or memory.items
    tokens = only_known(item.tokens for item in items)
    known = {name: getattr(memory, name) for name in RequestFigures.__dataclass_fields__}
    if core.prompt_tokens is not None:
        known["prompt_tokens"] = core.prompt_tokens
    return RequestRow(
        **known,
        output_tokens=core.output_tokens,
        images=[
            None if item.size is None else list(item.size)
            for item in items
            if item.modality == "image"
        ],
        allocated_peak_at_most_bytes=memory.allocated_run_peak_bytes,
        image_tokens=sum(tokens) if tokens else None,
        begin_seconds=_seconds(memory.begin_ns, start),
        end_seconds=_seconds(memory.end_ns, start),
        reason=core.reason,
        finished=None if memory.end_ns is None else memory.finished,
    )


def _seconds(t_ns: int | None, start_ns: int | None) -> float | None:
    return None if t_ns is None or start_ns is None else (t_ns - start_ns) / 1e9


def stage_rows(process: ProcessRecord) -> list[StageRow]:
    """Return the multimodal stages that a rank went through, in the order of a step."""
    rows = []
    for name in STAGES:
        passages = [stage for stage in process.served.stages if stage.stage == name]
        if not passages:
            continue
        # the largest passage handed out most bytes, then has most tokens
        most = max(
            passages,
            key=lambda each: (each.figures["allocated_total_bytes"] or 0, _tokens_of(each)),
        )
        figures, moved = most.figures, name in ("mm_encoder", "mm_merge")
        held = minus(figures["allocated_bytes"], figures["allocated_before_bytes"])
        rows.append(
            StageRow(
                stage=name,
                passages=len(passages),
                failed=sum(stage.error is not None for stage in passages),
                items=sum(len(stage.items) for stage in passages),
                allocated_total_bytes=figures["allocated_total_bytes"] if moved else None,
                held_bytes=held if moved else None,
                allocated_peak_bytes=largest(
                    each.figures["allocated_peak_bytes"] for each in passages
                ),
                request=next(iter(most.requests), None),
                image=_largest_size(most),
                cache_bytes=largest(
                    each.figures["encoder_cache_bytes"] or None for each in passages
                ),
            )
        )
    return rows


def points(run: Run, process: ProcessRecord) -> list[Point]:
    """Return memory over time of a rank, thinned to ``MOST_POINTS`` of equal length."""
    start = run.info.start_t_ns
    sources = {WORKER: process.served.samples, DEVICE: process.served.device_samples, CORE: []}
    for core in engine_cores(process, run.serving)[:1]:
        sources[CORE] = core.served.kv_samples
    everything = [sample for samples in sources.values() for sample in samples]
    if not everything or start is None:
        return []
    first = min(sample.since_ns for sample in everything)
    last = max(sample.t_ns for sample in everything)
    count = min(MOST_POINTS, max(len(samples) for samples in sources.values()))
    width = max((last - first) / count, 1.0)
    bins: dict[int, list[tuple[str, Sample]]] = {}
    for source, samples in sources.items():
        for sample in samples:
            at = min(int((sample.t_ns - first) / width), count - 1)
            bins.setdefault(at, []).append((source, sample))
    return [_point(bins[at], start) for at in sorted(bins)]


def _point(samples: list[tuple[str, Sample]], start: int) -> Point:
    """Return the samples of one stretch of time, each with its source."""
    low: dict[str, int] = {}
    high: dict[str, int] = {}
    for source, sample in samples:
        for name, where in CURVES.items():
            if where != source:
                continue
            least, most = sample.low.get(name), sample.high.get(name)
            peak = sample.high.get(_PEAK_OF.get(name, ""))
            most = most if peak is None else max(peak, most or 0)
            if least is not None:
                low[name] = min(least, low.get(name, least))
            if most is not None:
                high[name] = max(most, high.get(name, most))
    begin = min(sample.since_ns for _, sample in samples)
    end = max(sample.t_ns for _, sample in samples)
    readings = sum(sample.folded for source, sample in samples if source == WORKER)
    return Point((begin - start) / 1e9, (end - start) / 1e9, readings, low, high)


def largest_rows(rows: Sequence[RequestRow], name: str) -> list[RequestRow]:
    """Return the rows with the largest values of a field, the largest first."""
    known = (row for row in rows if getattr(row, name) is not None)
    return nlargest(LARGEST, known, key=attrgetter(name))


def mm_profile(process: ProcessRecord) -> MmProfile | None:
    """Return what profiling assumed beside what came; None without an encoder that was profiled."""
    span = first_of(process.phases, "mm_profile")
    profile = first_of(process.phases, "profile_run")
    encoder = [stage for stage in process.served.stages if stage.stage == "mm_encoder"]
    merges = [stage for stage in process.served.stages if stage.stage == "mm_merge"]
    if span is None and not encoder and not merges:
        return None
    nothing = Span("", 0)
    profiled, merged = span or nothing, (profile or nothing).detail.get("mm_merge_ran")
    items, each = profiled.integer("mm_items"), profiled.integer("mm_tokens_per_item")
    peak = value(profiled.after, "allocated_peak_bytes")
    # the profiled encoder's peak, where the allocator's rose in it
    rose = (growth(profiled.before, profiled.after, "allocated_peak_bytes") or 0) > 0
    none = MediaStage("")
    most = max(encoder, key=_tokens_of, default=none)
    merge = max(merges, key=lambda s: s.figures["allocated_total_bytes"] or 0, default=none)
    return MmProfile(
        modality=profiled.string("mm_modality"),
        items=items,
        tokens=product_or_none(items, each),
        size=profiled.listed("mm_size"),
        bytes=minus(peak, value(profiled.before, "allocated_bytes")) if rose else None,
        merged=merged if isinstance(merged, bool) else None,
        frames=profiled.integer("mm_frames"),
        came_items=len(most.items) if encoder else None,
        came_tokens=_tokens_of(most) or None,
        came_size=_largest_size(most),
        came_bytes=_most_taken(encoder),
        merge_bytes=merge.figures.get("allocated_total_bytes"),
        merge_peak_bytes=_most_taken(merges),
        merge_tokens=_tokens_of(merge) or None,
        merge_size=_largest_size(merge),
    )


def _tokens_of(stage: MediaStage) -> int:
    return sum(item.tokens or 0 for item in stage.items)


def _largest_size(stage: MediaStage) -> list[int] | None:
    sizes = only_known(item.size for item in stage.items)
    size = max(sizes, key=lambda each: each[0] * each[1], default=None)
    return None if size is None else list(size)


def _most_taken(stages: Iterable[MediaStage]) -> int | None:
    """Return the most that was allocated in a passage less what was before it, where known."""
    return largest(
        minus(stage.figures["allocated_peak_bytes"], stage.figures["allocated_before_bytes"])
        for stage in stages
    )
