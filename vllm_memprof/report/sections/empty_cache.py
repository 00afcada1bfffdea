"""Calls of ``empty_cache``: who called, what it cost, what came back, and what that was worth."""

from __future__ import annotations

from typing import Any

from vllm_memprof.accounting.model import EmptyCacheCall, RankReport, ReclaimSummary, Report
from vllm_memprof.accounting.owners import APP
from vllm_memprof.accounting.reclaim import MEMPROF, OwnCall
from vllm_memprof.report.sections.base import (
    MODELLED_MARK,
    MUTED,
    PLAIN,
    SHOWN_GROUPS,
    Column,
    Row,
    Section,
    fold,
    group_ranks,
    labels_of,
    number,
)
from vllm_memprof.units import format_gib, sum_or_none


def empty_cache_sections(report: Report, wide: bool = False) -> list[Section]:
    """The table of calls, memprof's own calls where there are any, and what the calls were worth."""
    table = _call_table(report, wide)
    if table is None:
        return []
    if report.run.source == "log":  # it does not tell what came after a call
        return [table]
    return [table, *_experiments(report), *_answers(report)]


def _call_table(report: Report, wide: bool) -> Section | None:
    """Calls by caller; several from one place in one phase are added up."""
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
    everyone = fold(list(tables))
    threads = wide and {call.thread for rank in report.ranks for call in rank.empty_cache} - {
        None,
        "MainThread",
    }
    served = any(call.after_ready for rank in report.ranks for call in rank.empty_cache)
    rows = []
    for cells, labels in groups.items():
        phase, site, function, thread, count, requests, own, *sizes = cells
        place = phase if fold(labels) == everyone else f"{phase} ({fold(labels)})"
        more = [*([function] if wide else []), *([thread] if threads else [])]
        shown = [
            place,
            site,
            *more,
            count,
            *([requests] if served else []),
            _milliseconds(slowest[cells]),
            *sizes,
        ]
        rows.append(Row(shown, style=MUTED if own else PLAIN))
    columns = [Column("In phase", right=False), Column("Called at", right=False)]
    columns += [Column("Function", right=False)] if wide else []
    columns += [Column("Thread", right=False)] if threads else []
    columns += [Column("N"), *([Column("Req")] if served else []), Column("ms"), Column("Cached")]
    columns += [Column("Wksp"), Column("Other"), Column("Again")]
    return Section(
        "empty_cache calls, GiB freed and taken again", columns, rows, _table_notes(report, served)
    )


def _milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * 1000, ".2f")


def _table_notes(report: Report, served: bool) -> list[str]:
    calls = [call for rank in report.ranks for call in rank.empty_cache]
    if report.run.source == "log":
        return []
    notes = [
        "ms: with the wait for the device that each call contains; Again: of it, in use again at the next reading"
    ]
    if report.run.simulated:
        notes.append(f"Wksp and Other are what the device's profile sets {MODELLED_MARK}")
    if served:
        notes.append("Req: requests that the model runner held at the call, at most")
    if any(
        call.freed_npu_workspace_bytes is None and call.freed_other_bytes is not None
        for call in calls
    ):
        notes.append(
            "Wksp -: not read apart while requests run or a graph is captured; it is in Other"
        )
    retries = {
        rank.label: sum(call.alloc_retries or 0 for call in rank.empty_cache)
        for rank in report.ranks
    }
    for label, count in retries.items():
        if count:
            notes.append(
                f"{label}: the allocator flushed itself {count} time(s) before these calls (failed allocations)"
            )
    if any(call.by == MEMPROF for call in calls):
        notes.append(
            "--empty-cache-at: memprof's own call, an experiment; not counted among the engine's"
        )
    return notes


