"""Calls of ``empty_cache``: who called, how long they took, what was released and reallocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from vllm_memprof.accounting.model import MEMPROF, EmptyCacheCall, RankReport, ReclaimSummary
from vllm_memprof.accounting.readings.counters import APP
from vllm_memprof.document import MUTED, PLAIN, Row, Section
from vllm_memprof.report.sections.base import Sheet, columns_of, draw, labels_of, sentences_of
from vllm_memprof.tables import SHOWN_GROUPS, UNKNOWN, fold_rows, group_ranks
from vllm_memprof.text import fold, join, text
from vllm_memprof.units import largest, minus, sum_or_none


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
        return largest(call.requests for call in self.calls if call.after_ready)

    @property
    def times(self) -> int:
        return len(self.calls)

    @property
    def both(self) -> str:
        """The phase, and the place below it."""
        return join("\n  ", (self.phase, self.site))

    def __getattr__(self, name: str) -> float | None:
        """Return any other figure of the calls, added up; None where one of them lacks it."""
        return sum_or_none(getattr(call, name) for call in self.calls)


def calls(sheet: Sheet) -> Iterator[Section]:
    """Return the calls by place, those of memprof among them."""
    ranks, every = sheet.report.ranks, [call for r in sheet.report.ranks for call in r.empty_cache]
    if not every:
        return
    per_rank: dict[str, list[_Calls]] = {}
    for rank in ranks:
        groups: dict[object, _Calls] = {}
        for call in rank.empty_cache:
            own = call.by == MEMPROF
            site = "memprof" if own else call.site or UNKNOWN
            thread = None if call.thread == "MainThread" else call.thread
            row = _Calls(_place(call), site, call.function, thread, own, [])
            groups.setdefault(row[:-1], row).calls.append(call)
        per_rank[rank.label] = list(groups.values())
    folded = fold_rows(columns_of("empty_cache"), per_rank)
    for labels, rows in folded:
        if len(labels) < len(ranks):
            phase = text("{phase} ({labels})", rows[0], labels=fold(labels))
            rows[0] = rows[0]._replace(phase=phase)
    unread = [call for call in every if call.freed_npu_workspace_bytes is None]
    known = not sheet.evidence.partial  # a log does not tell what came after a call
    figures = {
        "known": known,
        "after_ready": known and any(call.after_ready for call in every),
        "unread": known and any(call.freed_other_bytes is not None for call in unread),
        "experiment": any(call.by == MEMPROF for call in every),
    }
    flushed = {
        rank.label: sum(call.alloc_retries or 0 for call in rank.empty_cache) for rank in ranks
    }
    notes = [
        text(
            "{label}: the allocator flushed itself {count} time(s) before these calls (failed "
            "allocations)",
            label=label,
            count=count,
        )
        for label, count in flushed.items()
        if count
    ]
    look = {True: MUTED, False: PLAIN}
    yield draw(sheet, "empty_cache", folded, figures, notes, lambda row: look[row.own])


def _place(call: EmptyCacheCall) -> str:
    if call.by == MEMPROF:
        return text("after {at}", call)
    if call.phase is not None:
        return text("{phase}, serving", call) if call.while_serving else call.phase
    if call.while_serving:
        return text("in a step") if call.in_step else text("serving")
    after_ready = text("ready") if call.after_ready else "-"
    return text("after shutdown") if call.at_end else after_ready


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
    rows = fold_rows(columns_of("experiments"), own)
    yield draw(sheet, "experiments", rows, {"missed": ", ".join(missed)})


def effect(sheet: Sheet) -> Iterator[Section]:
    """Return what the calls released, what one call would release, and what the calls cost.

    Ranks that differ in nothing but time share a table, with the longest time.
    """

    def but_time(own: tuple[RankReport, ReclaimSummary]) -> str:
        engine, serving = (replace(each, seconds=None) for each in (own[1].engine, own[1].serving))
        return repr(replace(own[1], engine=engine, serving=serving))

    ranks = [(rank, rank.reclaim) for rank in sheet.report.ranks if rank.reclaim is not None]
    groups = group_ranks([] if sheet.evidence.partial else ranks, but_time)
    for members in groups[:SHOWN_GROUPS]:
        rank, summary = max(members, key=lambda own: own[1].engine.seconds or 0.0)
        figures = _effect(rank, summary)
        rows = [
            Row(
                [text("Released"), sentences_of("released" if summary.calls else "never", figures)]
            ),
            Row([text("Releasable after warm-up"), sentences_of("releasable", figures)]),
            Row([text("Cost"), sentences_of("cost" if summary.calls else "none", figures)]),
        ]
        yield draw(sheet, "effect", rows, {"labels": labels_of(rank for rank, _ in members)})


def _effect(rank: RankReport, summary: ReclaimSummary) -> dict[str, object]:
    """Return what the sentences on the calls of a rank name."""
    engine, serving = summary.engine, summary.serving
    left = (summary.left_cached_bytes, summary.left_npu_workspace_bytes or 0)
    own = {call.at: call.freed_bytes for call in rank.empty_cache if call.by == MEMPROF}
    counted = [
        text("{name} {size:gib4} GiB", name=name, size=size)
        for name, size in (engine.freed_by_module or {}).items()
        if name != APP
    ]
    cleared = {item.name: item.bytes for item in rank.budget.not_subtracted}
    return {
        **vars(engine),
        **vars(summary),
        "counted": join(", ", counted),
        "read": engine.freed_by_module is not None,
        "most": sum_or_none(left),
        "measured": own.get(summary.left_after),
        "served": summary.calls_while_serving > 0,
        "waited": serving.seconds,
        "released": serving.freed_bytes,
        "again": serving.refilled_bytes,
        "freed": engine.freed_bytes,
        "kept": minus(engine.freed_bytes, engine.refilled_bytes),
        "cleared": cleared.get("non_torch_cleared") or None,
    }
