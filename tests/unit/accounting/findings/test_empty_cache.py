"""Findings about single calls of empty_cache, from spans by hand."""

from __future__ import annotations

import pytest

from tests.unit.accounting.test_empty_cache import (
    MIB,
    Report,
    at,
    call,
    found,
    one,
    phase,
    report_of,
)


def test_a_call_in_a_step_is_priced_and_a_call_between_requests_is_not() -> None:
    hot = report_of(
        [call(200 + i, (10, 74), (10, 10), i, requests=2, in_step=True) for i in range(4)]
    )
    finding = one(hot, "empty-cache-in-hot-path")
    assert finding.bytes == 64 * MIB
    assert (
        "4 call(s) at runner.py:7 (Runner.step), 4 of them inside a step, up to 2 request(s) kept"
        in finding.evidence
    )
    assert "8.00 ms in all, 2.00 ms at most" in finding.evidence
    idle = report_of([call(200 + i, (10, 74), (10, 10), i) for i in range(4)])
    assert "empty-cache-in-hot-path" not in found(idle)


def test_memprof_s_own_calls_are_nobody_s_habit() -> None:
    own = [
        call(200 + i, (10, 74), (10, 10), i, by="memprof", at="warm_up", requests=1)
        for i in range(4)
    ]
    report = report_of(own)
    assert found(report) & {"empty-cache-in-hot-path", "empty-cache-refilled"} == set()
    assert report.ranks[0].reclaim is not None
    assert report.ranks[0].reclaim.calls == 0
    assert len(report.ranks[0].empty_cache) == 4


def test_what_comes_back_as_cache_is_taken_again() -> None:
    report = report_of([call(200, (10, 74), (10, 10), 0), call(210, (10, 74), (10, 10), 1)])
    first, last = report.ranks[0].empty_cache
    assert (first.refilled_bytes, first.refilled_by) == (64 * MIB, "the next call")
    assert (last.refilled_bytes, last.refilled_by) == (None, None)
    finding = one(report, "empty-cache-refilled")
    assert finding.bytes == 0
    assert "freed 67,108,864 bytes, 67,108,864 of them reallocated" in finding.evidence


def test_calls_of_a_start_up_are_a_habit_only_when_they_take_time() -> None:
    def layers(seconds: float) -> Report:
        load = phase("weight_load", 10, at(10, 0, 0), at(90, 10, 10), 0)
        calls = [call(20 + i, (10, 74), (10, 10), i + 1, 0, seconds=seconds) for i in range(4)]
        return report_of([load, *calls])

    assert "empty-cache-refilled" not in found(layers(0.001))
    assert "empty-cache-refilled" in found(layers(0.1))


def test_a_reading_that_empties_is_found_with_what_it_hid() -> None:
    chain = ["vllm.platforms.cuda:CudaPlatformBase.get_current_memory_usage"]
    load = phase("weight_load", 10, at(10, 0, 0), at(90, 10, 10), 0)
    report = report_of([load, call(20, (10, 74), (10, 10), 1, 0, chain=chain)])
    finding = one(report, "observation-empties-cache")
    assert (finding.severity, finding.bytes) == ("info", 64 * MIB)
    assert finding.evidence.endswith("freed 0.0625 GiB before it read: weight_load 0.0625")
    plain = report_of([load, call(20, (10, 74), (10, 10), 1, 0, chain=["a.b:load_model"])])
    assert "observation-empties-cache" not in found(plain)


def flushed(
    emptied: bool = False, cached: int = 160, called_before: bool = True, **detail: object
) -> Report:
    """A flush that leaves ``cached`` MiB in the cache, after a start-up whose readings empty it."""
    level = at(200, 10, 10 + cached)
    spans = [call(50, (10, 20), (10, 12), 0)] if called_before else []
    flush = phase("flush_cache", 200, level, level, len(spans), detail={"success": True, **detail})
    spans.append(flush)
    if emptied:
        parent, after = flush.order, (10, 10 + cached)
        spans.append(call(201, after, after, len(spans), parent))
    return report_of(spans)


def test_a_flush_in_which_the_cache_is_not_emptied() -> None:
    finding = one(flushed(), "flush-frees-nothing")
    assert finding.bytes == 160 * MIB
    assert finding.severity == "warning"
    assert "1 flush(es) succeeded, empty_cache was called in none of them" in finding.evidence
    assert "SGLang 0.5.20" in finding.action
    assert one(flushed(cached=64), "flush-frees-nothing").severity == "info"


def test_the_workspace_that_a_flush_leaves_counts() -> None:
    level = at(200, 10, 74, npu_workspace_bytes=182 * MIB)
    flush = phase("flush_cache", 200, level, level, 1, detail={"success": True})
    finding = one(report_of([call(50, (10, 20), (10, 12), 0), flush]), "flush-frees-nothing")
    assert (finding.bytes, finding.severity) == (246 * MIB, "warning")


@pytest.mark.parametrize(
    "report",
    [
        flushed(emptied=True),  # it was called, whatever it found to free
        flushed(cached=0),  # there was nothing to free
        flushed(empty_cache=False),  # asked not to
        flushed(success=False),  # the engine said that it did not flush
        flushed(called_before=False),  # the record may have no call of any kind
    ],
)
def test_other_flushes_are_none(report: Report) -> None:
    assert "flush-frees-nothing" not in found(report)


def test_an_observation_says_what_it_freed_in_which_phase() -> None:
    chain = ["sglang.srt.utils.common:get_available_gpu_memory", "a:load_model"]
    load = phase("weight_load", 10, at(10, 0, 0), at(90, 10, 10), 0)
    calls = [
        call(20, (10, 74), (10, 10), 1, 0, chain=chain),
        call(30, (10, 42), (10, 10), 2, 0, chain=chain),
        call(200, (10, 12), (10, 10), 3, chain=chain),
    ]
    finding = one(report_of([load, *calls]), "observation-empties-cache")
    assert finding.bytes == 98 * MIB
    assert "3 call(s), 6.00 ms, freed 0.0957 GiB before it read" in finding.evidence
    assert finding.evidence.endswith("weight_load 0.0938, no phase 0.0020")
