"""The audit of empty_cache, cycles of sleep mode and weight updates: rows and findings from spans by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import Report
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span

from .builders import TOTAL, process, recorded, run_of, span

MIB = 1 << 20
READY = 100


def at(
    t_ns: int, allocated: int, reserved: int, non_torch: int = 400, **values: int | None
) -> Snapshot:
    """A reading; sizes in MiB."""
    free = TOTAL - (reserved + non_torch) * MIB + (values.get("unmapped_bytes") or 0)
    known = {
        "device_total_bytes": TOTAL,
        "device_free_bytes": free,
        "allocated_bytes": allocated * MIB,
        "reserved_bytes": reserved * MIB,
        "non_torch_bytes": non_torch * MIB,
        "npu_workspace_bytes": 0,
        "alloc_retries": 0,
    }
    return Snapshot(t_ns=t_ns, **{**known, **values})  # type: ignore[arg-type]


def call(
    t_ns: int,
    before: tuple[int, ...],
    after: tuple[int, ...],
    order: int,
    parent: int | None = None,
    **detail: Any,
) -> Span:
    """A passage of empty_cache from ``before`` to ``after``: (allocated, reserved, non-torch) in MiB."""
    values = {
        "site": "runner.py:7",
        "function": "Runner.step",
        "seconds": 0.002,
        "requests": 0,
        "in_step": False,
    }
    return span(
        "empty_cache", at(t_ns, *before), at(t_ns + 1, *after), order, parent=parent, depth=0 if parent is None else 1,
        start_t_ns=t_ns, end_t_ns=t_ns + 1, detail={**values, **detail},
    )  # fmt: skip


def changed(span: Span, *sides: str, **values: Any) -> Span:
    """Return the span with other figures in the snapshots of some edges."""
    edges = {e.side: replace(e.snapshot, **values) for e in span.edges if e.side in sides}
    return replace(span, **edges)


def phase(
    name: str, t_ns: int, before: Snapshot, after: Snapshot, order: int, **values: Any
) -> Span:
    return span(name, before, after, order, start_t_ns=t_ns, end_t_ns=t_ns + 5, **values)


def report_of(spans: list[Span]) -> Report:
    return build_report(run_of(replace(process(spans), ready_t_ns={"model": READY})))


def found(report: Report) -> set[str]:
    return {finding.id for finding in report.findings}


def one(report: Report, name: str) -> Any:
    [finding] = [finding for finding in report.findings if finding.id == name]
    return finding


# --- who runs
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t_ns", "detail", "serving"),
    [
        (200, {"requests": 3}, True),
        (200, {"requests": 0}, False),
        (200, {"requests": 0, "in_step": True}, True),
        (
            200,
            {"requests": None, "in_step": None},
            True,
        ),  # an older record: ready is all that it knows
        (50, {"requests": 3, "in_step": True}, False),  # the warm-up runs steps, too
    ],
)
def test_serving_means_that_requests_ran(t_ns: int, detail: dict[str, Any], serving: bool) -> None:
    [found_call] = report_of([call(t_ns, (10, 20), (10, 12), 0, **detail)]).ranks[0].empty_cache
    assert found_call.while_serving is serving


# --- freed and reallocated ------------------------------------------------------------------------------------------


def test_what_tensors_hold_by_then_is_not_taken_again() -> None:
    """The KV cache comes after the profile's empty_cache: it is allocated, not cached once more."""
    kv = phase("kv_cache_alloc", 60, at(60, 10, 12), at(65, 5010, 5012), 1)
    report = report_of([call(50, (10, 74), (10, 12), 0), kv])
    [profile] = report.ranks[0].empty_cache
    assert (profile.refilled_bytes, profile.refilled_by) == (0, "the end of kv_cache_alloc")
    assert "empty-cache-refilled" not in found(report)


