"""Calls of ``empty_cache``: who called, how long they took, what was released and reallocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from vllm_memprof.accounting.model import MEMPROF, EmptyCacheCall, RankReport, ReclaimSummary
from vllm_memprof.accounting.readings.counters import APP
from vllm_memprof.document import MUTED, PLAIN, Section
from vllm_memprof.report.sections.base import Sheet
from vllm_memprof.tables import (
    GIB,
    GIB4,
    LABELS,
    MS,
    PAIRS,
    SHOWN_GROUPS,
    UNKNOWN,
    Column,
    fold,
    fold_rows,
    group_ranks,
    labels_of,
    narrow_only,
    number,
    where_known,
    wide_only,
)
from vllm_memprof.text import join, text
from vllm_memprof.units import minus, sum_or_none


class _Calls(NamedTuple):
    """Calls of one place in one phase of one rank, in the order of the first."""

    phase: str
    site: str
    function: str | None
    thread: str | None  # None: the main thread
    own: bool  # of memprof, not of the engine
    calls: list[EmptyCacheCall]

    @property
    def requests(self) -> int | None:
        """The most that the model runner held at a call while it served."""
        held = [call.requests for call in self.calls if call.after_ready]
        return max((count for count in held if count is not None), default=None)


def _sum(name: str) -> Callable[[_Calls], float | None]:
    """Return what adds a figure of calls up; None where one of them lacks it."""
    return lambda row: sum_or_none([getattr(call, name) for call in row.calls])


_CALLS = (
    Column("In phase,\n  called at", lambda row: join("\n  ", row[:2]), when=narrow_only),
    Column("In phase", "phase", when=wide_only),
    Column("Called at", "site", when=wide_only),
    Column("Function", "function", when=wide_only),
    Column("Thread", "thread", when=lambda values, wide: wide and any(values)),
    Column("Calls", lambda row: len(row.calls), number),
    Column("Requests", "requests", number, where_known),
    Column("ms", _sum("seconds"), MS, compared=False),
    Column("Reserved", _sum("freed_cached_bytes"), GIB, narrow="Re-\nserved"),
    Column("Workspace", _sum("freed_npu_workspace_bytes"), GIB, narrow="Work-\nspace"),
    Column("Other", _sum("freed_other_bytes"), GIB),
    Column("Reallocated", _sum("refilled_bytes"), GIB, narrow="Reallo-\ncated"),
)


def calls(sheet: Sheet) -> Iterator[Section]:
    """Return the calls by place, those of memprof among them."""
    ranks, every = sheet.report.ranks, [call for r in sheet.report.ranks for call in r.empty_cache]
    if not every:
        return
    folded = fold_rows(_CALLS, {rank.label: _by_site(rank.empty_cache) for rank in ranks})
    for labels, rows in folded:
        if len(labels) < len(ranks):
            phase = text("{phase} ({labels})", rows[0], labels=fold(labels))
            rows[0] = rows[0]._replace(phase=phase)
    unread = [call for call in every if call.freed_npu_workspace_bytes is None]
    retries = {
        rank.label: sum(call.alloc_retries or 0 for call in rank.empty_cache) for rank in ranks
    }
    notes = (
        text(
            "ms: with the wait for the device that each call contains; reserved, workspace, other: "
            "released by torch's allocator, by the operator workspace, by other non-torch memory; "
            "reallocated: of it, in use again at the next reading"
        ),
        sheet.report.run.simulated
        and text("workspace and other are set by the profile of the simulated device (m)"),
        any(call.after_ready for call in every)
        and text("requests: most that the model runner held at a call"),
        any(call.freed_other_bytes is not None for call in unread)
        and text(
            "workspace -: not read on its own while requests run or a graph is captured; it is in "
            "other"
        ),
        *(
            text(
                "{label}: the allocator flushed itself {count} time(s) before these calls (failed "
                "allocations)",
                label=label,
                count=count,
            )
            for label, count in retries.items()
            if count
        ),
        any(call.by == MEMPROF for call in every)
        and text("--empty-cache-at: a call of memprof itself, not counted among the engine's"),
    )
    title = text("Calls of empty_cache, GiB released and reallocated")
    shown = () if sheet.evidence.partial else notes  # a log does not tell what came after a call
    yield sheet.table(title, _CALLS, folded, shown, lambda row: MUTED if row.own else PLAIN)


def _by_site(calls: list[EmptyCacheCall]) -> list[_Calls]:
    groups: dict[object, _Calls] = {}
    for call in calls:
        own = call.by == MEMPROF
        site = "memprof" if own else call.site or UNKNOWN
        thread = None if call.thread == "MainThread" else call.thread
        row = _Calls(_place(call), site, call.function, thread, own, [])
        groups.setdefault(row[:-1], row).calls.append(call)
    return list(groups.values())


def _place(call: EmptyCacheCall) -> str:
    if call.by == MEMPROF:
        return text("after {at}", call)
    if call.phase is not None:
        return text("{phase}, serving", call) if call.while_serving else call.phase
    if call.while_serving:
        return text("in a step") if call.in_step else text("serving")
    after_ready = text("ready") if call.after_ready else "-"
    return text("after shutdown") if call.at_end else after_ready


_EXPERIMENTS = (
    Column("At the end of", "at"),
    Column("Rank", LABELS),
    Column("ms", "seconds", MS, compared=False),
    Column("Released, GiB", "freed_bytes", GIB4),
    Column("Not reallocated, GiB", "kept_bytes", GIB4),
    Column("Until", "kept_until"),
)


def experiments(sheet: Sheet) -> Iterator[Section]:
    """Return what memprof's own calls released and cost; nothing where it made none."""
    own = {
        rank.label: [call for call in rank.empty_cache if call.by == MEMPROF]
        for rank in sheet.report.ranks
    }
    reached = {call.at for calls in own.values() for call in calls}
    if not reached:
        return
    missed = [phase for phase in sheet.report.run.empty_cache_at if phase not in reached]
    notes = (
        text("the experiment changed this run: its figures are not those of the engine alone"),
        bool(missed) and text("never reached: {phases}", phases=", ".join(missed)),
    )
    title = text("Experiment: empty_cache called by memprof (--empty-cache-at)")
    yield sheet.table(title, _EXPERIMENTS, fold_rows(_EXPERIMENTS, own), notes)


