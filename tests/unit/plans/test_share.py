"""Shares of one device, from figures: what each equation allows, and that no step more passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.accounting.builders import recorded
from vllm_memprof.accounting.budget.equations import form_of
from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import TermRow
from vllm_memprof.errors import UsageError
from vllm_memprof.plans.model import Plan, plan_row
from vllm_memprof.plans.share import (
    Figures,
    Flags,
    Problem,
    SharedDevice,
    SharingPlan,
    Typed,
    predict,
    predict_all,
    read_instances,
    rotations,
    ways,
)
from vllm_memprof.plans.share_starts import Instance, check, figures_of
from vllm_memprof.plans.wants import Want
from vllm_memprof.record.schema import READY, SERVED

MIB, GIB = 1 << 20, 1 << 30
TOTAL = 60 * GIB


def instance(own: int, **changes: int | float) -> Figures:
    """Weights and activation of ``own`` bytes; at the peak 1 GiB more is held than subtracted."""
    figures = Figures(
        own, own + GIB // 2, own + GIB, context_bytes=GIB // 4, need_bytes=GIB, block_bytes=MIB,
        block_tokens=16.0,
    )  # fmt: skip
    return replace(figures, **changes)


A, B = instance(4 * GIB), instance(20 * GIB)


def card(equation: str, a: Figures = A, b: Figures | None = B, **changes: int) -> SharedDevice:
    form = form_of(equation)
    assert form is not None
    instances = {"A": a} if b is None else {"A": a, "B": b}
    return SharedDevice(TOTAL, instances, form.subtracts_neighbours, form.checks_free, **changes)


def utilizations(way: SharingPlan) -> dict[str, float]:
    return {each.name: each.gpu_memory_utilization for each in way.flags}


def settings(way: SharingPlan) -> dict[str, Flags]:
    return {each.name: each for each in way.flags}


def problem_of(card: SharedDevice, given: dict[str, Flags], moment: str) -> Problem:
    with pytest.raises(Problem) as caught:
        predict(card, ["A", "B"], given, moment)
    return caught.value


def test_e4_has_one_answer_for_both_orders() -> None:
    """Both may hold 60 GiB: 5 + 21 beside the KV caches, so 34 of KV, in equal parts."""
    (way,) = ways(card("E4"))
    assert (way.name, way.order) == ("utilization", None)
    # (4 + 17) / 60 and (20 + 17) / 60; what rounding leaves goes to the later one
    assert utilizations(way) == {"A": 0.35, "B": 0.61}
    sizes = {each.name: each.kv_cache_bytes for each in way.flags}
    assert sizes == {"A": 17 * GIB, "B": int(0.61 * TOTAL - 20 * GIB) // MIB * MIB}
    assert way.flags[0].tokens == 17 * 1024 * 16


def test_e4_refuses_a_request_that_is_not_free() -> None:
    """A holds 4 + 1 + 26 GiB: of the 60, 29 less a context are free for B."""
    given = {"A": Flags("A", 0.5), "B": Flags("B", 0.5)}
    found = problem_of(card("E4"), given, SERVED)
    assert (found.kind, found.name) == ("refused", "B")
    assert found.short == 5 * GIB + 26 * GIB + GIB // 4 - 30 * GIB
    assert "B is refused at its start, 1.25 GiB less are free" in found.why


def test_e2_has_one_answer_for_each_order_and_none_for_both() -> None:
    both, first_a, first_b, blocks = ways(card("E2"))
    assert (both.flags, both.short_bytes) == ([], 5 * GIB + 21 * GIB + 2 * GIB)
    assert (first_a.order, first_b.order) == (["A", "B"], ["B", "A"])
    # the later share contains the earlier one; 1 GiB stays outside, and half of one for the growth
    # of the earlier one from its readiness to its peak
    shares = utilizations(first_a)
    assert 0.97 <= shares["B"] <= 1 - 1.5 / 60
    assert utilizations(first_b)["A"] == shares["B"]
    assert blocks.order is None
    assert all(each.num_gpu_blocks_override for each in blocks.flags)


def test_e2_neighbours_that_have_only_become_ready_leave_more_and_grow() -> None:
    given = {"A": Flags("A", 0.3), "B": Flags("B", 0.98)}
    assert predict(card("E2"), ["A", "B"], given, SERVED)
    found = problem_of(card("E2"), given, READY)
    assert (found.kind, found.name) == ("device", "B")
    assert found.short == pytest.approx(0.3 * GIB, abs=MIB)


def test_e3_subtracts_and_checks() -> None:
    """The earlier one is counted twice: as what is not free, and in the subtracted figure."""
    both, first_a, first_b, _ = ways(card("E3"))
    assert both.flags == []
    for way in (first_a, first_b):
        first, last = way.order or []
        held = {each.name: each.kv_cache_bytes or 0 for each in way.flags}
        by_name = {"A": A, "B": B}
        twice = 2 * (held[first] + by_name[first].peak_bytes)
        used = twice + by_name[last].subtracted_bytes + by_name[last].context_bytes + held[last]
        assert 0 <= TOTAL - used < 3 * 0.01 * TOTAL
        _, first_a, first_b, _ = ways(card("E3", b=instance(28 * GIB)))
    assert first_a.flags
    assert first_b.flags == []  # 2 x (29 + 1) + 4.25 + 1 of 60
    assert first_b.short_bytes == 5 * GIB + GIB // 4


def test_what_is_wanted_comes_first_and_the_rest_in_equal_parts() -> None:
    (way,) = ways(card("E4", replace(A, need_bytes=25 * GIB)))
    sizes = {each.name: each.kv_cache_bytes or 0 for each in way.flags}
    assert sizes["A"] >= 25 * GIB
    assert abs((sizes["A"] - 25 * GIB) - (sizes["B"] - GIB)) < 0.02 * TOTAL
    (way,) = ways(card("E4", replace(A, need_bytes=25 * GIB), replace(B, need_bytes=10 * GIB)))
    assert (way.flags, way.short_bytes) == ([], GIB)
    assert "need 1.00 GiB more than there is" in (way.why_none or "")


def test_a_given_share_is_kept() -> None:
    (way,) = ways(card("E4", replace(A, fixed_utilization=0.5)))
    assert utilizations(way)["A"] == 0.5
    (way,) = ways(card("E4", replace(A, fixed_utilization=0.4), replace(B, fixed_utilization=0.58)))
    assert not way.flags
    assert "B is refused at its start, 0.05 GiB less are free" in (way.why_none or "")


def test_memory_beside_and_headroom_are_taken_off() -> None:
    for changes in ({"beside": 6 * GIB}, {"headroom": 6 * GIB}):
        (way,) = ways(card("E4", **changes))
        assert sum(utilizations(way).values()) == pytest.approx(0.96 - 0.1)
    # E2 subtracts what is beside from every KV cache: both shares contain it
    _, first_a, *_ = ways(card("E2", beside=6 * GIB))
    _, alone, *_ = ways(card("E2"))
    assert utilizations(first_a)["B"] == utilizations(alone)["B"]
    assert utilizations(first_a)["A"] == pytest.approx(utilizations(alone)["A"] + 0.05)


def test_one_instance_beside_somebody_else() -> None:
    (way,) = ways(card("E4", b=None, beside=20 * GIB))
    assert utilizations(way) == {"A": 0.65}  # 60 - 20 - 1
    (way,) = ways(card("E2", b=None, beside=20 * GIB))
    assert utilizations(way) == {"A": 0.98}


def test_of_three_each_is_the_last_once() -> None:
    assert ["".join(order) for order in rotations("ABC")] == ["ABC", "ACB", "BCA"]
    three = {"A": A, "B": B, "C": instance(2 * GIB)}
    (way,) = ways(replace(card("E4"), instances=three))
    assert len(way.flags) == 3
    in_order = ways(replace(card("E2"), instances=three))
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
    instances = {
        "ABC"[i]: Figures(own, own + beyond // 2 + MIB, own + beyond + MIB, MIB, need, MIB)
        for i, (own, beyond, need) in enumerate(rows)
    }
    device = replace(card(equation, beside=beside), instances=instances)
    for way in ways(device):
        if not way.flags:
            assert way.why_none
            assert (way.short_bytes or 0) > 0
            continue
        orders = rotations([*instances]) if way.order is None else [way.order]
        given = settings(way)
        least = predict_all(device, orders, given)
        assert least == {each.name: each.kv_cache_bytes for each in way.flags}
        for name, each in instances.items():
            assert least[name] >= each.need_bytes
        for each in way.flags:
            more = round(each.gpu_memory_utilization + 0.02, 2)
            raised = {**given, each.name: replace(each, gpu_memory_utilization=more)}
            try:
                after = predict_all(device, orders, raised)
            except Problem:
                continue
            if way.name == "utilization":
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
        ("", "'instance'"),
        ("[[instance]]\n", "missing .* 'model'"),
        ('[[instance]]\nmodel = "a"\nargs = "x"\n', "`array`, got `str` - at `.*args"),
        ('[[instance]]\nmodel = "a"\nflags = []\n', "unexpected .* 'flags'"),
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
        ([[], []], {"device": "npu"}, 0, "only on a simulated device"),
        ([[], []], {}, 0, "only on a simulated device"),
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
    plan = Plan("m", [], lengths=(1024,))
    row = plan_row(run, build_report(run), plan)
    found = figures_of(rank, row, Instance("A", plan))
    assert found is not None
    request = round(kv.blocks / kv.max_concurrency)
    assert found.need_bytes == request * kv.bytes_per_block
    budget = rank.budget
    # what is subtracted and what is granted are the request
    assert budget.requested_bytes is not None
    left = budget.requested_bytes - found.subtracted_bytes
    assert left - (budget.engine_kv_cache_bytes or 0) in (0, 1)
    assert found.peak_bytes >= found.ready_bytes > 0
    assert found.context_bytes == (total or 0) - (rank.initial_free_bytes or 0)
    for want, blocks in (
        (Want("tokens", kv.tokens), kv.blocks),
        (Want("concurrency", 3), 3 * request),
        (Want("kv-cache", 12345 * request * kv.bytes_per_block), 12345 * request),
    ):
        needed = figures_of(rank, row, Instance("A", plan, [want]))
        assert needed is not None
        assert needed.need_bytes == max(blocks, request) * kv.bytes_per_block, want
    staged = replace(
        rank, budget=replace(budget, terms=[*budget.terms, TermRow("multi_group", 1, True, 0)])
    )
    assert figures_of(staged, row, Instance("A", plan)) is None


def test_moments_of_starts() -> None:
    assert card("E4").moments == (SERVED,)
    assert card("E2").moments == card("E3").moments == (SERVED, READY)