def _calls_by_site(calls: list[EmptyCacheCall]) -> list[tuple[tuple[str, ...], float | None]]:
    """(cells, seconds) per phase and caller, in the order of the first call."""
    groups: dict[tuple[str, str, str, str, str], list[EmptyCacheCall]] = {}
    for call in calls:
        key = (_place(call), _site(call), call.function or "-", call.thread or "-", call.by)
        groups.setdefault(key, []).append(call)
    found = []
    for (phase, site, function, thread, by), members in groups.items():
        sizes = [
            format_gib(sum_or_none(call.freed_cached_bytes for call in members)),
            format_gib(sum_or_none(call.freed_npu_workspace_bytes for call in members)),
            format_gib(sum_or_none(call.freed_other_bytes for call in members)),
            format_gib(sum_or_none(call.refilled_bytes for call in members)),
        ]
        held = [call.requests for call in members if call.requests is not None]
        own = "own" if by == MEMPROF else ""
        cells = (
            phase,
            site,
            function,
            thread,
            str(len(members)),
            str(max(held)) if held else "-",
            own,
            *sizes,
        )
        found.append((cells, _total_seconds(members)))
    return found


def _total_seconds(calls: list[EmptyCacheCall]) -> float | None:
    """None where a call was never left, or where a log tells of it."""
    known = [call.seconds for call in calls]
    return None if None in known else sum(value for value in known if value is not None)


def _place(call: EmptyCacheCall) -> str:
    if call.by == MEMPROF:
        return f"after {call.at}"
    if call.phase is None and call.while_serving:
        return "in a step" if call.in_step else "serving"
    if call.phase is None:
        return "after shutdown" if call.at_end else "ready" if call.after_ready else "-"
    return f"{call.phase}, serving" if call.while_serving else call.phase


def _site(call: EmptyCacheCall) -> str:
    return "memprof" if call.by == MEMPROF else call.site or "unknown"


def _experiments(report: Report) -> list[Section]:
    """What memprof's own calls gained and cost; nothing where it made none."""
    ranks = [rank for rank in report.ranks if rank.reclaim is not None and rank.reclaim.own]
    if not ranks:
        return []
    columns = [Column("At the end of", right=False), Column("Rank", right=False), Column("ms lost")]
    columns += [Column("GiB freed"), Column("GiB kept"), Column("Kept until", right=False)]
    rows = []
    for members in group_ranks(ranks, lambda rank: repr([_sizes(call) for call in _own(rank)])):
        for i, call in enumerate(_own(members[0])):
            slowest = max((_own(rank)[i].seconds or 0.0 for rank in members), default=0.0)
            freed, kept = (format_gib(size, 4) for size in (call.freed_bytes, call.kept_bytes))
            until = str(call.kept_until or "-")
            rows.append(
                Row(
                    [
                        str(call.at),
                        labels_of(members),
                        f"{slowest * 1000:.2f}",
                        freed,
                        kept,
                        until,
                    ]
                )
            )
    asked = report.run.empty_cache_at
    missed = [
        phase
        for phase in asked
        if not any(call.at == phase for rank in ranks for call in _own(rank))
    ]
    notes = [
        "this run was changed by the experiment: its figures are not those of the engine alone"
    ]
    notes += [f"never reached: {', '.join(missed)}"] if missed else []
    return [
        Section(
            "Experiment: empty_cache called by memprof (--empty-cache-at)", columns, rows, notes
        )
    ]


def _own(rank: RankReport) -> list[OwnCall]:
    return [] if rank.reclaim is None else rank.reclaim.own


def _sizes(call: OwnCall) -> list[Any]:
    return [call.at, call.freed_bytes, call.kept_bytes, call.kept_until]


def _answers(report: Report) -> list[Section]:
    """Which class came back, where one call would pay, and whether the calls were worth it."""
    found = []
    ranks = [rank for rank in report.ranks if rank.reclaim is not None]
    for members in group_ranks(ranks, lambda rank: repr(_without_time(rank))):
        slowest = max(members, key=lambda rank: (rank.reclaim and rank.reclaim.seconds) or 0.0)
        assert slowest.reclaim is not None
        found.append(
            _answer(
                slowest,
                slowest.reclaim,
                f"What empty_cache was worth, {labels_of(members)}",
                report,
            )
        )
    return found[:SHOWN_GROUPS]


def _without_time(rank: RankReport) -> dict[str, Any]:
    values = {} if rank.reclaim is None else dict(vars(rank.reclaim))
    return {
        name: value
        for name, value in values.items()
        if name not in ("seconds", "serving_seconds", "own")
    }


