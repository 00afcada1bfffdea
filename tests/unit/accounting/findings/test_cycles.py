"""Findings about cycles of sleep mode, pauses and weight updates, from spans by hand."""

from __future__ import annotations

from pathlib import Path

from tests.support.render import table
from tests.unit.accounting.test_empty_cache import (
    MIB,
    Report,
    at,
    call,
    found,
    one,
    phase,
    report_of,
    sleeps,
)
from vllm_memprof.accounting import build_report
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.spans import Span
from vllm_memprof.units import GIB


def test_a_leak_of_each_cycle() -> None:
    report = sleeps(5, leak=240)
    finding = one(report, "residue-per-cycle")
    assert finding.bytes == 240 * MIB
    assert "allocated +240.0 MiB x 4 over 5 cycles" in finding.evidence
    free = report.ranks[0].cycles[-1].free_bytes
    assert free is not None
    assert f"full after {free // (240 * MIB)} more" in finding.evidence
    assert "reserved-grows-without-empty-cache" not in found(report)


def test_two_cycles_prove_no_growth() -> None:
    assert "residue-per-cycle" not in found(sleeps(2, leak=240))


def test_sleeps_of_a_log_are_printed_and_their_growth_is_found(tmp_path: Path) -> None:
    """NVIDIA-NeMo/RL#2619"""
    line = "INFO 05-29 10:00:00 [gpu_worker.py:116] Sleep mode freed 43.82 GiB memory, {} GiB memory is still in use."

    def report(*sizes: str) -> Report:
        path = tmp_path / "engine.log"
        path.write_text("\n".join(map(line.format, sizes)) + "\n")
        (found,) = [build_report(run) for run in read_log(str(path))]
        return found

    grown = report("4.11", "11.57", "25.00")
    cycles = grown.ranks[0].cycles
    assert [round((cycle.freed_bytes or 0) / GIB, 2) for cycle in cycles] == [43.82] * 3
    assert [round((cycle.asleep_used_bytes or 0) / GIB, 2) for cycle in cycles] == [
        4.11,
        11.57,
        25.0,
    ]
    finding = one(grown, "residue-per-cycle")
    assert "in use while asleep +7639.0, +13752.3 MiB over 3 cycles" in finding.evidence
    shown = table(grown, 120)
    assert "43.8200  11.5700   +7,639.0" in shown
    assert "empty_cache" not in shown  # a log does not tell
    steady = report("4.11", "4.63", "4.63", "4.63")
    assert "residue-per-cycle" not in found(steady)
    assert len(steady.ranks[0].cycles) == 4
    assert steady.failure is None
    assert "43.8200" in table(report("4.11"), 120)  # one alone


def test_growth_outside_torch_has_another_remedy() -> None:
    finding = one(sleeps(4, non_torch=32), "residue-per-cycle")
    assert finding.bytes == 32 * MIB
    assert "non-torch +32.0 MiB x 3" in finding.evidence
    assert "enable_sleep_mode_extra_cleanup" in finding.action


def test_cached_blocks_that_grow_although_the_cache_was_emptied_are_a_residue() -> None:
    report = sleeps(4, cached=16)
    assert (
        "reserved, not allocated (empty_cache does not free it) +16.0 MiB x 3"
        in one(report, "residue-per-cycle").evidence
    )
    assert "reserved-grows-without-empty-cache" not in found(report)


def test_growth_that_stops_is_none() -> None:
    """The first cycles may take what the engine needs only once."""
    updates = [
        at(1000, 1000, 1020),
        at(1005, 1000, 1084),
        at(2005, 1000, 1084),
        at(3005, 1000, 1084),
    ]
    spans = [
        phase("weight_update", 1000 * (i + 1), updates[i], updates[i + 1], i) for i in range(3)
    ]
    report = report_of(spans)
    assert [row.cached_residue_bytes for row in report.ranks[0].cycles] == [64 * MIB, 0, 0]
    assert found(report) & {"residue-per-cycle", "reserved-grows-without-empty-cache"} == set()


