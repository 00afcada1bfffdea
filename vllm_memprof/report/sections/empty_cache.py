"""Calls of ``empty_cache``: who called, how long they took, what was released and reallocated."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.model import (
    MEMPROF,
    EmptyCacheCall,
    RankReport,
    ReclaimSummary,
    Report,
)
from vllm_memprof.accounting.readings.counters import APP
from vllm_memprof.document import MUTED, PLAIN, Section
from vllm_memprof.tables import (
    GIB,
    GIB4,
    LABELS,
    PAIRS,
    SHOWN_GROUPS,
    UNKNOWN,
    Column,
    fold,
    fold_rows,
    group_ranks,
    labels_of,
    ms,
    narrow_only,
    number,
    table,
    wide_only,
)
from vllm_memprof.text import join, text
from vllm_memprof.units import sum_or_none


class _Calls(NamedTuple):
    """Calls of one place in one phase of one rank, in the order of the first."""

    phase: str
    site: str
    function: str | None
    thread: str | None
    own: bool  # of memprof, not of the engine
    calls: list[EmptyCacheCall]


def _sum(name: str) -> Callable[[_Calls], float | None]:
    """Return what adds a figure of calls up; None where one of them lacks it."""
    return lambda row: sum_or_none([getattr(call, name) for call in row.calls])


_CALLS = (
    Column("In phase,\n  called at", lambda row: join("\n  ", row[:2]), when=narrow_only),
    Column("In phase", "phase", when=wide_only),
    Column("Called at", "site", when=wide_only),
    Column("Function", "function", when=wide_only),
    Column(
        "Thread",
        "thread",
        when=lambda shown: (
            shown.wide and any(row.rows[0].thread not in (None, "MainThread") for row in shown.rows)
        ),
    ),
    Column("Calls", lambda row: len(row.calls), number),
    Column(
        "Requests",
        lambda row: max((c.requests for c in row.calls if c.requests is not None), default=None),
        number,
        lambda shown: any(
            call.after_ready for row in shown.rows for each in row.rows for call in each.calls
        ),
    ),
    Column("ms", _sum("seconds"), ms, compared=False),
    Column("Reserved", _sum("freed_cached_bytes"), GIB, narrow="Re-\nserved"),
    Column("Workspace", _sum("freed_npu_workspace_bytes"), GIB, narrow="Work-\nspace"),
    Column("Other", _sum("freed_other_bytes"), GIB),
    Column("Reallocated", _sum("refilled_bytes"), GIB, narrow="Reallo-\ncated"),
)


def empty_cache_sections(report: Report, wide: bool = False) -> list[Section]:
    """Return the table of calls, memprof's own calls if there are any, and their effect."""
    folded = fold_rows(_CALLS, {rank.label: _by_site(rank.empty_cache) for rank in report.ranks})
    if not folded:
        return []
    everyone = fold([rank.label for rank in report.ranks])
    for labels, rows in folded:
        if fold(labels) != everyone:
            phase = text("{phase} ({labels})", phase=rows[0].phase, labels=fold(labels))
            rows[0] = rows[0]._replace(phase=phase)
    partial = EVIDENCE[report.run.source].partial  # it does not tell what came after a call
    calls = [call for rank in report.ranks for call in rank.empty_cache]
    title = text("Calls of empty_cache, GiB released and reallocated")
    notes = [] if partial else _table_notes(report, calls)
    section = table(
        title, _CALLS, folded, notes, wide, look=lambda row: MUTED if row.own else PLAIN
    )
    return [section] if partial else [section, *_experiments(report), *_answers(report)]


