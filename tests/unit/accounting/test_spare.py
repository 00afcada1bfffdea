"""Spare memory, the worst moment of a profile run, and runs of the older methods under hooks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
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
    # 0.9 + 19.85 / 60.96 is more than the device has: no utilization is named
    assert found.action.startswith("move the other process to another device, or upgrade to")


# -- the layout of a KV cache of which a log prints tokens and GiB ---------------------------


def test_one_multiple_in_the_range_is_the_layout() -> None:
    kv = infer_layout(
        Kv(tokens=645_120, max_model_len=65_536), gib(44.30), gib(0.005), "vllm-ascend"
    )
    assert (kv.bytes_per_token, kv.blocks, kv.derived) == (73_728, 5_040, True)
    assert kv.bytes_per_token_limits == [73_711, 73_741]
    assert kv.default_block_size


def test_latent_attention_is_no_multiple_of_512() -> None:
    """DeepSeek-V2-Lite: 27 layers of 576 numbers of 2 bytes."""
    kv = infer_layout(Kv(tokens=782_208), gib(22.66), gib(0.005), "vllm-ascend")
    assert (kv.bytes_per_token, kv.bytes_per_block) == (27 * 576 * 2, 27 * 576 * 2 * 128)
    assert kv.bytes_per_token % 512


@pytest.mark.parametrize(
    ("tokens", "granted", "true"),
    [(94_784, 10.12, 28 * 4_096), (171_904, 41.98, 512 * 512), (53_136, 12.57, 62 * 4_096)],
)
def test_several_multiples_leave_the_range_and_a_block_size_that_is_not_printed_nothing(
    tokens: int, granted: float, true: int
) -> None:
    """The last fits blocks of 16 and less: vLLM's plugins and backends set their own."""
    kv = infer_layout(Kv(tokens=tokens), gib(granted), gib(0.005), "vllm")
    assert (kv.bytes_per_token, kv.bytes_per_block, kv.blocks, kv.block_size) == (None,) * 4
    assert kv.bytes_per_token_limits is not None
    low, high = kv.bytes_per_token_limits
    assert low <= true <= high


def test_no_layout_where_several_fit_or_layers_differ() -> None:
    unsure = infer_layout(Kv(tokens=1_280), gib(1), gib(0.005), "vllm-ascend")
    assert (unsure.bytes_per_token, unsure.blocks) == (None, 10)
    hybrid = Kv(tokens=282_240, max_model_len=4_096, max_concurrency=210.07)
    assert infer_layout(hybrid, gib(20), gib(0.005), "vllm-ascend") is hybrid
    plan = Kv(tokens=645_120, blocks=5_040)
    assert infer_layout(plan, gib(44.30), gib(0.005), "vllm-ascend") is plan
    assert infer_layout(Kv(), None, 0, None) == Kv()
