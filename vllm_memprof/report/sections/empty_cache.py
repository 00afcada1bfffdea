"""Calls of ``empty_cache``: who called, how long they took, what was released and reallocated."""

from __future__ import annotations

from collections.abc import Hashable

from vllm_memprof.accounting.counters import APP
from vllm_memprof.accounting.model import EmptyCacheCall, RankReport, ReclaimSummary, Report
from vllm_memprof.accounting.reclaim import MEMPROF
from vllm_memprof.report.document import MUTED, PLAIN, Column, Row, Section
from vllm_memprof.report.sections.base import (
    SHOWN_GROUPS,
    UNKNOWN,
    fold,
    group_ranks,
    labels_of,
    number,
    printed_gib,
)
from vllm_memprof.text import join, text
from vllm_memprof.units import format_gib, sum_or_none


def empty_cache_sections(report: Report, wide: bool = False) -> list[Section]:
    """Return the table of calls, memprof's own calls if there are any, and their effect."""
    table = _call_table(report, wide)
    if table is None:
        return []
    if report.run.source == "log":  # it does not tell what came after a call
        return [table]
    return [table, *_experiments(report), *_answers(report)]


def _call_table(report: Report, wide: bool) -> Section | None:
    """Return the calls by caller; several from one place in one phase are added up."""
    tables = {rank.label: _calls_by_site(rank.empty_cache) for rank in report.ranks}
    groups: dict[tuple[str, ...], list[str]] = {}
    slowest: dict[tuple[str, ...], float | None] = {}
    for label, table in tables.items():
        for cells, seconds in table:
            groups.setdefault(cells, []).append(label)
            known = [value for value in (slowest.get(cells), seconds) if value is not None]
            slowest[cells] = max(known, default=None)
    if not groups:
        return None
    calls = [call for rank in report.ranks for call in rank.empty_cache]
    everyone = fold(list(tables))
    threads = wide and {call.thread for call in calls} - {None, "MainThread"}
    served = any(call.after_ready for call in calls)
    rows = []
    for cells, labels in groups.items():
        phase, site, function, thread, count, requests, own, *sizes = cells
        if fold(labels) != everyone:
            phase = text("{phase} ({labels})", phase=phase, labels=fold(labels))
        shown = [
            *([phase, site, function] if wide else [join("\n  ", [phase, site])]),
            *([thread] if threads else []),
            count,
            *([requests] if served else []),
            number(None if (each := slowest[cells]) is None else each * 1000, ".2f"),
            *sizes,
        ]
        rows.append(Row(shown, style=MUTED if own else PLAIN))
    if wide:
        names = [text("In phase"), text("Called at"), text("Function")]
        sizes_of = [text("Reserved"), text("Workspace"), text("Other"), text("Reallocated")]
    else:  # in two lines, so that a row fits 80 characters
        names = [text("In phase,\n  called at")]
        sizes_of = [
            text("Re-\nserved"),
            text("Work-\nspace"),
            text("Other"),
            text("Reallo-\ncated"),
        ]
    names += [text("Thread")] if threads else []
    counts = [text("Calls"), *([text("Requests")] if served else []), text("ms")]
    columns = [Column(name, right=False) for name in names]
    columns += [Column(name) for name in (*counts, *sizes_of)]
    title = text("Calls of empty_cache, GiB released and reallocated")
    notes = [] if report.run.source == "log" else _table_notes(report, calls, served)
    return Section(title, columns, rows, notes)


def _table_notes(report: Report, calls: list[EmptyCacheCall], served: bool) -> list[str]:
    notes: list[str] = [
        text(
            "ms: with the wait for the device that each call contains; reserved, workspace, other: "
            "released by torch's allocator, by the operator workspace, by other non-torch memory; "
            "reallocated: of it, in use again at the next reading"
        )
    ]
    if report.run.simulated:
        notes.append(text("workspace and other are set by the profile of the simulated device (m)"))
    if served:
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


