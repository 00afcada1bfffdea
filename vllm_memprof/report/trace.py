"""Writes a run as a trace in the Trace Event Format (JSON), which Perfetto and Chrome open.

One process per rank; of a deployment those of one host together, and all on one clock. Phases are
complete slices (``ph`` X) on its main thread; one that was never left begins (B) and does not end;
one that overlaps another without lying inside it gets a thread of its own. Owners of device memory,
and what is unexplained, are counters (C) in bytes at every edge of a phase; parts of an owner are
counters too, named ``owner / part``. Where a figure is unknown there is no counter event. Times are
microseconds since the run's start.

The order suits old readers too: Perfetto once gave up at a key that it did not know and gave a
thread's name to whichever thread had that number last (``json_trace_tokenizer.cc``,
``process_tracker.cc``). So the events come before ``otherData``, all names before all slices, and
no two threads of a trace have the same number.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from vllm_memprof.accounting.deployment.clock import host_starts, passages
from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.errors import UsageError
from vllm_memprof.record.spans import DeviceMemory, Span, edges_of
from vllm_memprof.report.json_text import json_pieces

Event = dict[str, object]
_PHASES = "phases"


def report_trace(report: Report) -> Iterator[str]:
    """Return the trace piece by piece.

    Raises:
        UsageError: the run has no moments in time, as one that was read from a log.
    """
    if not any(passages(rank) for rank in report.ranks):
        if EVIDENCE[report.run.source].no_times is not None:
            raise UsageError(
                "--format trace needs a recorded run: a log tells of no moments in time",
                hint="csv has its figures",
            )
        raise UsageError(
            "--format trace: no phase was recorded, so there is nothing to draw",
            hint="--format table",
        )
    run = report.run
    names = ("id", "model", "engine", "engine_version", "device")
    other = {name: getattr(run, name) for name in names}
    other |= {"status": run.outcome, "started": run.started}
    return json_pieces(
        {"displayTimeUnit": "ms", "traceEvents": _events(report), "otherData": other}, levels=2
    )


def _events(report: Report) -> Iterator[Event]:
    starts = host_starts(report)
    spare = count(
        len(report.ranks) + 1
    )  # numbers of threads; several ranks may share a pid, on two hosts
    threads = []
    ranks = _by_host(report)
    for track, rank in enumerate(ranks, start=1):
        lanes = _lanes(rank, passages(rank))
        numbers = {lane: next(spare) if lane else track for lane in sorted({0, *lanes.values()})}
        threads.append({order: numbers[lane] for order, lane in lanes.items()})
        yield from _names(rank, track, numbers, report.deployment is not None)
    for track, rank in enumerate(ranks, start=1):
        yield from _rank_events(rank, track, threads[track - 1], starts.get(rank.host, 0))


def _by_host(report: Report) -> list[RankReport]:
    if report.deployment is None:
        return report.ranks
    hosts = list(dict.fromkeys(rank.host for rank in report.ranks))
    return sorted(report.ranks, key=lambda rank: hosts.index(rank.host))


def _names(rank: RankReport, track: int, numbers: dict[int, int], by_host: bool) -> Iterator[Event]:
    where = ", ".join(
        text for text in (f"pid {rank.pid}" if rank.pid else "", rank.host or "") if text
    )
    name = f"{rank.label} ({where})" if where else rank.label
    if by_host:  # viewers sort processes by name too
        name = f"{rank.host}: {rank.label} (pid {rank.pid})"
    yield _named("process_name", track, track, {"name": name})
    yield _named("process_sort_index", track, track, {"sort_index": track})
    for lane, thread in numbers.items():
        yield _named(
            "thread_name",
            track,
            thread,
            {"name": f"{_PHASES}, overlapping {lane}" if lane else _PHASES},
        )


def _rank_events(
    rank: RankReport, track: int, threads: dict[int, int], start: int
) -> Iterator[Event]:
    times = passages(rank)
    rows = {row.order: row for row in rank.phases}
    for order in sorted(times, key=lambda order: (times[order][0], order)):
        yield _slice(rows[order], times[order], track, threads[order], start)
    for _, edge in edges_of(rank.phases):
        memory = edge.owners
        if memory is not None and edge.snapshot.t_ns:
            at: Event = {
                "ph": "C",
                "ts": _micros(edge.snapshot.t_ns - start),
                "pid": track,
                "tid": track,
                "cat": "memory",
            }
            yield from (
                {**at, "name": name, "args": {"bytes": size}} for name, size in _sizes(memory)
            )


def _sizes(memory: DeviceMemory) -> Iterator[tuple[str, int]]:
    rows = [(row.component, row.bytes) for row in memory.rows]
    rows.append(("unexplained", memory.unexplained_bytes))
    rows += [(f"{part.part_of} / {part.component}", part.bytes) for part in memory.parts]
    return ((name, size) for name, size in rows if size is not None)


def _slice(row: Span, times: tuple[int, int | None], track: int, thread: int, start: int) -> Event:
    begins, ends = times
    delta = row.delta or {}
    args = {"order": row.order, "open": row.open, "error": row.error}
    args |= {
        f"{name} change": size for name, size in delta.items() if name.endswith("_bytes") and size
    }
    at: Event = {
        "ts": _micros(begins - start),
        "pid": track,
        "tid": thread,
        "cat": "phase",
        "name": row.phase,
    }
    kind: Event = {"ph": "B"} if ends is None else {"ph": "X", "dur": _micros(ends - begins)}
    return {
        **kind,
        **at,
        "args": {name: value for name, value in args.items() if value is not None},
    }


def _lanes(rank: RankReport, times: dict[int, tuple[int, int | None]]) -> dict[int, int]:
    """Return order of a passage -> its lane, from 0: in each, slices nest as the phases did."""
    parents = {row.order: row.parent for row in rank.phases}
    stacks: list[list[int]] = []
    found: dict[int, int] = {}

    def is_over(order: int, now: int) -> bool:
        ends = times[order][1]
        return ends is not None and ends <= now

    for order in sorted(times, key=lambda order: (times[order][0], order)):
        begins, ends = times[order]
        for stack in stacks:
            while stack and stack[-1] != parents[order] and is_over(stack[-1], begins):
                stack.pop()
        around = [each for each in stacks if each and each[-1] == parents[order]]
        fitting = [
            each
            for each in around
            if (outer := times[each[-1]][1]) is None or (ends is not None and ends <= outer)
        ]
        stack = next(iter([*fitting, *(each for each in stacks if not each)]), [])
        if not any(each is stack for each in stacks):
            stacks.append(stack)
        stack.append(order)
        found[order] = next(i for i, each in enumerate(stacks) if each is stack)
    return found


def _named(kind: str, track: int, thread: int, args: Event) -> Event:
    return {"ph": "M", "ts": 0, "pid": track, "tid": thread, "name": kind, "args": args}


def _micros(nanoseconds: int) -> float:
    return nanoseconds / 1000