def test_tensors_freed_into_the_cache_meanwhile_are_not_taken_again() -> None:
    """At the end of a run the KV cache is freed after the call: cached, but never returned."""
    calls = [call(50, (5000, 5070), (5000, 5002), 0), call(60, (10, 5002), (10, 12), 1)]
    first = report_of(calls).ranks[0].empty_cache[0]
    assert first.freed_cached_bytes == 68 * MIB
    assert (first.refilled_bytes, first.refilled_by) == (0, "the next call")


def test_workspace_that_comes_back_counts() -> None:
    spans = [
        call(200, (10, 12, 470), (10, 12, 400), 0),
        call(210, (10, 12, 470), (10, 12, 400), 1),
    ]
    report = report_of([changed(each, "before", npu_workspace_bytes=70 * MIB) for each in spans])
    first = report.ranks[0].empty_cache[0]
    assert (first.freed_npu_workspace_bytes, first.freed_other_bytes) == (70 * MIB, 0)
    assert first.refilled_bytes == 70 * MIB
    assert "empty-cache-refilled" in found(report)


def test_a_flush_of_the_allocator_shows_between_calls() -> None:
    flushed = changed(call(210, (10, 12), (10, 12), 1), "before", "after", alloc_retries=3)
    calls = report_of([call(200, (10, 12), (10, 12), 0), flushed]).ranks[0].empty_cache
    assert [c.alloc_retries for c in calls] == [0, 3]


# --- cycles ---------------------------------------------------------------------------------------------------------


def sleeps(
    count: int, leak: int = 0, cached: int = 0, non_torch: int = 0, emptied: bool = True
) -> Report:
    """Cycles that leave ``leak`` MiB allocated, ``cached`` MiB cached, ``non_torch`` MiB outside torch, each."""
    spans: list[Span] = []

    def level(t_ns: int, done: int, unmapped: int = 0) -> Snapshot:
        allocated = 1000 + done * leak
        return at(
            t_ns,
            allocated,
            allocated + 20 + done * cached,
            400 + done * non_torch,
            unmapped_bytes=unmapped * MIB,
        )

    for i in range(count):
        t = 1000 * (i + 1)
        order = len(spans)
        spans.append(phase("sleep", t, level(t, i), level(t + 5, i, 900), order))
        if emptied:
            asleep = level(t + 1, i, 900)
            spans.append(
                span(
                    "empty_cache",
                    asleep,
                    asleep,
                    order + 1,
                    parent=order,
                    depth=1,
                    start_t_ns=t + 1,
                    end_t_ns=t + 2,
                )
            )
        spans.append(
            phase("wake_up", t + 10, level(t + 10, i, 900), level(t + 15, i + 1), len(spans))
        )
    return report_of(spans)


def test_cycles_that_leave_nothing() -> None:
    report = sleeps(5)
    rows = report.ranks[0].cycles
    assert [row.number for row in rows] == [1, 2, 3, 4, 5]
    assert [row.residue_bytes for row in rows] == [0] * 5
    assert rows[0].used_bytes is not None
    assert rows[0].asleep_used_bytes == rows[0].used_bytes - 900 * MIB
    assert found(report) & {"residue-per-cycle", "reserved-grows-without-empty-cache"} == set()


def test_a_sleep_that_was_never_left_is_no_cycle() -> None:
    asleep = phase("sleep", 1000, at(1000, 10, 20), at(1005, 10, 20), 0)
    assert report_of([asleep]).ranks[0].cycles == []


def test_a_wake_up_that_failed_ends_no_cycle() -> None:
    asleep = phase("sleep", 1000, at(1000, 10, 20), at(1005, 10, 20), 0)
    failed = phase("wake_up", 1010, at(1010, 10, 20), at(1015, 10, 20), 1, error="ValueError: no")
    assert report_of([asleep, failed]).ranks[0].cycles == []


# --- what it was worth ----------------------------------------------------------------------------------------------


