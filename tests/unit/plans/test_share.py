"""Shares of one device, from figures: what each equation allows, and that no step more passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.accounting.builders import recorded
from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import TermRow
from vllm_memprof.errors import UsageError
from vllm_memprof.plans.request import Plan
from vllm_memprof.plans.rows import plan_row
from vllm_memprof.plans.share import (
    Figures,
    InstanceSize,
    Problem,
    SharedDevice,
    SharingRule,
    predict,
    predict_all,
    rotations,
    ways,
)
from vllm_memprof.plans.share_file import Typed, read_instances
from vllm_memprof.plans.share_rows import SharingPlan, SoloPlan
from vllm_memprof.plans.share_starts import Instance, check, moments_of, with_memory
from vllm_memprof.plans.wants import Want
from vllm_memprof.record.schema import READY, SERVED

MIB, GIB = 1 << 20, 1 << 30
TOTAL = 60 * GIB


def instance(name: str, own: int, **changes: int) -> Figures:
    """Weights and activation of ``own`` bytes; at the peak 1 GiB more is held than subtracted."""
    figures = Figures(
        name, subtracted=own, ready=own + GIB // 2, peak=own + GIB, context=GIB // 4, need=GIB,
        block=MIB, block_tokens=16.0,
    )  # fmt: skip
    return replace(figures, **changes)


A, B = instance("A", 4 * GIB), instance("B", 20 * GIB)


def card(equation: str, **changes: int) -> SharedDevice:
    return replace(SharedDevice(TOTAL, SharingRule.of(equation)), **changes)


def utilizations(way: SharingPlan) -> dict[str, float]:
    return {each.name: each.gpu_memory_utilization for each in way.flags}


def settings(way: SharingPlan) -> dict[str, InstanceSize]:
    return {
        each.name: InstanceSize(each.gpu_memory_utilization, each.num_gpu_blocks_override)
        for each in way.flags
    }


def orders_of(way: SharingPlan, figures: list[Figures]) -> list[list[Figures]]:
    by_name = {each.name: each for each in figures}
    return rotations(figures) if way.order is None else [[by_name[name] for name in way.order]]


def test_e4_has_one_answer_for_both_orders() -> None:
    """Both may hold 60 GiB: 5 + 21 beside the KV caches, so 34 of KV, in equal parts."""
    (way,) = ways(card("E4"), [A, B])
    assert (way.name, way.order) == ("utilization", None)
    # (4 + 17) / 60 and (20 + 17) / 60; what rounding leaves goes to the later one
    assert utilizations(way) == {"A": 0.35, "B": 0.61}
    sizes = {each.name: each.kv_cache_bytes for each in way.flags}
    assert sizes == {"A": 17 * GIB, "B": int(0.61 * TOTAL - 20 * GIB) // MIB * MIB}
    assert way.flags[0].tokens == 17 * 1024 * 16
    assert [(more.gpu_memory_utilization, more.starts) for more in way.more] == [
        (0.37, False),
        (0.63, False),
    ]


def test_e4_refuses_a_request_that_is_not_free() -> None:
    """A holds 4 + 1 + 26 GiB: of the 60, 29 less a context are free for B."""
    given = {"A": InstanceSize(0.5), "B": InstanceSize(0.5)}
    found = predict(card("E4"), [A, B], given, SERVED)
    assert found == Problem("refused", "B", 5 * GIB + 26 * GIB + GIB // 4 - 30 * GIB, ("A", "B"))
    assert "B is refused at its start, 1.25 GiB less are free" in found.why


def test_e2_has_one_answer_for_each_order_and_none_for_both() -> None:
    both, first_a, first_b, blocks = ways(card("E2"), [A, B])
    assert (both.flags, both.short_bytes) == ([], 5 * GIB + 21 * GIB + 2 * GIB)
    assert (first_a.order, first_b.order) == (["A", "B"], ["B", "A"])
    # the later share contains the earlier one; 1 GiB stays outside, and half of one for the growth
    # of the earlier one from its readiness to its peak
    shares = utilizations(first_a)
    assert 0.97 <= shares["B"] <= 1 - 1.5 / 60
    assert utilizations(first_b)["A"] == shares["B"]
    assert {more.name: more.starts for more in first_a.more} == {"A": True, "B": False}
    assert "1.20 GiB of KV cache of B" in first_a.more[0].why
    assert blocks.order is None
    assert all(each.num_gpu_blocks_override for each in blocks.flags)
    assert [more.starts for more in blocks.more] == [True, True]


def test_e2_neighbours_that_have_only_become_ready_leave_more_and_grow() -> None:
    given = {"A": InstanceSize(0.3), "B": InstanceSize(0.98)}
    by_moment = [predict(card("E2"), [A, B], given, moment) for moment in (SERVED, READY)]
    assert not isinstance(by_moment[0], Problem)
    assert by_moment[1] == Problem("device", "B", pytest.approx(0.3 * GIB, abs=MIB), ("A", "B"))


def test_e3_subtracts_and_checks() -> None:
    """The earlier one is counted twice: as what is not free, and in the subtracted figure."""
    both, first_a, first_b, _ = ways(card("E3"), [A, B])
    assert both.flags == []
    for way in (first_a, first_b):
        first, last = way.order or []
        held = {each.name: each.kv_cache_bytes or 0 for each in way.flags}
        by_name = {"A": A, "B": B}
        twice = 2 * (held[first] + by_name[first].peak)
        used = twice + by_name[last].subtracted + by_name[last].context + held[last]
        assert 0 <= TOTAL - used < 3 * 0.01 * TOTAL
        assert [more.starts for more in way.more] == [False, False]
    large = instance("B", 28 * GIB)
    _, first_a, first_b, _ = ways(card("E3"), [A, large])
    assert first_a.flags
    assert first_b.flags == []  # 2 x (29 + 1) + 4.25 + 1 of 60
    assert first_b.short_bytes == 5 * GIB + GIB // 4


def test_what_is_wanted_comes_first_and_the_rest_in_equal_parts() -> None:
    (way,) = ways(card("E4"), [replace(A, need=25 * GIB), B])
    sizes = {each.name: each.kv_cache_bytes or 0 for each in way.flags}
    assert sizes["A"] >= 25 * GIB
    assert abs((sizes["A"] - 25 * GIB) - (sizes["B"] - GIB)) < 0.02 * TOTAL
    (way,) = ways(card("E4"), [replace(A, need=25 * GIB), replace(B, need=10 * GIB)])
    assert (way.flags, way.short_bytes) == ([], GIB)
    assert "need 1.00 GiB more than there is" in (way.why_none or "")


def test_a_given_share_is_kept() -> None:
    (way,) = ways(card("E4"), [replace(A, fixed=0.5), B])
    assert utilizations(way)["A"] == 0.5
    (way,) = ways(card("E4"), [replace(A, fixed=0.4), replace(B, fixed=0.58)])
    assert not way.flags
    assert "B is refused at its start, 0.05 GiB less are free" in (way.why_none or "")


def test_memory_beside_and_headroom_are_taken_off() -> None:
    for changes in ({"beside": 6 * GIB}, {"headroom": 6 * GIB}):
        (way,) = ways(card("E4", **changes), [A, B])
        assert sum(utilizations(way).values()) == pytest.approx(0.96 - 0.1)
    # E2 subtracts what is beside from every KV cache: both shares contain it
    _, first_a, *_ = ways(card("E2", beside=6 * GIB), [A, B])
    _, alone, *_ = ways(card("E2"), [A, B])
    assert utilizations(first_a)["B"] == utilizations(alone)["B"]
    assert utilizations(first_a)["A"] == pytest.approx(utilizations(alone)["A"] + 0.05)


def test_one_instance_beside_somebody_else() -> None:
    (way,) = ways(card("E4", beside=20 * GIB), [A])
    assert utilizations(way) == {"A": 0.65}  # 60 - 20 - 1
    (way,) = ways(card("E2", beside=20 * GIB), [A])
    assert utilizations(way) == {"A": 0.98}


def test_of_three_each_is_the_last_once() -> None:
    three = [A, B, instance("C", 2 * GIB)]
    assert ["".join(f.name for f in order) for order in rotations(three)] == ["ABC", "ACB", "BCA"]
    (way,) = ways(card("E4"), three)
    assert len(way.flags) == 3
    in_order = ways(card("E2"), three)
    assert [way.order for way in in_order] == [None, ["A", "B", "C"], None]


sizes = st.integers(0, 12 * GIB)


@given(
    st.sampled_from(["E2", "E3", "E4"]),
    st.lists(st.tuples(sizes, sizes, st.integers(1, 4 * GIB)), min_size=2, max_size=3),
    st.integers(0, 10 * GIB),
)
def test_every_answer_passes_and_no_step_more_costs_nobody(
    equation: str, rows: list[tuple[int, int, int]], beside: int
) -> None:
    figures = [
        Figures("ABC"[i], own, own + beyond // 2 + MIB, own + beyond + MIB, MIB, need, MIB)
        for i, (own, beyond, need) in enumerate(rows)
    ]
    device = card(equation, beside=beside)
    for way in ways(device, figures):
        if not way.flags:
            assert way.why_none
            assert (way.short_bytes or 0) > 0
            continue
        orders = orders_of(way, figures)
        least = predict_all(device, orders, settings(way))
        assert least == {each.name: each.kv_cache_bytes for each in way.flags}
        for each in figures:
            assert least[each.name] >= each.need
        for more in way.more:
            raised = replace(settings(way)[more.name], utilization=more.gpu_memory_utilization)
            after = predict_all(device, orders, {**settings(way), more.name: raised})
            assert isinstance(after, Problem) is not more.starts
            if way.name == "utilization" and more.starts:
                assert any(after[name] < size for name, size in least.items())


def test_instances_of_a_file(tmp_path) -> None:
    path = tmp_path / "instances.toml"
    path.write_text(
        '[[instance]]\nmodel = "m/a"\nargs = ["--max-model-len", "4096"]\nwant = ["tokens=1"]\n'
        '[[instance]]\nmodel = "m/b"\n'
    )
    assert read_instances(path) == [
        Typed("m/a", ["--max-model-len", "4096"], ["tokens=1"]),
        Typed("m/b"),
    ]
    for text, said in (
        ("", "no \\[\\[instance\\]\\]"),
        ("[[instance]]\n", "model is missing"),
        ('[[instance]]\nmodel = "a"\nargs = "x"\n', "not a list of strings"),
        ('[[instance]]\nmodel = "a"\nflags = []\n', "flags is not known"),
        ('share = 1\n[[instance]]\nmodel = "a"\n', "share"),
        ("[[", "cannot read"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            read_instances(path)


@pytest.mark.parametrize(
    ("args", "own", "beside", "said"),
    [
        ([["-tp", "2"], []], {"device": "sim"}, 0, "instance A .* takes 2 devices"),
        ([[], ["--num-gpu-blocks-override=9"]], {"device": "sim"}, 0, "fixes the KV cache"),
        ([[], ["--gpu-memory-utilization", "1.5"]], {"device": "sim"}, 0, "is no share"),
        ([[]], {"device": "sim"}, 0, "needs two instances"),
        ([[], []], {"device": "npu"}, 0, "on a simulated device alone"),
        ([[], []], {}, 0, "on a simulated device alone"),
    ],
)
def test_what_has_no_answer_is_refused(args, own, beside, said) -> None:
    given = [
        Instance("AB"[i], Plan("m", each, own={**own, "until": "ready"}))
        for i, each in enumerate(args)
    ]
    with pytest.raises(UsageError, match=said):
        check(given, beside)


def test_figures_of_a_recorded_start() -> None:
    run = recorded("recorded_tp1")
    rank = build_report(run).ranks[0]
    kv, total = rank.kv, rank.device_total_bytes
    assert kv.bytes_per_block
    assert kv.blocks
    assert kv.tokens
    assert kv.max_concurrency
    row = plan_row(run, build_report(run), {}, (1024,))
    alone = SoloPlan("A", "m", [], [], "ok")
    found = with_memory(alone, rank, row, [])
    assert Figures.of(found) is not None
    request = round(kv.blocks / kv.max_concurrency)
    assert found.need_bytes == request * kv.bytes_per_block
    budget = rank.budget
    # what is subtracted and what is granted are the request
    assert budget.requested_bytes is not None
    left = budget.requested_bytes - (found.subtracted_bytes or 0)
    assert left - (budget.engine_kv_cache_bytes or 0) in (0, 1)
    assert (found.held_peak_bytes or 0) >= (found.held_ready_bytes or 0) > 0
    assert found.context_bytes == (total or 0) - (rank.initial_free_bytes or 0)
    for want, blocks in (
        (Want("tokens", kv.tokens), kv.blocks),
        (Want("concurrency", 3), 3 * request),
        (Want("kv-cache", 12345 * request * kv.bytes_per_block), 12345 * request),
    ):
        needed = with_memory(alone, rank, row, [want]).need_bytes
        assert needed == max(blocks, request) * kv.bytes_per_block, want
    staged = replace(
        rank, budget=replace(budget, terms=[*budget.terms, TermRow("multi_group", 1, True, 0)])
    )
    assert Figures.of(with_memory(alone, staged, row, [])) is None


def test_moments_of_starts() -> None:
    (e4,) = ways(card("E4"), [A, B])
    _, in_order, _, blocks = ways(card("E2"), [A, B])
    assert moments_of("E4", e4) == (SERVED,)
    assert moments_of("E2", in_order) == (SERVED, READY)
    assert moments_of("E2", blocks) == (SERVED,)