def _table_notes(report: Report, calls: list[EmptyCacheCall]) -> list[str]:
    notes: list[str] = [
        text(
            "ms: with the wait for the device that each call contains; reserved, workspace, other: "
            "released by torch's allocator, by the operator workspace, by other non-torch memory; "
            "reallocated: of it, in use again at the next reading"
        )
    ]
    if report.run.simulated:
        notes.append(text("workspace and other are set by the profile of the simulated device (m)"))
    if any(call.after_ready for call in calls):
        notes.append(text("requests: most that the model runner held at a call"))
    if any(
        call.freed_npu_workspace_bytes is None and call.freed_other_bytes is not None
        for call in calls
    ):
        notes.append(
            text(
                "workspace -: not read on its own while requests run or a graph is captured; it is "
                "in other"
            )
        )
    for rank in report.ranks:
        count = sum(call.alloc_retries or 0 for call in rank.empty_cache)
        if count:
            notes.append(
                text(
                    "{label}: the allocator flushed itself {count} time(s) before these calls "
                    "(failed allocations)",
                    label=rank.label,
                    count=count,
                )
            )
    if any(call.by == MEMPROF for call in calls):
        notes.append(
            text("--empty-cache-at: a call of memprof itself, not counted among the engine's")
        )
    return notes


def _by_site(calls: list[EmptyCacheCall]) -> list[_Calls]:
    groups: dict[Hashable, _Calls] = {}
    for call in calls:
        own = call.by == MEMPROF
        site = "memprof" if own else call.site or UNKNOWN
        row = _Calls(_place(call), site, call.function, call.thread, own, [])
        groups.setdefault(row[:-1], row).calls.append(call)
    return list(groups.values())


def _place(call: EmptyCacheCall) -> str:
    if call.by == MEMPROF:
        return text("after {phase}", phase=call.at)
    if call.phase is None and call.while_serving:
        return text("in a step") if call.in_step else text("serving")
    if call.phase is None:
        after_ready = text("ready") if call.after_ready else "-"
        return text("after shutdown") if call.at_end else after_ready
    return text("{phase}, serving", phase=call.phase) if call.while_serving else call.phase


_EXPERIMENTS = (
    Column("At the end of", "at"),
    Column("Rank", LABELS),
    Column("ms", "seconds", ms, compared=False),
    Column("Released, GiB", "freed_bytes", GIB4),
    Column("Not reallocated, GiB", "kept_bytes", GIB4),
    Column("Until", "kept_until"),
)


def _experiments(report: Report) -> list[Section]:
    """Return what memprof's own calls released and cost; nothing where it made none."""
    own = {
        rank.label: rank.reclaim.own
        for rank in report.ranks
        if rank.reclaim is not None and rank.reclaim.own
    }
    if not own:
        return []
    reached = {call.at for calls in own.values() for call in calls}
    missed = [phase for phase in report.run.empty_cache_at if phase not in reached]
    notes: list[str] = [
        text("the experiment changed this run: its figures are not those of the engine alone")
    ]
    if missed:
        notes.append(text("never reached: {phases}", phases=", ".join(missed)))
    title = text("Experiment: empty_cache called by memprof (--empty-cache-at)")
    return [table(title, _EXPERIMENTS, fold_rows(_EXPERIMENTS, own), notes)]


def _answers(report: Report) -> list[Section]:
    """Return what the calls released, what one call would release, and what the calls cost."""

    def without_time(rank: RankReport) -> Hashable:
        values = {} if rank.reclaim is None else vars(rank.reclaim)
        timed = ("seconds", "serving_seconds", "own")
        return repr({name: value for name, value in values.items() if name not in timed})

    ranks = [rank for rank in report.ranks if rank.reclaim is not None]
    found = []
    for members in group_ranks(ranks, without_time)[:SHOWN_GROUPS]:
        rank = max(members, key=lambda rank: (rank.reclaim and rank.reclaim.seconds) or 0.0)
        assert rank.reclaim is not None
        rows = [
            (text("Released"), _released(rank.reclaim, report)),
            (text("Releasable after warm-up"), _releasable(rank.reclaim)),
            (text("Cost"), _cost(rank, rank.reclaim)),
        ]
        title = text("Effect of empty_cache, {labels}", labels=labels_of(members))
        found.append(table(title, PAIRS, rows))
    return found