def updates(emptied: bool) -> Report:
    spans: list[Span] = []
    for i in range(5):
        t, level = 1000 * (i + 1), 1020 + 64 * i
        spans.append(
            phase("weight_update", t, at(t, 1000, level), at(t + 5, 1000, level + 64), len(spans))
        )
        if emptied:
            spans.append(call(t + 10, (1000, level + 64), (1000, level + 64), len(spans)))
    return report_of(spans)


def test_reserved_memory_that_grows_with_every_update() -> None:
    report = updates(emptied=False)
    finding = one(report, "reserved-grows-without-empty-cache")
    assert finding.bytes == 4 * 64 * MIB
    assert "+64.0 MiB x 4 over 5 cycles, no empty_cache in between" in finding.evidence
    assert "after each weight update" in finding.action
    assert "residue-per-cycle" not in found(report)


def test_updates_that_are_emptied_between_are_not_without() -> None:
    assert (
        found(updates(emptied=True)) & {"reserved-grows-without-empty-cache", "residue-per-cycle"}
        == set()
    )


def pauses(emptied: bool, growth: int = 64) -> Report:
    """Five pauses with an update in each, which leaves ``growth`` MiB more in the cache."""
    spans: list[Span] = []
    left = 1020
    for i in range(5):
        t, grown = 1000 * (i + 1), left + growth
        spans.append(phase("pause", t, at(t, 1000, left), at(t + 5, 1000, left), len(spans)))
        spans.append(
            phase(
                "weight_update", t + 10, at(t + 10, 1000, left), at(t + 15, 1000, grown), len(spans)
            )
        )
        left = 1020 if emptied else grown
        order = len(spans)
        spans.append(
            phase("continue", t + 20, at(t + 20, 1000, grown), at(t + 25, 1000, left), order)
        )
        if emptied:
            spans.append(call(t + 21, (1000, grown), (1000, left), order + 1, order, requests=4))
    return report_of(spans)


def test_a_pause_with_its_update_is_one_cycle() -> None:
    report = pauses(emptied=False)
    cycles = report.ranks[0].cycles
    assert [(cycle.kind, cycle.number) for cycle in cycles] == [("pause", n) for n in range(1, 6)]
    assert [cycle.cached_residue_bytes for cycle in cycles] == [64 * MIB] * 5
    finding = one(report, "reserved-grows-without-empty-cache")
    assert "+64.0 MiB x 4 over 5 cycles, no empty_cache in between" in finding.evidence
    assert "torch_empty_cache of /continue_generation" in finding.action


def test_the_continue_that_empties_the_cache_ends_the_growth() -> None:
    report = pauses(emptied=True)
    cycles = report.ranks[0].cycles
    assert [cycle.cached_residue_bytes for cycle in cycles] == [0] * 5
    assert all(cycle.emptied_inside for cycle in cycles)
    assert found(report) & {"residue-per-cycle", "reserved-grows-without-empty-cache"} == set()


def test_a_call_of_a_paused_engine_keeps_no_request_waiting() -> None:
    """The requests that the runner holds are paused until the continue returns, not longer."""
    spans = [phase("pause", 1000, at(1000, 10, 20), at(1005, 10, 20), 0)]
    spans.append(call(1010, (10, 20), (10, 20), 1, requests=4))
    spans.append(phase("continue", 1020, at(1020, 10, 20), at(1025, 10, 20), 2))
    spans.append(call(1021, (10, 20), (10, 20), 3, 2, requests=4))
    spans.append(call(1030, (10, 20), (10, 20), 4, requests=4))
    calls = report_of(spans).ranks[0].empty_cache
    assert [each.while_serving for each in calls] == [False, False, True]


def test_an_update_outside_a_pause_and_a_pause_without_one() -> None:
    """The pause that no update fell into is no cycle; the update after it is one of its own."""
    level = at(1, 1000, 1020)
    names = ["pause", "continue", "weight_update", "pause", "weight_update", "weight_update"]
    spans = [phase(name, 10 * n, level, level, n) for n, name in enumerate(names)]
    assert [cycle.kind for cycle in report_of(spans).ranks[0].cycles] == ["weight_update"]
    spans.append(phase("continue", 90, level, level, len(spans)))
    assert [cycle.kind for cycle in report_of(spans).ranks[0].cycles] == ["pause", "weight_update"]
