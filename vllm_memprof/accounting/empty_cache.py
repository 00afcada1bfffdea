"""Read the calls of ``empty_cache`` and the cycles of sleep mode, pauses and weight updates.

On an NPU ``empty_cache`` synchronises the device and returns cached blocks and the per-stream
operator workspaces, but not communicators, ATB or graph memory
(torch_npu 2.10: ``NPUCachingAllocator.cpp::emptyCache``). Freed is the difference of the two
readings around the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from vllm_memprof.accounting.budget.kv import worth_in_tokens
from vllm_memprof.accounting.model import (
    ENGINE,
    MEMPROF,
    Cycle,
    EmptyCacheCall,
    Freed,
    Kv,
    RankReport,
    ReclaimSummary,
)
from vllm_memprof.accounting.readings.counters import counter
from vllm_memprof.accounting.readings.run import RankReadings
from vllm_memprof.accounting.readings.startup import growth, value
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span, ancestors, first_of
from vllm_memprof.units import Amount, floor_zero, minus, sum_known, sum_or_none

_NOTHING = Snapshot(t_ns=0)
#: Phases after which a start-up is over, the last first.
_START_UP_ENDS = ("warm_up", "graph_capture", "kv_cache_alloc", "profile_run")
#: Their first edge counts as the next reading: what follows is another matter.
_BREAKS = ("shutdown", "sleep", "oom")


def reclaimed(read: RankReadings, rank: RankReport) -> RankReport:
    """Add the calls of empty_cache, what they came to, and the cycles of sleep mode."""
    calls = empty_cache_calls(read.run, read.process)
    summary = _summarise(read.process, calls, rank.kv)
    return replace(rank, empty_cache=calls, reclaim=summary, cycles=cycles(read.process))


def empty_cache_calls(run: Run, process: ProcessRecord) -> list[EmptyCacheCall]:
    """Return the calls of one process in their order, each once.

    A call is one while serving when the model runner held requests or ran a step; where the record
    does not say, when it came after the engine was ready and before it began to shut down. An
    engine whose plan is ready serves nothing, and one that is paused runs nothing.
    """
    ready, spans = run.whole.first_ready(process.identity.host), process.phases
    shutdown, (_, left) = first_of(spans, "shutdown"), _end_of_start_up(spans)
    calls: list[EmptyCacheCall] = []
    retries = 0
    for span in (span for span in spans if span.phase == "empty_cache"):
        at_end = shutdown is not None and span.order >= shutdown.order
        serves = ready is not None and span.start_t_ns is not None and span.start_t_ns > ready
        call = _call(spans, span, serves and not at_end)
        before, after = span.before or _NOTHING, span.after or _NOTHING
        again, until = call.refilled_bytes, call.refilled_by
        # what memprof's own is worth shows at the end of the start-up, else later
        if left is not None and span.after and (left.t_ns or 0) > (after.t_ns or 0):
            again, until = _refilled(span, left), "the end of the start-up"
        if call.by == MEMPROF:
            call = replace(call, kept_bytes=minus(call.freed_bytes, again), kept_until=until)
        since = minus(before.alloc_retries, retries)
        calls.append(replace(call, at_end=at_end, alloc_retries=since))
        retries = (span.after or before).alloc_retries or retries
    return calls


def _call(spans: list[Span], span: Span, after_ready: bool) -> EmptyCacheCall:
    before, after = span.before or _NOTHING, span.after or _NOTHING
    workspace = growth(after, before, "npu_workspace_bytes")
    requests, in_step = span.integer("requests"), span.detail.get("in_step")
    parents = list(ancestors(spans, span))
    # between a pause and the end of the continue that follows it nothing runs
    stops = (each for each in reversed(spans[: span.order]) if each.phase in ("pause", "continue"))
    last = next(stops, None)
    paused = last is not None and (last.phase == "pause" or last in parents)
    runs = requests is None or bool(requests or in_step)
    # the next call's first reading or the end of the next phase, whichever is first
    for other in spans[span.order + 1 :]:
        if other.phase == "empty_cache":
            later, where = other.before, "the next call"
            break
        if other.phase in _BREAKS:
            later, where = other.before or other.after, f"the beginning of {other.phase}"
            break
        if not any(inner.parent == other.order and inner.phase == "empty_cache" for inner in spans):
            later, where = other.after, f"the end of {other.phase}"
            break
    else:
        later, where = None, None
    refilled = None if later is None else _refilled(span, later)
    by_module = None
    if before.components is not None and after.components is not None:
        names = sorted({*before.components, *after.components})
        by_module = {n: (counter(before, n) or 0) - (counter(after, n) or 0) for n in names}
    seconds = span.detail.get("seconds", span.seconds)
    return EmptyCacheCall(
        # its own time, without that of the two snapshots
        seconds=seconds if isinstance(seconds, (int, float)) else None,
        freed_cached_bytes=growth(after, before, "reserved_bytes"),
        freed_npu_workspace_bytes=workspace,
        freed_other_bytes=minus(growth(after, before, "non_torch_bytes"), workspace or 0),
        refilled_bytes=refilled,
        freed_by_module=by_module,
        phase=parents[0].phase if parents else None,
        while_serving=after_ready and runs and not paused,
        order=span.order,
        requests=requests,
        in_step=in_step if isinstance(in_step, bool) else None,
        by=span.string("by") or ENGINE,
        after_ready=after_ready,
        refilled_by=None if refilled is None else where,
        chain=tuple(map(str, span.listed("chain") or ())),
        site=span.string("site"),
        function=span.string("function"),
        thread=span.string("thread"),
        at=span.string("at"),
    )


def _refilled(span: Span, later: Snapshot) -> Amount:
    """Return what of the freed memory is cached again at a later reading.

    Not that which tensors hold by then; and only as far as more is reserved: what tensors leave in
    the cache was never returned.
    """
    if span.before is None or span.after is None:
        return None
    moments = (span.before, span.after, later)
    cached = _taken_again([_cached(each) for each in moments])
    reserved = floor_zero(growth(span.after, later, "reserved_bytes"))
    if cached is not None and reserved is not None:
        cached = min(cached, reserved)
    workspaces = [each.npu_workspace_bytes for each in moments]
    outside = [each.non_torch_bytes for each in moments] if None in workspaces else workspaces
    return None if cached is None else cached + (_taken_again(outside) or 0)


def _taken_again(sizes: Sequence[Amount]) -> Amount:
    """Return how much of what a size fell by, before the last, it then rose by."""
    fallen, risen = minus(sizes[0], sizes[1]), minus(sizes[2], sizes[1])
    return None if fallen is None or risen is None else max(0, min(fallen, risen))


def _cached(snapshot: Snapshot) -> Amount:
    return minus(snapshot.reserved_bytes, snapshot.allocated_bytes)


def _end_of_start_up(spans: list[Span]) -> tuple[str | None, Snapshot | None]:
    ends = (
        (phase, span.after)
        for phase in _START_UP_ENDS
        for span in spans
        if span.phase == phase and span.after is not None
    )
    return next(ends, (None, None))


def cycles(process: ProcessRecord) -> list[Cycle]:
    """Return completed sleeps with their wake-ups, pauses with the weight updates in them, then
    weight updates outside a pause, numbered from 1 each. A log prints sleeps alone.
    """
    groups: dict[str, list[list[Span]]] = {"sleep": [], "pause": [], "weight_update": []}
    paused: list[Span] = []  # the pause that no continue has ended, and the updates in it
    for span in process.phases:
        if span.open or span.error is not None:
            continue
        if span.phase == "pause":
            paused = paused or [span]
        elif span.phase == "weight_update" and paused:
            paused.append(span)
        elif span.phase in ("sleep", "weight_update"):
            groups[span.phase].append([span])
        elif span.phase == "wake_up" and groups["sleep"]:
            groups["sleep"][-1].append(span)
        elif span.phase == "continue":
            groups["pause"] += [[*paused, span]] if len(paused) > 1 else []
            paused = []
    groups["sleep"] = [group for group in groups["sleep"] if len(group) > 1]
    rows: list[Cycle] = []
    for number, sleep in enumerate(process.sleeps, start=1):
        residue = minus(sleep.in_use_bytes, rows[-1].asleep_used_bytes) if rows else None
        row = Cycle("sleep", number, number - 1, None, sleep.in_use_bytes)
        rows.append(replace(row, freed_bytes=sleep.freed_bytes, asleep_residue_bytes=residue))
    for kind, of_kind in groups.items():
        rows += _cycle_rows(process.phases, kind, of_kind)
    return rows


def _cycle_rows(spans: list[Span], kind: str, groups: Sequence[list[Span]]) -> list[Cycle]:
    rows: list[Cycle] = []
    last, since = (groups[0][0].before, groups[0][0].order) if groups else (None, 0)
    for number, group in enumerate(groups, start=1):
        begin, end = group[0], group[-1]
        after = end.after or _NOTHING
        inside = [
            span.order
            for span in spans
            if span.phase == "empty_cache"
            and since <= span.order
            and (
                span.order <= end.order
                if span.start_t_ns is None or end.end_t_ns is None
                else span.start_t_ns <= end.end_t_ns
            )
        ]
        cached = minus(_cached(after), None if last is None else _cached(last))
        rows.append(
            Cycle(
                kind=kind,
                number=number,
                order=begin.order,
                seconds=sum_known(span.seconds for span in group),
                asleep_used_bytes=value(begin.after, "used_bytes") if kind == "sleep" else None,
                used_bytes=after.used_bytes,
                free_bytes=after.device_free_bytes,
                reserved_bytes=after.reserved_bytes,
                residue_bytes=growth(last, after, "used_bytes"),
                allocated_residue_bytes=growth(last, after, "allocated_bytes"),
                cached_residue_bytes=cached,
                non_torch_residue_bytes=growth(last, after, "non_torch_bytes"),
                emptied=bool(inside),
                emptied_inside=max(inside, default=0) > begin.order,
            )
        )
        last, since = end.after, end.order + 1
    return rows


def _summarise(
    process: ProcessRecord, calls: list[EmptyCacheCall], kv: Kv
) -> ReclaimSummary | None:
    """Return the engine's calls added up; None where there is no call."""
    if not calls:
        return None
    engine = [call for call in calls if call.by == ENGINE and not call.at_end]
    serving = [call for call in engine if call.while_serving]
    phase, left = _end_of_start_up(process.phases)
    cached, workspace = (None, None) if left is None else (_cached(left), left.npu_workspace_bytes)
    return ReclaimSummary(
        calls=len(engine),
        engine=_added(engine),
        calls_while_serving=len(serving),
        serving=_added(serving),
        left_after=phase,
        left_cached_bytes=cached,
        left_npu_workspace_bytes=workspace,
        left_kv_tokens=worth_in_tokens(kv, sum_or_none([cached, workspace or 0])),
    )


def _added(calls: list[EmptyCacheCall]) -> Freed:
    by_module: Counter[str] = Counter()
    for call in calls:
        by_module.update(call.freed_by_module or {})
    counted = calls and all(call.freed_by_module is not None for call in calls)
    return Freed(
        seconds=sum_known(call.seconds for call in calls),
        freed_cached_bytes=sum_or_none(call.freed_cached_bytes for call in calls),
        freed_npu_workspace_bytes=sum_known(call.freed_npu_workspace_bytes for call in calls),
        freed_other_bytes=sum_or_none(call.freed_other_bytes for call in calls),
        refilled_bytes=sum_or_none(call.refilled_bytes for call in calls if call.refilled_by),
        freed_by_module=dict(sorted(by_module.items())) if counted else None,
    )