def test_the_summary_leaves_out_the_shutdown_and_memprof_s_own() -> None:
    spans = [
        phase("profile_run", 10, at(10, 10, 12), at(15, 10, 12), 0),
        call(12, (10, 74), (10, 12), 1, 0),
        phase("warm_up", 60, at(60, 10, 12), at(65, 10, 40), 2),
        call(70, (10, 40), (10, 12), 3, by="memprof", at="warm_up"),
        call(300, (10, 40), (10, 12), 4),
        phase("shutdown", 400, at(400, 10, 40), at(405, 0, 0), 5),
        call(401, (10, 40), (0, 0), 6, 5),
        call(500, (0, 0), (0, 0), 7),
    ]
    rank = report_of(spans).ranks[0]
    summary = rank.reclaim
    assert summary is not None
    assert (summary.calls, summary.calls_while_serving) == (2, 0)
    assert summary.engine.freed_cached_bytes == (62 + 28) * MIB
    assert (summary.left_after, summary.left_cached_bytes) == ("warm_up", 30 * MIB)
    [own] = [each for each in rank.empty_cache if each.by == "memprof"]
    assert (own.at, own.freed_bytes, own.kept_bytes) == (
        "warm_up",
        28 * MIB,
        0,
    )  # 28 MiB again at the call
    assert own.kept_until == "the next call"


def test_an_experiment_of_the_start_up_is_judged_at_its_end() -> None:
    spans = [
        phase("weight_load", 10, at(10, 10, 74), at(15, 10, 74), 0),
        call(20, (10, 74), (10, 12), 1, by="memprof", at="weight_load"),
        phase("profile_run", 30, at(30, 10, 12), at(35, 10, 74), 2),
        phase("warm_up", 60, at(60, 10, 12), at(65, 10, 22), 3),
    ]
    [own] = report_of(spans).ranks[0].empty_cache
    assert (own.freed_bytes, own.kept_bytes) == (62 * MIB, 52 * MIB)
    assert own.kept_until == "the end of the start-up"


def test_older_records_are_read_as_before() -> None:
    rank = build_report(recorded("graph_tp2")).ranks[0]
    assert rank.reclaim is not None
    assert rank.reclaim.calls == len([c for c in rank.empty_cache if not c.at_end])
    assert {c.by for c in rank.empty_cache} == {"engine"}
    assert {c.requests for c in rank.empty_cache} == {None}


def test_a_run_that_changed_itself_says_so() -> None:
    report = build_report(recorded("graph_tp2", empty_cache_at=["warm_up"]))
    assert report.run.empty_cache_at == ["warm_up"]
    assert any(
        "memprof itself called empty_cache at the end of warm_up" in note
        for note in report.run.notes
    )


def test_the_runtime_s_counters_say_which_modules_gave_something_back() -> None:
    """A communicator's buffers stay; workspace and cached blocks are the application's."""
    first = call(200, (10, 74), (10, 10), 0)
    before = {
        "APP": {"bytes": 90 * MIB},
        "HCCL": {"bytes": 400 * MIB},
        "RUNTIME": {"bytes": 5 * MIB},
    }
    after = {
        "APP": {"bytes": 26 * MIB},
        "HCCL": {"bytes": 400 * MIB},
        "RUNTIME": {"bytes": 5 * MIB},
    }
    read = changed(changed(first, "before", components=before), "after", components=after)
    rank = report_of([read]).ranks[0]
    assert rank.empty_cache[0].freed_by_module == {"APP": 64 * MIB, "HCCL": 0, "RUNTIME": 0}
    assert rank.reclaim is not None
    assert rank.reclaim.engine.freed_by_module == {"APP": 64 * MIB, "HCCL": 0, "RUNTIME": 0}
    unread = report_of([read, call(210, (10, 74), (10, 10), 1)]).ranks[0].reclaim
    assert unread is not None
    assert unread.engine.freed_by_module is None
