"""A budget in common quantities: its lines add up to the KV cache that was granted."""

from __future__ import annotations

import pytest

from tests.support.runs import RUNS
from tests.unit.accounting.builders import recorded
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.budget.decomposition import decompose, granted_bytes


@pytest.mark.parametrize("name", RUNS)
def test_the_lines_add_up_to_the_granted_kv_cache(name: str) -> None:
    report = build_report(recorded(name))
    for rank in report.ranks:
        found = decompose(rank)
        assert found.granted == granted_bytes(rank)
        if found.granted is None:
            assert found.unknown
        else:
            assert sum(line.bytes for line in found.lines) == found.granted
            assert found.differing == []


def test_absolute_terms_are_taken_apart() -> None:
    """E2 of 0.13.0: its two terms are weights, torch, activations, and what was held before."""
    report = build_report(recorded("recorded_013_tp2"))
    found = decompose(report.ranks[0])
    assert [line.names for line in found.lines][:8] == [
        ("requested",),
        ("weights",),
        ("persistent_torch",),
        ("peak_activation",),
        ("initial_non_torch",),
        ("other_processes_at_start",),
        ("reserved_not_allocated",),
        ("non_torch",),
    ]
    assert found.subtracted >= {"weights", "other_processes_at_start"}
    assert found.held["other_processes_at_start"] == 375_809_638
