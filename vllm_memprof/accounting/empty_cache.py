"""Read the calls of ``empty_cache`` and the cycles of sleep mode, pauses and weight updates.

On an NPU ``empty_cache`` synchronises the device and returns cached blocks and the per-stream
operator workspaces, but not communicators, ATB or graph memory
(torch_npu 2.10: ``NPUCachingAllocator.cpp::emptyCache``). Freed is the difference of the two
readings around the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from vllm_memprof.accounting.budget.kv import worth_in_tokens
from vllm_memprof.accounting.model import (
    ENGINE,
    MEMPROF,
    Cycle,
    EmptyCacheCall,
    Kv,
    OwnCall,
    ReclaimSummary,
)
from vllm_memprof.accounting.readings.counters import counter
from vllm_memprof.record.loader import PrintedSleep, ProcessRecord, Run
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span, ancestors
from vllm_memprof.units import minus, sum_or_none

#: Seconds, or bytes.
_Number = TypeVar("_Number", int, float)
_NOTHING = Snapshot(t_ns=0)
#: Phases after which a start-up is over, the last first.
_START_UP_ENDS = ("warm_up", "graph_capture", "kv_cache_alloc", "profile_run")


def empty_cache_calls(run: Run, process: ProcessRecord) -> list[EmptyCacheCall]:
    """Return the calls of one process in their order, each once.

    A call is one while serving when the model runner held requests or ran a step; where the record
    does not say, when it came after the engine was ready and before it began to shut down. An
    engine whose plan is ready serves nothing, and one that is paused runs nothing.
    """
    ready = run.whole.first_ready(process.identity.host)
    spans = process.phases
    ends = next((span.order for span in spans if span.phase == "shutdown"), len(spans))
    calls: list[EmptyCacheCall] = []
    retries = 0
    for span in spans:
        if span.phase != "empty_cache":
            continue
        after_ready = ready is not None and span.start_t_ns is not None and span.start_t_ns > ready
        calls.append(_call(spans, span, after_ready, span.order >= ends, retries))
        retries = (span.after or span.before or _NOTHING).alloc_retries or retries
    return calls


def _call(
    spans: list[Span], span: Span, after_ready: bool, at_end: bool, retries_before: int
) -> EmptyCacheCall:
    after_ready = after_ready and not at_end
    before, after = span.before or _NOTHING, span.after or _NOTHING
    workspace = minus(before.npu_workspace_bytes, after.npu_workspace_bytes)
    non_torch = minus(before.non_torch_bytes, after.non_torch_bytes)
    requests, in_step = span.integer("requests"), span.detail.get("in_step")
    serving = after_ready if requests is None else after_ready and bool(requests or in_step)
    parents = list(ancestors(spans, span))
    # between a pause and the end of the continue that follows it nothing runs
    stops = (each for each in reversed(spans[: span.order]) if each.phase in ("pause", "continue"))
    last = next(stops, None)
    if last is not None and (last.phase == "pause" or last in parents):
        serving = False
    retries = before.alloc_retries
    # only memory that is cached again counts as refilled, not that which tensors hold by then; and
    # only as far as more is reserved: what tensors leave in the cache was never returned
    later, where = _next_reading(spans, span)
    refilled = None if later is None else _compare(span, later)
    by_module = None
    if before.components is not None and after.components is not None:
        names = sorted({*before.components, *after.components})
        by_module = {n: (counter(before, n) or 0) - (counter(after, n) or 0) for n in names}
    seconds, chain = span.detail.get("seconds", span.seconds), span.detail.get("chain")
    return EmptyCacheCall(
        phase=parents[0].phase if parents else None,
        site=span.string("site"),
        # its own time, without that of the two snapshots
        seconds=seconds if isinstance(seconds, (int, float)) else None,
        freed_cached_bytes=minus(before.reserved_bytes, after.reserved_bytes),
        freed_npu_workspace_bytes=workspace,
        freed_other_bytes=None if non_torch is None else non_torch - (workspace or 0),
        while_serving=serving,
        order=span.order,
        function=span.string("function"),
        thread=span.string("thread"),
        requests=requests,
        in_step=in_step if isinstance(in_step, bool) else None,
        by=MEMPROF if span.detail.get("by") == MEMPROF else ENGINE,
        at=span.string("at"),
        after_ready=after_ready,
        alloc_retries=None if retries is None else retries - retries_before,
        refilled_bytes=refilled,
        refilled_by=None if refilled is None else where,
        chain=tuple(str(entry) for entry in chain) if isinstance(chain, list) else (),
        freed_by_module=by_module,
        at_end=at_end,
    )


def _known_sum(values: Iterable[_Number | None]) -> _Number | None:
    """Return the sum of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _compare(span: Span, later: Snapshot) -> int | None:
    before, after = span.before, span.after
    if before is None or after is None:
        return None
    cached = _taken_again(_cached(before), _cached(after), _cached(later))
    reserved = minus(later.reserved_bytes, after.reserved_bytes)
    if cached is not None and reserved is not None:
        cached = min(cached, max(0, reserved))
    outside = [(s.npu_workspace_bytes, s.non_torch_bytes) for s in (before, after, later)]
    at = 0 if all(workspace is not None for workspace, _ in outside) else 1
    other = _taken_again(*(pair[at] for pair in outside))
    return None if cached is None else cached + (other or 0)


