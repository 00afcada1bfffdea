"""Writes a run as a trace in the Trace Event Format (JSON), which Perfetto and Chrome open.

One process per rank. Phases are complete slices (``ph`` X) on its first thread; one that was never left begins (B)
and does not end; one that overlaps another without lying inside it gets a thread of its own. Owners of device memory,
and what is unaccounted, are counters (C) in bytes at every edge of a phase; parts of an owner are counters too, named
``owner / part``. Where a figure is unknown there is no counter event. Times are microseconds since the run's start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_memprof.errors import UsageError
from vllm_memprof.ledger.model import DeviceMemory, PhaseRow, RankReport, Report
from vllm_memprof.report.clock import host_starts, passages
from vllm_memprof.report.json_text import json_pieces

Event = dict[str, Any]
_PHASES = "phases"


def render_trace(report: Report) -> str:
    """The trace as text.

    Raises:
        UsageError: the run has no moments in time, as one that was read from a log.
    """
    return "".join(report_trace(report))


def report_trace(report: Report) -> Iterator[str]:
    """The same piece by piece. Raises as ``render_trace`` does, before the first piece."""
    if report.run.source == "log":
        raise UsageError(
            "--format trace needs a recorded run: a log tells of no moments in time", hint="csv has its figures"
        )
    if not any(passages(rank) for rank in report.ranks):
        raise UsageError("--format trace: no phase was recorded, so there is nothing to draw", hint="--format table")
    run = report.run.to_json()
    other = {name: run[name] for name in ("id", "model", "engine", "engine_version", "device", "status", "started")}
    return json_pieces({"displayTimeUnit": "ms", "otherData": other, "traceEvents": _events(report)}, levels=2)


def _events(report: Report) -> Iterator[Event]:
    starts = host_starts(report)
    for number, rank in enumerate(report.ranks, start=1):  # several ranks may share a pid, on two hosts
        yield from _rank_events(rank, number, starts.get(rank.host, 0))


def _rank_events(rank: RankReport, track: int, start: int) -> Iterator[Event]:
    where = ", ".join(text for text in (f"pid {rank.pid}" if rank.pid else "", rank.host or "") if text)
    yield _named("process_name", track, 0, {"name": f"{rank.label} ({where})" if where else rank.label})
    yield _named("process_sort_index", track, 0, {"sort_index": track})
    times = passages(rank)
    threads = _threads(rank, times)
    for thread in sorted(set(threads.values())):
        name = _PHASES if thread == 1 else f"{_PHASES}, overlapping {thread - 1}"
        yield _named("thread_name", track, thread, {"name": name})
    rows = {row.order: row for row in rank.phases}
    for order in sorted(times, key=lambda order: (times[order][0], order)):
        yield _slice(rows[order], times[order], track, threads[order], start)
    for memory in rank.device_memory:
        row = rows.get(memory.order)
        snapshot = None if row is None else row.before if memory.edge == "before" else row.after
        if snapshot is not None and snapshot.t_ns:
            for name, size in _sizes(memory):
                event = {"ph": "C", "name": name, "cat": "memory", "pid": track, "tid": 0}
                yield {**event, "ts": _micros(snapshot.t_ns - start), "args": {"bytes": size}}


def _sizes(memory: DeviceMemory) -> Iterator[tuple[str, int]]:
    rows = [(row.component, row.bytes) for row in memory.rows]
    rows.append(("unaccounted", memory.unaccounted_bytes))
    rows += [(f"{part.part_of} / {part.component}", part.bytes) for part in memory.parts]
    return ((name, size) for name, size in rows if size is not None)


def _slice(row: PhaseRow, times: tuple[int, int | None], track: int, thread: int, start: int) -> Event:
    begins, ends = times
    delta = row.to_json()["delta"] or {}
    args = {"order": row.order, "open": row.open, "error": row.error}
    args |= {f"{name} change": size for name, size in delta.items() if name.endswith("_bytes") and size}
    event: Event = {"name": row.phase, "cat": "phase", "pid": track, "tid": thread, "ts": _micros(begins - start)}
    ends_with: Event = {"ph": "B"} if ends is None else {"ph": "X", "dur": _micros(ends - begins)}
    return {**event, **ends_with, "args": {name: value for name, value in args.items() if value is not None}}


def _threads(rank: RankReport, times: dict[int, tuple[int, int | None]]) -> dict[int, int]:
    """Order of a passage -> the thread it is drawn on, from 1: on each, slices nest as the phases did."""
    parents = {row.order: row.parent for row in rank.phases}
    stacks: list[list[int]] = []
    found: dict[int, int] = {}
    for order in sorted(times, key=lambda order: (times[order][0], order)):
        begins, ends = times[order]
        for stack in stacks:
            while stack and stack[-1] != parents[order] and _is_over(times[stack[-1]][1], begins):
                stack.pop()
        around = [each for each in stacks if each and each[-1] == parents[order]]
        fitting = [each for each in around if _is_within(ends, times[each[-1]][1])]
        stack = next(iter([*fitting, *(each for each in stacks if not each)]), [])
        if not any(each is stack for each in stacks):
            stacks.append(stack)
        stack.append(order)
        found[order] = next(i for i, each in enumerate(stacks, start=1) if each is stack)
    return found


def _is_over(ends: int | None, now: int) -> bool:
    return ends is not None and ends <= now


def _is_within(inner: int | None, outer: int | None) -> bool:
    return outer is None or (inner is not None and inner <= outer)


def _named(kind: str, track: int, thread: int, args: Event) -> Event:
    return {"ph": "M", "name": kind, "pid": track, "tid": thread, "args": args}


def _micros(nanoseconds: int) -> float:
    return nanoseconds / 1000