def _calls_by_site(calls: list[EmptyCacheCall]) -> list[tuple[tuple[str, ...], float | None]]:
    """Return (cells, seconds) per phase and caller, in the order of the first call."""
    groups: dict[tuple[str, str, str, str, str], list[EmptyCacheCall]] = {}
    for call in calls:
        site = "memprof" if call.by == MEMPROF else call.site or UNKNOWN
        key = (_place(call), site, call.function or "-", call.thread or "-", call.by)
        groups.setdefault(key, []).append(call)
    found: list[tuple[tuple[str, ...], float | None]] = []
    for (phase, site, function, thread, by), members in groups.items():
        held = [call.requests for call in members if call.requests is not None]
        cells = (
            phase,
            site,
            function,
            thread,
            str(len(members)),
            str(max(held)) if held else "-",
            "own" if by == MEMPROF else "",
            printed_gib(sum_or_none([call.freed_cached_bytes for call in members])),
            printed_gib(sum_or_none([call.freed_npu_workspace_bytes for call in members])),
            printed_gib(sum_or_none([call.freed_other_bytes for call in members])),
            printed_gib(sum_or_none([call.refilled_bytes for call in members])),
        )
        known = [call.seconds for call in members]  # None: never left, or from a log
        seconds = None if None in known else sum(value for value in known if value is not None)
        found.append((cells, seconds))
    return found


def _place(call: EmptyCacheCall) -> str:
    if call.by == MEMPROF:
        return text("after {phase}", phase=call.at)
    if call.phase is None and call.while_serving:
        return text("in a step") if call.in_step else text("serving")
    if call.phase is None:
        after_ready = text("ready") if call.after_ready else "-"
        return text("after shutdown") if call.at_end else after_ready
    return text("{phase}, serving", phase=call.phase) if call.while_serving else call.phase


def _experiments(report: Report) -> list[Section]:
    """Return what memprof's own calls released and cost; nothing where it made none."""
    own = {rank.label: rank.reclaim.own for rank in report.ranks if rank.reclaim is not None}
    ranks = [rank for rank in report.ranks if own.get(rank.label)]
    if not ranks:
        return []

    def sizes(rank: RankReport) -> Hashable:
        return repr(
            [
                (call.at, call.freed_bytes, call.kept_bytes, call.kept_until)
                for call in own[rank.label]
            ]
        )

    rows = []
    for members in group_ranks(ranks, sizes):
        for i, call in enumerate(own[members[0].label]):
            slowest = max((own[rank.label][i].seconds or 0.0 for rank in members), default=0.0)
            freed, kept = (format_gib(size, 4) for size in (call.freed_bytes, call.kept_bytes))
            until = str(call.kept_until or "-")
            cells = [str(call.at), labels_of(members), f"{slowest * 1000:.2f}"]
            rows.append(Row([*cells, freed, kept, until]))
    reached = {call.at for rank in ranks for call in own[rank.label]}
    missed = [phase for phase in report.run.empty_cache_at if phase not in reached]
    notes: list[str] = [
        text("the experiment changed this run: its figures are not those of the engine alone")
    ]
    if missed:
        notes.append(text("never reached: {phases}", phases=", ".join(missed)))
    columns = [
        Column(text("At the end of"), right=False),
        Column(text("Rank"), right=False),
        Column(text("ms")),
        Column(text("Released, GiB")),
        Column(text("Not reallocated, GiB")),
        Column(text("Until"), right=False),
    ]
    title = text("Experiment: empty_cache called by memprof (--empty-cache-at)")
    return [Section(title, columns, rows, notes)]


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
            Row([text("Released"), _released(rank.reclaim, report)]),
            Row([text("Releasable after warm-up"), _releasable(rank.reclaim)]),
            Row([text("Cost"), _cost(rank, rank.reclaim)]),
        ]
        title = text("Effect of empty_cache, {labels}", labels=labels_of(members))
        found.append(Section(title, [Column("", right=False), Column("", right=False)], rows))
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
