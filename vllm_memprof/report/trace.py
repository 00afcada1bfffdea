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
from math import inf

from vllm_memprof.accounting.deployment.clock import host_starts, passages
from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.errors import UsageError
from vllm_memprof.record.spans import UNEXPLAINED, edges_of
from vllm_memprof.report.json_text import json_pieces
from vllm_memprof.units import known_items

Event = dict[str, object]
_PHASES = "phases"


def report_trace(report: Report) -> Iterator[str]:
    """Return the trace piece by piece.

    Raises:
        UsageError: the run has no moments in time, as one that was read from a log.
    """
    if not any(passages(rank) for rank in report.ranks):
        if report.run.evidence.no_times is not None:
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
    starts, ranks = host_starts(report), report.ranks
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    if report.deployment is not None:
        ranks = sorted(ranks, key=lambda rank: hosts.index(rank.host))
    spare = count(len(ranks) + 1)  # numbers of threads; two hosts may have processes of one pid
    tracks: list[tuple[RankReport, dict[int, int]]] = []
    for track, rank in enumerate(ranks, start=1):
        lanes = _lanes(rank)
        numbers = {lane: next(spare) if lane else track for lane in sorted({0, *lanes.values()})}
        tracks.append((rank, {order: numbers[lane] for order, lane in lanes.items()}))
        name = f"{rank.label} (pid {rank.pid or '-'}, {rank.host or '-'})"
        if report.deployment is not None:  # viewers sort processes by name too
            name = f"{rank.host}: {rank.label} (pid {rank.pid})"
        yield _named("process_name", track, track, name=name)
        yield _named("process_sort_index", track, track, sort_index=track)
        for lane, thread in numbers.items():
            name = f"{_PHASES}, overlapping {lane}" if lane else _PHASES
            yield _named("thread_name", track, thread, name=name)
    for track, (rank, threads) in enumerate(tracks, start=1):
        yield from _rank_events(rank, track, threads, starts.get(rank.host, 0))


def _named(kind: str, track: int, thread: int, **args: object) -> Event:
    return {"ph": "M", "ts": 0, "pid": track, "tid": thread, "name": kind, "args": args}


def _rank_events(
    rank: RankReport, track: int, threads: dict[int, int], start: int
) -> Iterator[Event]:
    spans = {span.order: span for span in rank.phases}
    for order, (begins, ends) in _by_begin(rank):
        span = spans[order]
        args: Event = {"order": order, "open": span.open, "error": span.error}
        for name, size in (span.delta or {}).items():
            if name.endswith("_bytes"):
                args[f"{name} change"] = size or None
        yield {
            **({"ph": "B"} if ends is None else {"ph": "X", "dur": (ends - begins) / 1000}),
            "ts": (begins - start) / 1000,
            "pid": track,
            "tid": threads[order],
            "cat": "phase",
            "name": span.phase,
            "args": known_items(args),
        }
    for _, edge in edges_of(rank.phases):
        if edge.owners is None or not edge.snapshot.t_ns:
            continue
        parts = edge.owners.parts
        sizes = [(row.component, row.bytes) for row in edge.owners.rows]
        sizes.append((UNEXPLAINED, edge.owners.unexplained_bytes))
        sizes += [(f"{part.part_of} / {part.component}", part.bytes) for part in parts]
        for name, size in sizes:
            if size is not None:
                yield {
                    "ph": "C",
                    "ts": (edge.snapshot.t_ns - start) / 1000,
                    "pid": track,
                    "tid": track,
                    "cat": "memory",
                    "name": name,
                    "args": {"bytes": size},
                }


def _by_begin(rank: RankReport) -> list[tuple[int, tuple[int, int | None]]]:
    """Return order of a passage, when it began and ended, ns, in the order of their begins."""
    return sorted(passages(rank).items(), key=lambda passage: (passage[1][0], passage[0]))


def _lanes(rank: RankReport) -> dict[int, int]:
    """Return order of a passage -> its lane, from 0: in each, slices nest as the phases did."""
    parents = {span.order: span.parent for span in rank.phases}
    ends: dict[int | None, float] = {}
    stacks: list[list[int]] = []
    found: dict[int, int] = {}
    for order, (begin, end) in _by_begin(rank):
        ends[order] = inf if end is None else end
        parent = parents[order]
        for stack in stacks:
            while stack and stack[-1] != parent and ends[stack[-1]] <= begin:
                stack.pop()
        around = ends.get(parent, inf)
        lanes = [
            lane
            for lane, stack in enumerate(stacks)
            if stack and stack[-1] == parent and ends[order] <= around
        ]
        lanes += [lane for lane, stack in enumerate(stacks) if not stack]
        found[order] = next(iter(lanes), len(stacks))
        if found[order] == len(stacks):
            stacks.append([])
        stacks[found[order]].append(order)
    return found