def _released(summary: ReclaimSummary, report: Report) -> str:
    if not summary.calls:
        return text("the engine never called empty_cache")
    parts = [
        text("reserved, not allocated: {size:gib4} GiB", size=summary.freed_cached_bytes),
        *(
            [text("operator workspace: {size:gib4} GiB", size=summary.freed_npu_workspace_bytes)]
            if summary.freed_npu_workspace_bytes is not None
            else []
        ),
        text("other non-torch: {size:gib4} GiB", size=summary.freed_other_bytes),
        text(
            "calls of the engine: {count}, {seconds:ms} ms",
            count=summary.calls,
            seconds=summary.seconds,
        ),
    ]
    if summary.freed_by_module is not None:
        counted = join(
            ", ",
            [
                text("{name} {size:gib4} GiB", name=name, size=size)
                for name, size in summary.freed_by_module.items()
                if name != APP
            ],
        )
        parts.append(
            text("outside the allocators, by the runtime's counters: {counted}", counted=counted)
            if counted
            else text("outside the allocators, by the runtime's counters: nothing")
        )
    elif report.run.engine == "vllm-ascend":
        parts.append(
            text("empty_cache does not release communicators (HCCL), ATB and graph memory")
        )
    return join("; ", parts)


def _releasable(summary: ReclaimSummary) -> str:
    if summary.left_after is None or summary.left_cached_bytes is None:
        return text("the end of the start-up was not recorded")
    left = summary.left_cached_bytes + (summary.left_npu_workspace_bytes or 0)
    parts = [
        text(
            "after {phase}: reserved, not allocated: {size:gib4} GiB",
            phase=summary.left_after,
            size=summary.left_cached_bytes,
        )
    ]
    if summary.left_npu_workspace_bytes is not None:
        parts.append(
            text("operator workspace: {size:gib4} GiB", size=summary.left_npu_workspace_bytes)
        )
    measured = next(
        (call.freed_bytes for call in summary.own if call.at == summary.left_after), None
    )
    if measured is not None:
        parts.append(
            text(
                "one call there released {size:gib4} GiB, measured by the experiment", size=measured
            )
        )
    elif summary.left_kv_tokens is not None:
        parts.append(
            text(
                "one call there releases at most {size:gib4} GiB, {tokens:,} KV tokens",
                size=left,
                tokens=summary.left_kv_tokens,
            )
        )
    else:
        parts.append(text("one call there releases at most {size:gib4} GiB", size=left))
    return join("; ", [*parts, text("call it once, before serving, never per request")])


def _cost(rank: RankReport, summary: ReclaimSummary) -> str:
    if not summary.calls:
        return text("none")
    freed = sum_or_none(
        (
            summary.freed_cached_bytes,
            summary.freed_npu_workspace_bytes or 0,
            summary.freed_other_bytes,
        )
    )
    parts = [text("no call while requests ran")]
    if summary.calls_while_serving:
        parts = [
            text(
                "{count} call(s) while requests ran: waited {seconds:ms} ms, released "
                "{freed:gib4} GiB, reallocated {again:gib4} GiB",
                count=summary.calls_while_serving,
                seconds=summary.serving_seconds,
                freed=summary.serving_freed_bytes,
                again=summary.serving_refilled_bytes,
            )
        ]
    if freed is not None and summary.refilled_bytes is not None:
        parts.append(
            text(
                "of {freed:gib4} GiB released in all, {kept:gib4} GiB were not reallocated by the "
                "next reading",
                freed=freed,
                kept=freed - summary.refilled_bytes,
            )
        )
    cleared = next(
        (item.bytes for item in rank.budget.not_subtracted if item.name == "non_torch_cleared"),
        None,
    )
    if cleared:
        parts.append(
            text(
                "the KV cache budget was read right after a call that had released {size:gib4} GiB "
                "of non-torch memory: the equation does not subtract it, serving allocates it "
                "again",
                size=cleared,
            )
        )
    return join("; ", parts)
