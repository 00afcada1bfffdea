"""What is held at the serving peak, and runs of the older methods under hooks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.accounting.builders import TOTAL, gib, process, recorded, run_of, snapshot, span
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.budget.kv import infer_layout
from vllm_memprof.accounting.budget.serving_peak import ServingPeak, serving_peak, unprofiled
from vllm_memprof.accounting.model import Budget, Kv, Oom, Report
from vllm_memprof.accounting.readings.startup import Moments
from vllm_memprof.record.loader import ProcessRecord
from vllm_memprof.record.spans import ESTIMATED, Span
from vllm_memprof.text import text
from vllm_memprof.units import MIB

FIGURES = {"device_total_bytes": 1000, "profile_after_allocated_peak_bytes": 250}


def at(
    reserved: int,
    non_torch: int,
    allocated: int | None = None,
    workspace: int | None = 0,
    pools: int | None = None,
    peak: int | None = None,
) -> Any:
    return snapshot(
        device_total_bytes=1000,
        device_free_bytes=1000 - reserved - non_torch,
        reserved_bytes=reserved,
        allocated_bytes=reserved if allocated is None else allocated,
        non_torch_bytes=non_torch,
        npu_workspace_bytes=workspace,
        graph_pool_bytes=pools,
        reserved_run_peak_bytes=peak,
    )


def start_up(*later: Span, workspace: int | None = 20, retaken: int | None = 0) -> list[Span]:
    """100 of weights, 300 reserved at the peak, 400 of KV cache, then 30 + 15 after profiling."""
    return [
        span("profile_run", at(100, 40), at(110, 50, 100)),
        span("empty_cache", at(300, 70, 250, workspace), at(110, 50, 100), 1, parent=0, depth=1),
        span("kv_cache_alloc", at(110, 50, 100), at(510, 50, 500), 2),
        span("warm_up", at(510, 50, 500), at(540, 65 + (retaken or 0), 520, retaken, 25), 3),
        *later,
    ]


def peak_of(spans: list[Span], **figures: int) -> ServingPeak:
    return serving_peak(Moments(spans, {**FIGURES, **figures}), 400)


def sizes(peak: ServingPeak) -> dict[str, int | None]:
    return {item.name: item.bytes for item in peak.items}


def test_the_profile_run_at_its_worst_and_what_came_after_it() -> None:
    peak = peak_of(start_up())
    assert sizes(peak) == {
        "reserved_peak": 300,
        "non_torch_peak": 70,
        "late_torch": 30,  # 20 of tensors, and the pools of graphs; at most what reserved grew by
        "late_device": 15,  # 65 + a workspace of 20, less the 70 that are there already
    }
    assert peak.held_bytes == 415
    # released: the allocated peak, non-torch without workspace, tensors that came later
    assert peak.at_least_bytes == 250 + 65 + 20


def test_blocks_that_the_next_peak_uses_are_not_counted_again() -> None:
    spans = start_up()
    idle = at(600, 65, 520, 0, 25)  # 60 more reserved than in the test above, without a tensor
    spans[3] = span("warm_up", spans[3].before, idle, 3)
    assert sizes(peak_of(spans))["late_torch"] == 20 + 25


def test_workspace_that_is_there_again_is_not_counted_twice() -> None:
    assert sizes(peak_of(start_up(retaken=20)))["late_device"] == 15
    assert sizes(peak_of(start_up(retaken=50)))["late_device"] == 45
    # who holds what empty_cache released is not known: it is taken to come again
    assert sizes(peak_of(start_up(workspace=None, retaken=None)))["late_device"] == 15


def test_a_later_moment_counts_where_it_is_worse() -> None:
    assert "held_later" not in sizes(peak_of(start_up(span("request", at(600, 65), None, 4))))
    found = peak_of(start_up(span("request", at(600, 65), at(800, 65), 4)))
    assert sizes(found)["held_later"] == 800 + 65 - 400 - 415
    assert found.held_bytes == 465
    between = span("request", at(600, 65, peak=600), at(600, 80, peak=900), 4)
    # non-torch memory at that moment is not known: the lesser of both edges
    assert peak_of(start_up(between)).held_bytes == 900 + 65 - 400
    old = span("request", at(600, 65, peak=900), at(600, 80, peak=900), 4)
    assert peak_of(start_up(old)).held_bytes == 415


def test_an_allocation_that_failed_does_not_fit_even_after_a_release() -> None:
    oom = Oom(50, 1000, 500, 900, 10, None, None, None, None, None)
    found = serving_peak(Moments(start_up(), FIGURES), 400, oom)
    assert found.held_bytes == found.at_least_bytes == 1000 - 10 + 50 - 400
    before = start_up()[:2]  # the KV cache does not stand: what it takes is not in the reading
    assert serving_peak(Moments(before, FIGURES), 400, oom).held_bytes == 370


def test_a_plan_leaves_out_what_it_cannot_know_and_says_so() -> None:
    why = text("memprof plan stops after the KV plan")
    found = serving_peak(Moments(start_up()[:2], FIGURES, nothing_later=why), 400)
    assert found.held_bytes == 370
    assert found.how == ESTIMATED
    assert [(i.name, i.bytes, i.reason) for i in found.items[2:]] == [
        ("late_torch", None, why),
        ("late_device", None, why),
    ]
    failed = replace(start_up()[3], error="RuntimeError")
    assert serving_peak(Moments([*start_up()[:3], failed], FIGURES), 400).how == ESTIMATED


def test_without_a_reading_of_the_profile_run_nothing_is_known() -> None:
    assert peak_of([]).held_bytes is None
    assert peak_of(start_up()[2:]).held_bytes is None
    failed = [replace(start_up()[0], error="RuntimeError"), *start_up()[1:]]
    assert peak_of(failed).held_bytes is None
    assert serving_peak(Moments(start_up(), FIGURES), None).held_bytes is None


def test_the_engines_figures_are_a_lower_bound() -> None:
    known = {"weights_bytes": 100, "initial_free_bytes": 960, "graph_bytes": 7}
    assert peak_of([], **known).at_least_bytes == 100 + 40 + 7
    assert peak_of([]).at_least_bytes is None


def test_a_reserved_reading_below_the_allocated_peak_is_not_that_of_the_peak() -> None:
    found = peak_of(start_up(), profile_after_allocated_peak_bytes=301)
    assert found.held_bytes is None
    assert found.at_least_bytes == 301 + 65 + 20


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 100)), max_size=6))
def test_no_later_reading_is_above_the_peak(readings: list[tuple[int, int]]) -> None:
    later = [span("request", None, at(*each), 4 + i) for i, each in enumerate(readings)]
    found = peak_of(start_up(*later))
    assert found.held_bytes is not None
    assert all(found.held_bytes + 400 >= sum(each) for each in readings)
    assert found.held_bytes == sum(item.bytes or 0 for item in found.items)
    assert found.at_least_bytes is not None
    assert found.at_least_bytes <= found.held_bytes


def test_what_serving_may_hold_beyond_the_profile_run() -> None:
    assert unprofiled(None) == unprofiled(100 * MIB) == 150 * MIB
    assert unprofiled(1000 * MIB) == 250 * MIB


def test_four_verdicts() -> None:
    def verdict(headroom: int | None, released: int | None, slack: int = 0) -> str | None:
        return Budget(
            headroom_bytes=headroom, released_headroom_bytes=released, device_tolerance_bytes=slack
        ).device_verdict

    assert verdict(0, 5) == "fits"
    assert Budget(headroom_bytes=8, unprofiled_bytes=9).device_verdict == "narrow"
    assert Budget(headroom_bytes=9, unprofiled_bytes=9).device_verdict == "fits"
    assert verdict(-1, 0) == "release"
    assert verdict(-2, -1) == "exceeds"
    assert verdict(-2, -1, slack=2) == "fits"  # within the printed digits
    assert verdict(None, -1) == "exceeds"
    assert verdict(None, 5) is None
    assert verdict(None, None) is None


def test_a_plan_and_a_whole_run_differ_by_what_comes_after_the_plan() -> None:
    plan, whole = (build_report(recorded(name)).ranks[0] for name in ("plan_tp2", "graph_tp2"))
    late = [i.bytes for i in whole.budget.held_at_peak if i.name in ("late_torch", "late_device")]
    assert None not in late
    assert plan.budget.headroom_bytes is not None
    assert whole.budget.headroom_bytes == plan.budget.headroom_bytes - sum(
        size or 0 for size in late
    )


def test_what_was_never_requested_is_headroom() -> None:
    """At utilization 0.5 nothing is warned of: 30 GiB of the device were never asked for."""
    run = recorded("recorded_023_tp2")
    total = 65_452_113_920
    halved = [
        replace(
            each,
            figures={
                **each.figures,
                "gpu_memory_utilization": 0.5,
                "requested_bytes": total * 0.5,
                "kv_cache_bytes": each.figures["kv_cache_bytes"] - int(total * 0.45),
            },
            kv_plan=None,
        )
        if each.figures
        else replace(each, kv_plan=None)
        for each in run.processes
    ]
    command = ["0.5" if word == "0.95" else word for word in run.info.command]
    info = replace(run.info, command=command)
    report = build_report(replace(run, info=info, processes=halved))
    assert {f.id for f in report.findings} >= {"graph-not-charged", "uncharged-persistent-torch"}
    assert {f.severity for f in report.findings} == {"info"}
    for rank in report.ranks:
        assert rank.budget.device_verdict == "fits"


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
    assert found.action.startswith("move the other process to a different device, or upgrade to")


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