def effect(sheet: Sheet) -> Iterator[Section]:
    """Return what the calls released, what one call would release, and what the calls cost.

    Ranks that differ in nothing but time share a table, with the longest time.
    """
    ranks = [(rank, rank.reclaim) for rank in sheet.report.ranks if rank.reclaim is not None]
    groups = group_ranks(
        [] if sheet.evidence.partial else ranks,
        lambda own: repr(_without_time(own[1])),
    )
    for members in groups[:SHOWN_GROUPS]:
        rank, summary = max(members, key=lambda own: own[1].engine.seconds or 0.0)
        rows = [
            (text("Released"), _released(summary)),
            (text("Releasable after warm-up"), _releasable(rank, summary)),
            (text("Cost"), _cost(rank, summary)),
        ]
        labels = labels_of(rank for rank, _ in members)
        yield sheet.table(text("Effect of empty_cache, {labels}", labels=labels), PAIRS, rows)


def _without_time(summary: ReclaimSummary) -> ReclaimSummary:
    engine, serving = (replace(each, seconds=None) for each in (summary.engine, summary.serving))
    return replace(summary, engine=engine, serving=serving)


def _released(summary: ReclaimSummary) -> str:
    if not summary.calls:
        return text("the engine never called empty_cache")
    engine = summary.engine
    modules = engine.freed_by_module or {}
    counted = join(
        ", ",
        [
            text("{name} {size:gib4} GiB", name=name, size=size)
            for name, size in modules.items()
            if name != APP
        ],
    )
    return join(
        "; ",
        (
            text("reserved, not allocated: {freed_cached_bytes:gib4} GiB", engine),
            engine.freed_npu_workspace_bytes is not None
            and text("operator workspace: {freed_npu_workspace_bytes:gib4} GiB", engine),
            text("other non-torch: {freed_other_bytes:gib4} GiB", engine),
            text("calls of the engine: {calls}, {seconds:ms} ms", engine, calls=summary.calls),
            engine.freed_by_module is not None
            and text(
                "outside the allocators, by the runtime's counters: {counted}",
                counted=counted or text("nothing"),
            ),
        ),
    )


def _releasable(rank: RankReport, summary: ReclaimSummary) -> str:
    if summary.left_after is None or summary.left_cached_bytes is None:
        return text("the end of the start-up was not recorded")
    size = summary.left_cached_bytes + (summary.left_npu_workspace_bytes or 0)
    most = text("one call there releases at most {size:gib4} GiB", size=size)
    if summary.left_kv_tokens is not None:
        most = text("{most}, {left_kv_tokens:,} KV tokens", summary, most=most)
    for call in rank.empty_cache:
        if call.by == MEMPROF and call.at == summary.left_after and call.freed_bytes is not None:
            most = text(
                "one call there released {freed_bytes:gib4} GiB, measured by the experiment", call
            )
            break
    return join(
        "; ",
        (
            text(
                "after {left_after}: reserved, not allocated: {left_cached_bytes:gib4} GiB", summary
            ),
            summary.left_npu_workspace_bytes is not None
            and text("operator workspace: {left_npu_workspace_bytes:gib4} GiB", summary),
            most,
            text("call it once, before serving, never per request"),
        ),
    )


def _cost(rank: RankReport, summary: ReclaimSummary) -> str:
    if not summary.calls:
        return text("none")
    freed = summary.engine.freed_bytes
    serving = text("no call while requests ran")
    if summary.calls_while_serving:
        serving = text(
            "{calls} call(s) while requests ran: waited {seconds:ms} ms, released "
            "{freed_bytes:gib4} GiB, reallocated {refilled_bytes:gib4} GiB",
            summary.serving,
            calls=summary.calls_while_serving,
        )
    kept = minus(freed, summary.engine.refilled_bytes)
    return join(
        "; ",
        (
            serving,
            kept is not None
            and text(
                "of {freed:gib4} GiB released in all, {kept:gib4} GiB were not reallocated by the "
                "next reading",
                freed=freed,
                kept=kept,
            ),
            *(
                text(
                    "the KV cache budget was read right after a call that had released "
                    "{bytes:gib4} GiB of non-torch memory: the equation does not subtract it, "
                    "serving allocates it again",
                    item,
                )
                for item in rank.budget.not_subtracted
                if item.name == "non_torch_cleared" and item.bytes
            ),
        ),
    )