def _taken_again(before: int | None, after: int | None, later: int | None) -> int | None:
    if before is None or after is None or later is None:
        return None
    return max(0, min(before - after, later - after))


def _cached(snapshot: Snapshot) -> int | None:
    return minus(snapshot.reserved_bytes, snapshot.allocated_bytes)


def _next_reading(spans: list[Span], span: Span) -> tuple[Snapshot | None, str | None]:
    """Return the next call's first reading or the end of the next phase, whichever is first."""
    for other in spans[span.order + 1 :]:
        if other.phase == "empty_cache":
            return other.before, "the next call"
        if other.phase in (
            "shutdown",
            "sleep",
            "oom",
        ):  # their first edge: what follows is another matter
            return other.before or other.after, f"the beginning of {other.phase}"
        if not any(inner.parent == other.order and inner.phase == "empty_cache" for inner in spans):
            return other.after, f"the end of {other.phase}"
    return None, None


def cycles(process: ProcessRecord) -> list[Cycle]:
    """Return completed sleeps with their wake-ups, pauses with the weight updates in them, then
    weight updates outside a pause, numbered from 1 each. A log prints sleeps alone.
    """
    spans = process.phases
    done = [span for span in spans if not span.open and span.error is None]
    sleeps: list[list[Span]] = []
    pauses: list[list[Span]] = []
    updates: list[list[Span]] = []
    paused: list[Span] = []  # the pause that no continue has ended, and the updates in it
    for span in done:
        if span.phase == "sleep":
            sleeps.append([span])
        elif span.phase == "wake_up" and sleeps:
            sleeps[-1].append(span)
        elif span.phase == "pause":
            paused = paused or [span]
        elif span.phase == "weight_update":
            if paused:
                paused.append(span)
            else:
                updates.append([span])
        elif span.phase == "continue":
            if len(paused) > 1:
                pauses.append([*paused, span])
            paused = []
    found = _printed_sleeps(process.sleeps)
    found += _cycle_rows(spans, "sleep", [group for group in sleeps if len(group) > 1])
    found += _cycle_rows(spans, "pause", pauses)
    return found + _cycle_rows(spans, "weight_update", updates)


def _printed_sleeps(sleeps: Sequence[PrintedSleep]) -> list[Cycle]:
    """Return the sleeps that a log prints; all else of them is unknown."""
    rows: list[Cycle] = []
    before: int | None = None
    for number, sleep in enumerate(sleeps, start=1):
        rows.append(
            Cycle(
                kind="sleep",
                number=number,
                order=number - 1,
                seconds=None,
                asleep_used_bytes=sleep.in_use_bytes,
                freed_bytes=sleep.freed_bytes,
                asleep_residue_bytes=minus(sleep.in_use_bytes, before),
                used_bytes=None,
                free_bytes=None,
                reserved_bytes=None,
                residue_bytes=None,
                allocated_residue_bytes=None,
                cached_residue_bytes=None,
                non_torch_residue_bytes=None,
                emptied=False,
                emptied_inside=False,
            )
        )
        before = sleep.in_use_bytes
    return rows