def _answer(rank: RankReport, summary: ReclaimSummary, title: str, report: Report) -> Section:
    columns = [Column("", right=False), Column("", right=False)]
    rows = [
        Row(["What came back", _what_came_back(summary, report)]),
        Row(["Shrink once", _shrink_once(summary)]),
        Row(["Gain or cost", _gain_or_cost(rank, summary)]),
    ]
    return Section(title, columns, rows)


def _what_came_back(summary: ReclaimSummary, report: Report) -> str:
    if not summary.calls:
        return "the engine never called empty_cache"
    parts = [f"cached blocks {format_gib(summary.freed_cached_bytes, 4)} GiB"]
    if summary.freed_npu_workspace_bytes is not None:
        parts.append(f"operator workspace {format_gib(summary.freed_npu_workspace_bytes, 4)}")
    parts.append(f"other non-torch {format_gib(summary.freed_other_bytes, 4)}")
    calls = "1 call" if summary.calls == 1 else f"{summary.calls} calls"
    text = f"{', '.join(parts)}, by {calls} of the engine in {_ms(summary.seconds)}"
    if summary.freed_by_module is not None:
        others = {name: size for name, size in summary.freed_by_module.items() if name != APP}
        counted = ", ".join(f"{name} {format_gib(size, 4)}" for name, size in others.items())
        text += f". Outside the allocators, by the runtime's counters: {counted or 'nothing'}"
    elif report.run.engine == "vllm-ascend":
        text += ". Communicators (HCCL), ATB and graph memory are not given back by empty_cache"
    return text


def _shrink_once(summary: ReclaimSummary) -> str:
    if summary.left_after is None or summary.left_cached_bytes is None:
        return "the end of the start-up was not recorded"
    left = summary.left_cached_bytes + (summary.left_npu_workspace_bytes or 0)
    held = [f"{format_gib(summary.left_cached_bytes, 4)} GiB cached"]
    if summary.left_npu_workspace_bytes is not None:
        held.append(f"{format_gib(summary.left_npu_workspace_bytes, 4)} workspace")
    tokens = "" if summary.left_kv_tokens is None else f", {summary.left_kv_tokens:,} KV tokens"
    there = f"one call there gives back at most {format_gib(left, 4)} GiB{tokens}"
    measured = next(
        (call.freed_bytes for call in summary.own if call.at == summary.left_after), None
    )
    if measured is not None:
        there = (
            f"one call there gave back {format_gib(measured, 4)} GiB, measured by the experiment"
        )
    return f"after {summary.left_after}: {' and '.join(held)}; {there}. Once, before serving; never per request"


def _gain_or_cost(rank: RankReport, summary: ReclaimSummary) -> str:
    if not summary.calls:
        return "neither"
    freed = sum_or_none(
        (
            summary.freed_cached_bytes,
            summary.freed_npu_workspace_bytes or 0,
            summary.freed_other_bytes,
        )
    )
    kept = (
        None if freed is None or summary.refilled_bytes is None else freed - summary.refilled_bytes
    )
    parts = []
    if summary.calls_while_serving:
        parts.append(
            f"hidden cost: {summary.calls_while_serving} call(s) while requests ran, {_ms(summary.serving_seconds)} of "
            f"waiting, {format_gib(summary.serving_freed_bytes, 4)} GiB freed, "
            f"{format_gib(summary.serving_refilled_bytes, 4)} taken again"
        )
    else:
        parts.append("no call while requests ran")
    if kept is not None:
        parts.append(
            f"in all {format_gib(kept, 4)} of {format_gib(freed, 4)} GiB stayed free until the next reading"
        )
    cleared = next(
        (item.bytes for item in rank.budget.not_subtracted if item.name == "non_torch_cleared"),
        None,
    )
    if cleared:
        parts.append(
            f"the KV budget was read right after a call that had cleared {format_gib(cleared, 4)} GiB of non-torch: "
            "charged to nobody, taken again when serving"
        )
    return "; ".join(parts)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.2f} ms"
