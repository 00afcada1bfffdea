"""The trace against the rules that Perfetto reads it by, and against report.json.

The rules are those of Perfetto's importer (``src/trace_processor/importers/json``, ``process_tracker.cc``), the
strictest of the versions read. A release of its trace processor reads the same traces in ``test_trace_in_perfetto.py``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from tests.support.render import render_json
from tests.support.runs import LOGS, RUNS, oom_report, report_of
from tests.unit.accounting.builders import SECOND, gib, process, run_of, snapshot, span
from tests.unit.accounting.builders import device_memory as device_edges
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.errors import UsageError
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.report.trace import report_trace

#: Phase of an event -> the keys it has besides these, with their types.
ALWAYS = ("ph", "ts", "pid", "tid", "name", "args")
RULES: dict[str, dict[str, type]] = {
    "X": {"dur": float, "cat": str},
    "B": {"cat": str},
    "C": {"cat": str},
    "M": {},
}
METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}
#: Counters are doubles there.
EXACT = 2**53


def trace_of(report: Report) -> dict[str, Any]:
    trace = json.loads("".join(report_trace(report)))
    check_rules(trace)
    return trace


def check_rules(trace: dict[str, Any]) -> None:
    """What each kind of event needs, numbers that survive, names before slices, slices of a thread that nest."""
    assert list(trace) == [
        "displayTimeUnit",
        "traceEvents",
        "otherData",
    ]  # a key that is not known ended the reading
    assert trace["displayTimeUnit"] == "ms"
    slices = defaultdict(list)
    processes: dict[
        int, int
    ] = {}  # thread -> process: a name is given to the last thread of that number
    named = set()
    for event in trace["traceEvents"]:
        rules = RULES[event["ph"]]
        assert event.keys() == {*ALWAYS, *rules}
        assert all(isinstance(event[key], kind) for key, kind in rules.items()), event
        assert {"ph", "ts"} <= set(
            list(event)[:3]
        )  # before any text: their reader knows no escapes by number
        assert isinstance(event["ts"], (int, float))
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        assert isinstance(event["name"], str)
        assert event["name"]
        assert all(
            isinstance(event[key], int) and 0 < event[key] < 2**32 for key in ("pid", "tid")
        )  # 0 is idle
        assert processes.setdefault(event["tid"], event["pid"]) == event["pid"]
        if event["ph"] == "M":
            assert not slices
            assert list(event["args"]) == [METADATA[event["name"]]]
            assert event["args"][METADATA[event["name"]]]
            named.add((event["name"], event["pid"], event["tid"]))
        elif event["ph"] == "C":
            assert list(event["args"]) == ["bytes"]
            assert type(event["args"]["bytes"]) is int
            assert abs(event["args"]["bytes"]) < EXACT
        else:
            slices[event["pid"], event["tid"]].append(event)
    for (pid, tid), events in slices.items():
        assert {
            ("process_name", pid, pid),
            ("thread_name", pid, tid),
        } <= named  # a main thread is named as its process
        check_nesting(events)


def nanoseconds(micros: float) -> int:
    """As the importer has them: cut off, not rounded."""
    return int(micros * 1000)


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Every slice of a thread lies inside the one that it begins in, which an unfinished one never leaves."""
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    around: list[float] = []
    for event in events:
        begins = nanoseconds(event["ts"])
        ends = float("inf") if event["ph"] == "B" else begins + nanoseconds(event["dur"])
        while around and around[-1] <= begins and ends > around[-1]:
            around.pop()
        assert not around or ends <= around[-1]
        around.append(ends)


def of_kind(trace: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] in kinds]


@pytest.mark.parametrize("name", RUNS)
def test_phases_and_owners_are_those_of_report_json(name: str) -> None:
    report = report_of(name)
    trace, data = trace_of(report), json.loads(render_json(report))
    for track, rank in enumerate(data["ranks"], start=1):
        mine = {"traceEvents": [event for event in trace["traceEvents"] if event["pid"] == track]}
        title = next(
            event["args"]["name"] for event in of_kind(mine, "M") if event["name"] == "process_name"
        )
        assert title.startswith(f"{rank['label']} (pid {rank['pid']}")
        slices = {event["args"]["order"]: event for event in of_kind(mine, "X", "B")}
        assert {order: event["name"] for order, event in slices.items()} == {
            row["order"]: row["phase"] for row in rank["phases"]
        }
        for row in rank["phases"]:
            drawn = slices[row["order"]]
            assert (drawn["ph"] == "B") == row["open"] == drawn["args"]["open"]
            if not row["open"]:
                assert drawn["dur"] / 1e6 == pytest.approx(row["seconds"] or 0, abs=1e-9)
                assert row["seconds"] is not None or row["phase"] == "oom"  # which is a moment
            changes = {
                name: size
                for name, size in (row["delta"] or {}).items()
                if name.endswith("_bytes") and size
            }
            assert {f"{name} change": size for name, size in changes.items()}.items() <= drawn[
                "args"
            ].items()
        counters = defaultdict(list)
        for event in of_kind(mine, "C"):
            counters[event["name"]].append(event["args"]["bytes"])
        wanted = defaultdict(list)
        for memory in device_edges(rank):
            rows = [(row["component"], row["bytes"]) for row in memory["owners"]]
            rows += [("unexplained", memory["unexplained_bytes"])]
            rows += [
                (f"{row['part_of']} / {row['component']}", row["bytes"]) for row in memory["parts"]
            ]
            for component, size in rows:
                if size is not None:
                    wanted[component].append(size)
        assert counters == wanted