def _cycle_rows(spans: list[Span], kind: str, groups: Sequence[list[Span]]) -> list[Cycle]:
    rows: list[Cycle] = []
    reference: Snapshot | None = groups[0][0].before if groups else None
    since = groups[0][0].order if groups else 0
    for number, group in enumerate(groups, start=1):
        after = group[-1].after or _NOTHING
        last = reference or _NOTHING
        asleep = group[0].after if kind == "sleep" else None
        end = group[-1]
        inside = [
            span
            for span in spans
            if since <= span.order
            and (
                span.order <= end.order
                if span.start_t_ns is None or end.end_t_ns is None
                else span.start_t_ns <= end.end_t_ns
            )
        ]
        rows.append(
            Cycle(
                kind=kind,
                number=number,
                order=group[0].order,
                seconds=_known_sum(span.seconds for span in group),
                asleep_used_bytes=None if asleep is None else asleep.used_bytes,
                freed_bytes=None,
                asleep_residue_bytes=None,
                used_bytes=after.used_bytes,
                free_bytes=after.device_free_bytes,
                reserved_bytes=after.reserved_bytes,
                residue_bytes=minus(after.used_bytes, last.used_bytes),
                allocated_residue_bytes=minus(after.allocated_bytes, last.allocated_bytes),
                cached_residue_bytes=minus(_cached(after), _cached(last)),
                non_torch_residue_bytes=minus(after.non_torch_bytes, last.non_torch_bytes),
                emptied=any(span.phase == "empty_cache" for span in inside),
                emptied_inside=any(
                    span.phase == "empty_cache" and span.order > group[0].order for span in inside
                ),
            )
        )
        reference, since = group[-1].after, group[-1].order + 1
    return rows


def summarise_calls(
    process: ProcessRecord, calls: list[EmptyCacheCall], kv: Kv
) -> ReclaimSummary | None:
    """Return the engine's calls added up; None where there is no call."""
    if not calls:
        return None
    every = [call for call in calls if call.by == ENGINE]
    engine = [call for call in every if not call.at_end]
    serving = [call for call in engine if call.while_serving]
    ends = (
        (phase, span.after)
        for phase in _START_UP_ENDS
        for span in process.phases
        if span.phase == phase and span.after is not None
    )
    phase, left = next(ends, (None, None))
    cached = None if left is None else _cached(left)
    kept = None if left is None or cached is None else cached + (left.npu_workspace_bytes or 0)
    by_module: Counter[str] = Counter()
    for call in engine:
        for name, size in (call.freed_by_module or {}).items():
            by_module[name] += size
    counted = engine and all(call.freed_by_module is not None for call in engine)
    return ReclaimSummary(
        calls=len(engine),
        calls_at_end=len(every) - len(engine),
        calls_while_serving=len(serving),
        seconds=_known_sum(call.seconds for call in engine),
        freed_cached_bytes=sum_or_none(call.freed_cached_bytes for call in engine),
        freed_npu_workspace_bytes=_known_sum(call.freed_npu_workspace_bytes for call in engine),
        freed_other_bytes=sum_or_none(call.freed_other_bytes for call in engine),
        refilled_bytes=sum_or_none(
            call.refilled_bytes for call in engine if call.refilled_by is not None
        ),
        serving_seconds=_known_sum(call.seconds for call in serving),
        serving_freed_bytes=sum_or_none(call.freed_bytes for call in serving),
        serving_refilled_bytes=sum_or_none(
            call.refilled_bytes for call in serving if call.refilled_by is not None
        ),
        left_after=phase,
        left_cached_bytes=cached,
        left_npu_workspace_bytes=None if left is None else left.npu_workspace_bytes,
        left_kv_tokens=worth_in_tokens(kv, kept),
        freed_by_module=dict(sorted(by_module.items())) if counted else None,
        own=[_own(process.phases, call, left) for call in calls if call.by == MEMPROF],
    )


def _own(spans: list[Span], call: EmptyCacheCall, left: Snapshot | None) -> OwnCall:
    """Return one of memprof's calls; what is kept, at the end of the start-up, else later."""
    span = spans[call.order or 0]
    again, by = call.refilled_bytes, call.refilled_by
    if left is not None and span.after is not None and (left.t_ns or 0) > (span.after.t_ns or 0):
        again, by = _compare(span, left), "the end of the start-up"
    freed = call.freed_bytes
    kept = None if freed is None or again is None else freed - again
    return OwnCall(call.at, call.seconds, freed, kept, by)
