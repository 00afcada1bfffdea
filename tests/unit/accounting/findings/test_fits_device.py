"""Findings about the device: one verdict at a time, as the KV cache of the same run grows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.accounting.builders import process, run_of, snapshot, span
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.model import Finding
from vllm_memprof.record.spans import Span
from vllm_memprof.units import MIB

TOTAL = 8000 * MIB
WEIGHTS, START, PEAK, RESERVED, GRAPHS = 1000, 300, 1400, 1900, 200
VERDICTS = ("kv-cache-beyond-device", "reserved-peak-beyond-device", "headroom-small")
#: Spare: 8000 - 1900 reserved - 300 non-torch - 200 that came later; released 500 more.
FITS, FITS_RELEASED = 8000 - 2400, 8000 - 1900


def at(reserved: int, allocated: int, non_torch: int) -> Any:
    return snapshot(
        device_total_bytes=TOTAL,
        device_free_bytes=TOTAL - (reserved + non_torch) * MIB,
        reserved_bytes=reserved * MIB,
        allocated_bytes=allocated * MIB,
        allocated_peak_bytes=max(allocated, PEAK) * MIB,
        non_torch_bytes=non_torch * MIB,
        npu_workspace_bytes=0,
    )


def start_up(kv_cache: int, utilization: float = 0.9) -> Report:
    """A start with a KV cache of so many MiB."""
    idle, begun = at(WEIGHTS, WEIGHTS, START), at(0, 0, START)
    grown = WEIGHTS + kv_cache
    phases: list[Span] = [
        span("weight_load", begun, idle, 0),
        span("profile_run", idle, idle, 1),
        span("empty_cache", at(RESERVED, WEIGHTS, START), idle, 2, parent=1, depth=1),
        span("kv_cache_alloc", idle, at(grown, grown, START), 3),
        span("warm_up", at(grown, grown, START), at(grown, grown, START + GRAPHS), 4),
    ]
    figures = {
        "device_total_bytes": TOTAL,
        "initial_free_bytes": TOTAL - START * MIB,
        "initial_non_torch_bytes": START * MIB,
        "gpu_memory_utilization": utilization,
        "requested_bytes": TOTAL * utilization,
        "weights_bytes": WEIGHTS * MIB,
        "peak_activation_bytes": (PEAK - WEIGHTS) * MIB,
        "non_torch_increase_bytes": 0,
        "profile_before_allocated_peak_bytes": WEIGHTS * MIB,
        "profile_after_allocated_peak_bytes": PEAK * MIB,
        "graph_bytes": GRAPHS * MIB,
        "kv_cache_bytes": kv_cache * MIB,
    }
    return build_report(run_of(process(phases, figures)))


def found_in(report: Report) -> dict[str, Finding]:
    return {each.id: each for each in report.findings}


@pytest.mark.parametrize(
    ("kv_cache", "verdict", "finding"),
    [
        (FITS - 150, "fits", None),
        (FITS - 149, "narrow", "headroom-small"),
        (FITS, "narrow", "headroom-small"),
        (FITS + 1, "release", "reserved-peak-beyond-device"),
        (FITS_RELEASED, "release", "reserved-peak-beyond-device"),
        (FITS_RELEASED + 1, "exceeds", "kv-cache-beyond-device"),
    ],
)
def test_one_verdict_one_finding(kv_cache: int, verdict: str, finding: str | None) -> None:
    report = start_up(kv_cache)
    budget = report.ranks[0].budget
    assert budget.fits_device_bytes == FITS * MIB
    assert budget.fits_device_released_bytes == FITS_RELEASED * MIB
    assert budget.headroom_bytes == (FITS - kv_cache) * MIB
    assert budget.device_verdict == verdict
    assert [name for name in VERDICTS if name in found_in(report)] == ([finding] if finding else [])


def test_the_verdict_has_the_size_that_fits() -> None:
    over = found_in(start_up(FITS_RELEASED + 1))["kv-cache-beyond-device"]
    assert (over.severity, over.bytes) == ("error", MIB)
    assert f"--kv-cache-memory-bytes {FITS * MIB} " in over.action
    release = found_in(start_up(FITS + 7))["reserved-peak-beyond-device"]
    assert (release.severity, release.bytes) == ("warning", 7 * MIB)
    assert "8000" not in release.evidence
    assert "7.81 GiB - (1.86 reserved, peak of the profile run + " in release.evidence
    small = found_in(start_up(FITS))["headroom-small"]
    assert (small.severity, small.bytes) == ("warning", 0)
    assert f"--kv-cache-memory-bytes {(FITS - 150) * MIB} " in small.action


def test_what_only_exceeds_the_request_is_info() -> None:
    assert found_in(start_up(1000))["graph-not-charged"].severity == "info"
    assert found_in(start_up(FITS_RELEASED + 1))["graph-not-charged"].severity == "warning"


def test_where_the_device_s_budget_is_unknown_the_unrequested_share_decides() -> None:
    def severity(utilization: float) -> str:
        report = start_up(1000, utilization)
        (rank,) = report.ranks
        run = run_of(replace(process([], dict(rank.figures))))
        return found_in(build_report(run))["graph-not-charged"].severity

    assert severity(0.97) == "info"  # 240 MiB of the device were never requested
    assert severity(0.98) == "warning"


def test_the_engine_s_own_suggestions_are_held_against_the_device() -> None:
    report = start_up(1000, 0.5)
    budget = report.ranks[0].budget
    taken = WEIGHTS + (PEAK - WEIGHTS) + GRAPHS + 150
    assert budget.suggested_bytes == [(4000 - taken) * MIB, (8000 - START - taken) * MIB]
    assert [each.headroom_bytes for each in budget.suggestions] == [
        FITS * MIB - size for size in budget.suggested_bytes
    ]
    found = found_in(report)["engine-suggestion-beyond-device"]
    assert found.bytes == (8000 - START - taken - FITS) * MIB
    assert found.severity == "info"