def test_times_count_from_the_launch() -> None:
    report = report_of("recorded_tp2")
    first = of_kind(trace_of(report), "X")[0]
    start = report.ranks[0].phases[0].start_t_ns
    assert start is not None
    assert report.run.start_t_ns is not None
    assert first["ts"] == (start - report.run.start_t_ns) / 1000
    assert first["ts"] > 0


def test_ranks_of_another_host_count_from_their_first_reading() -> None:
    report = report_of("recorded_tp2")
    elsewhere = replace(report, ranks=[report.ranks[0], replace(report.ranks[1], host="other")])
    begins = {
        pid: min(e["ts"] for e in of_kind(trace_of(elsewhere), "X", "C") if e["pid"] == pid)
        for pid in (1, 2)
    }
    assert begins[1] > 1e6  # the engine takes seconds to get there
    assert 0 <= begins[2] < 1000  # the phase begins some µs after its first snapshot was taken


def taken(t_ns: int, size: float) -> Any:
    return replace(snapshot(allocated_bytes=gib(size), reserved_bytes=gib(size)), t_ns=t_ns)


def test_phases_without_duration_never_left_and_overlapping() -> None:
    low, high = taken(SECOND, 1), taken(3 * SECOND, 2)
    spans = [
        span("weight_load", low, low, 0, start_t_ns=SECOND, end_t_ns=SECOND),
        span("warm_up", low, None, 1, start_t_ns=SECOND, end_t_ns=None),
        span(
            "empty_cache",
            low,
            high,
            2,
            parent=1,
            depth=1,
            start_t_ns=2 * SECOND,
            end_t_ns=3 * SECOND,
        ),
        span("request", high, high, 3, start_t_ns=2 * SECOND + 1, end_t_ns=4 * SECOND),
    ]
    trace = trace_of(build_report(run_of(process(spans))))
    found = {event["name"]: event for event in of_kind(trace, "X", "B")}
    assert (found["weight_load"]["ts"], found["weight_load"]["dur"]) == (0, 0)
    assert found["warm_up"]["ph"] == "B"
    assert "dur" not in found["warm_up"]
    assert (found["empty_cache"]["ts"], found["empty_cache"]["dur"]) == (1e6, 1e6)
    threads = {name: event["tid"] for name, event in found.items()}
    assert threads == {
        "weight_load": 1,
        "warm_up": 1,
        "empty_cache": 1,
        "request": 2,
    }  # 1 is the process, too
    names = [
        event["args"]["name"] for event in of_kind(trace, "M") if event["name"] == "thread_name"
    ]
    assert names == ["phases", "phases, overlapping 1"]
    assert found["empty_cache"]["args"]["allocated_bytes change"] == gib(1)


def test_no_two_threads_of_a_trace_have_the_same_number() -> None:
    level = taken(SECOND, 1)
    spans = [
        span("request", level, level, i, start_t_ns=SECOND + i, end_t_ns=3 * SECOND + i)
        for i in range(3)
    ]
    trace = trace_of(build_report(run_of(process(spans), process(spans, rank=1, label="TP1"))))
    assert [(e["pid"], e["tid"]) for e in of_kind(trace, "X")] == [
        (1, 1),
        (1, 3),
        (1, 4),
        (2, 2),
        (2, 5),
        (2, 6),
    ]


def test_a_run_out_of_memory_has_its_failure_inside_the_phase_it_never_left() -> None:
    slices = {event["name"]: event for event in of_kind(trace_of(oom_report()), "X", "B")}
    assert (slices["weight_load"]["ph"], slices["oom"]["ph"]) == ("B", "X")
    assert slices["weight_load"]["tid"] == slices["oom"]["tid"]


def test_the_rules_refuse_slices_that_overlap() -> None:
    def drawn(ts: float, dur: float) -> dict[str, Any]:
        return {"name": "a", "ph": "X", "ts": ts, "dur": dur}

    check_nesting([drawn(0, 10), drawn(2, 3), drawn(5, 5)])
    with pytest.raises(AssertionError):
        check_nesting([drawn(0, 10), drawn(2, 9)])


def test_unknown_is_no_event_never_zero() -> None:
    low = replace(snapshot(allocated_bytes=gib(1)), t_ns=SECOND)
    trace = trace_of(
        build_report(run_of(process([span("weight_load", low, low, start_t_ns=SECOND)])))
    )
    assert {event["name"] for event in of_kind(trace, "C")} == {"allocated"}


@pytest.mark.parametrize("log", LOGS[:1], ids=lambda path: path.stem)
def test_a_log_has_no_trace(log) -> None:
    for run in read_log(str(log)):
        with pytest.raises(UsageError, match="a log tells of no moments in time"):
            "".join(report_trace(build_report(run)))


def test_a_run_that_died_before_its_first_phase_has_no_trace() -> None:
    with pytest.raises(UsageError, match="no phase was recorded"):
        "".join(report_trace(build_report(run_of(process([])))))


def test_names_stay_text() -> None:
    hostile = '<img src=x onerror=alert(1)>"\n模型'
    assert trace_of(report_of("graph_tp2", model=hostile))["otherData"]["model"] == hostile
