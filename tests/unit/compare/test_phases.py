"""Phases and owners of two ranks side by side."""

from __future__ import annotations

import pytest

from tests.unit.accounting.builders import process, recorded, run_of, snapshot, span
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.compare.phases import owner_diffs, phase_diffs


def rank_with(*phases: tuple[str, int]) -> RankReport:
    spans = [
        span(phase, None, snapshot(reserved_bytes=size), order=order)
        for order, (phase, size) in enumerate(phases)
    ]
    return build_report(run_of(process(spans))).ranks[0]


def test_a_phase_of_b_alone_stands_after_the_one_that_it_follows() -> None:
    a = rank_with(("device_init", 1), ("weight_load", 2), ("warm_up", 3))
    b = rank_with(("device_init", 1), ("weight_load", 5), ("profile_run", 6), ("warm_up", 7))
    found = phase_diffs(a, b)
    assert [row.path for row in found] == [
        ("device_init",),
        ("weight_load",),
        ("profile_run",),
        ("warm_up",),
    ]
    assert [row.values("reserved_bytes") for row in found] == [(1, 1), (2, 5), (None, 6), (3, 7)]


def test_passages_of_one_name_are_one_and_the_last_reading_counts() -> None:
    row = phase_diffs(rank_with(("request", 1), ("request", 4)), rank_with(("request", 2)))[0]
    assert (row.a_count, row.b_count, row.a_seconds, row.b_seconds) == (2, 1, 2.0, 1.0)
    assert row.values("reserved_bytes") == (4, 2)


@pytest.mark.parametrize("name", ["recorded_tp2", "graph_tp2"])
def test_the_owners_add_up_to_the_device(name: str) -> None:
    rank = build_report(recorded(name)).ranks[0]
    rows = owner_diffs(rank, rank)
    for phase in {row.phase for row in rows}:
        sizes = [row.a for row in rows if row.phase == phase]
        assert sum(size or 0 for size in sizes) == rank.device_total_bytes
