"""Spare memory, the worst moment of a profile run, and runs of the older methods under hooks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.accounting.builders import TOTAL, gib, process, recorded, run_of, snapshot, span
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.kv import infer_layout
from vllm_memprof.accounting.model import Kv, Report
from vllm_memprof.accounting.spare import profile_peak, spare
from vllm_memprof.record.loader import ProcessRecord
from vllm_memprof.record.spans import Span


def at(
    free: int | None = None,
    reserved: int | None = None,
    non_torch: int | None = None,
    peak: int | None = None,
) -> Any:
    return snapshot(
        device_total_bytes=100,
        device_free_bytes=free,
        reserved_bytes=reserved,
        non_torch_bytes=non_torch,
        reserved_run_peak_bytes=peak,
    )


def test_the_least_free_moment_counts() -> None:
    spans = [span("weight_load", at(90), at(40)), span("warm_up", at(35), at(38), order=1)]
    assert spare(spans, 100) == 35


def test_a_reserved_peak_between_two_snapshots_counts_with_the_lesser_non_torch() -> None:
    spans = [span("profile_run", at(60, 30, 10, peak=30), at(55, 30, 15, peak=70))]
    assert spare(spans, 100) == 100 - (70 + 10)


def test_an_old_peak_does_not_count_again() -> None:
    spans = [span("request", at(60, 30, 10, peak=70), at(55, 30, 15, peak=70))]
    assert spare(spans, 100) == 55


def test_without_a_reading_nothing_is_known_to_be_spare() -> None:
    assert spare([], 100) is None
    assert spare([span("weight_load", None, snapshot())], 100) is None
    assert spare([span("weight_load", None, at(free=1))], None) is None


def test_the_profile_s_worst_moment_may_lie_inside_it() -> None:
    spans = [
        span("weight_load", at(90), at(1), order=0),  # does not count
        span("profile_run", at(80), at(70), order=1),
        span("empty_cache", at(20), at(70), order=2, parent=1, depth=1),
    ]
    assert profile_peak(spans, 100) == 80
    assert profile_peak(spans[:1], 100) is None


@given(frees=st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_no_more_is_spare_than_was_free(frees: list[int]) -> None:
    spans = [span("request", None, at(free), order=i) for i, free in enumerate(frees)]
    assert spare(spans, 100) == min(frees)


def test_a_recorded_run_has_spare_memory() -> None:
    for rank in build_report(recorded("graph_tp2")).ranks:
        least = min(
            s.device_free_bytes
            for row in rank.phases
            for s in (row.before, row.after)
            if s is not None
        )
        assert rank.spare_bytes is not None
        assert 0 < rank.spare_bytes <= least


# -- older methods under hooks: nothing but snapshots and what the engine granted ----------


def old_run(
    version: str, values: dict[str, Any], free: int, granted: int, neighbour: int = 0
) -> Report:
    """A worker whose engine keeps no reading: 9.45 GiB allocated, 13.30 at the peak."""
    before = snapshot(
        device_total_bytes=TOTAL,
        device_free_bytes=TOTAL - gib(19.13) - gib(1.07) - neighbour,
        allocated_bytes=gib(9.45),
        allocated_peak_bytes=gib(13.30),
        reserved_bytes=gib(19.13),
        non_torch_bytes=gib(1.07) + neighbour,
    )
    after = replace(
        before,
        device_free_bytes=free,
        reserved_bytes=gib(9.75),
        non_torch_bytes=TOTAL - free - gib(9.75),
    )
    spans: list[Span] = [
        span("profile_run", None, after),
        span("empty_cache", before, after, order=1, parent=0, depth=1),
    ]
    figures = {"gpu_memory_utilization": 0.9, "kv_cache_bytes": granted, **values}
    worker: ProcessRecord = replace(
        process(spans, figures), versions={"vllm": version, "vllm_ascend": version}
    )
    return build_report(run_of(worker))


def test_e2_from_snapshots_to_the_byte() -> None:
    free = TOTAL - gib(9.45) - gib(1.21)
    granted = max(0, int(TOTAL * 0.9 - (gib(13.30) + (TOTAL - free - gib(9.45)))))
    report = old_run("0.13.0", {}, free, granted)
    budget = report.ranks[0].budget
    assert (budget.equation, budget.residual_bytes, budget.balanced) == ("E2", 0, True)
    assert budget.device_total_bytes == TOTAL  # of the snapshots: the engine keeps none
    assert {item.name for item in budget.not_subtracted} == {
        "non_torch_cleared",
        "graph",
        "late_non_torch",
    }
    actions = " ".join(found.action for found in report.findings)
    assert "--kv-cache-memory-bytes" not in actions  # the release ignores it


def test_e3_charges_the_neighbour_and_says_so() -> None:
    neighbour = gib(19.5)
    free = TOTAL - gib(9.75) - gib(0.91) - neighbour
    values = {
        "device_total_bytes": TOTAL,
        "initial_free_bytes": TOTAL - gib(0.35) - neighbour,
        "initial_non_torch_bytes": gib(0.35) + neighbour,
        "requested_bytes": TOTAL * 0.9,
        "weights_bytes": gib(9.19),
        "peak_activation_bytes": gib(3.86),
        "non_torch_increase_bytes": gib(0.91) - gib(0.35),
    }
    cleared = gib(1.07) + neighbour - values["non_torch_increase_bytes"]
    granted = int(
        TOTAL * 0.9 - (values["non_torch_increase_bytes"] + gib(3.86) + gib(9.19)) - cleared,
    )
    report = old_run("0.17.0rc1", values, free, granted, neighbour)
    budget = report.ranks[0].budget
    assert (budget.equation, budget.residual_bytes) == ("E3", 0)
    assert budget.term("cleared") == cleared
    found = next(f for f in report.findings if f.id == "co-tenant")
    assert found.bytes == gib(0.35) + neighbour
    assert "takes that from the KV cache" in found.title
    assert (
        "no --gpu" not in found.action
    )  # 0.9 + 19.85 / 60.96 is more than the device has: no advice
    assert found.action == ""


# -- the layout of a KV cache of which a log prints tokens and GiB ---------------------------


def test_one_multiple_in_the_range_is_the_layout() -> None:
    kv = infer_layout(
        Kv(tokens=171_904, max_model_len=32_768, max_concurrency=5.25),
        gib(41.98),
        gib(0.005),
        "vllm",
    )
    assert (
        kv.bytes_per_token is None
    )  # 262,144 would need 171,904 + 25 tokens: less than a block of 16 is left over
    kv = infer_layout(
        Kv(tokens=94_784, max_model_len=2_048, max_concurrency=46.28),
        gib(10.12),
        gib(0.005),
        "vllm",
    )
    assert (kv.bytes_per_token, kv.blocks, kv.derived) == (114_688, 5_924, True)


def test_no_layout_where_several_fit_or_layers_differ() -> None:
    unsure = Kv(tokens=1_280)
    assert infer_layout(unsure, gib(1), gib(0.005), "vllm-ascend") is unsure
    hybrid = Kv(tokens=282_240, max_model_len=4_096, max_concurrency=210.07)
    assert infer_layout(hybrid, gib(20), gib(0.005), "vllm-ascend") is hybrid
    plan = Kv(tokens=645_120, blocks=5_040)
    assert infer_layout(plan, gib(44.30), gib(0.005), "vllm-ascend") is plan
    assert infer_layout(Kv(), None, 0, None) == Kv()
