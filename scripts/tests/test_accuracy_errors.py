"""Errors of plans: signs, rounding, what counts, what a constant taken from a run is worth."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from scripts.accuracy_errors import PlannedRow, errors_of, spreads_text, statistics_of
from scripts.accuracy_runs import PublishedFigure, PublishedRun, StartLimit
from vllm_memprof.accuracy import spread
from vllm_memprof.accuracy.spread import ErrorSpread, list_spreads, spread_of
from vllm_memprof.units import GIB

RUN = PublishedRun(
    id="a",
    source="s",
    release="0.23.0",
    device="910b",
    model="m",
    published={"kv_cache": PublishedFigure(40 * GIB, 0.005 * GIB), "tokens": PublishedFigure(1000)},
)
TAKEN = {"context_bytes": GIB, "hccl_base_bytes": 2 * GIB, "graph_capture_bytes": 100}
PLANNED = PlannedRow(
    status="ok",
    seconds=1.0,
    equation="E4",
    world_size=2,
    communicators=1,
    figures={"kv_cache": 41 * GIB, "tokens": 990, "graphs": 5000.0, "non_torch": 3.0 * GIB},
    graph_count=10,
    constants=TAKEN,
    taken=tuple(TAKEN),
)


def errors(run=RUN, planned=PLANNED):
    return {error.figure: error for error in errors_of(run, planned)}


def test_errors_have_a_sign():
    found = errors()
    assert found["kv_cache"].relative == pytest.approx(0.025)
    assert found["tokens"].relative == pytest.approx(-0.01)
    assert (found["kv_cache"].met, found["tokens"].met) == (False, False)
    near = replace(PLANNED, figures={"tokens": 996})
    assert errors(planned=near)["tokens"].met is True


def test_a_target_is_met_by_what_rounds_to_the_published_figure():
    published = {"graphs": PublishedFigure(0.1 * GIB, 0.05 * GIB)}
    run = replace(RUN, published=published)
    for size, met in ((0.19, True), (0.20, False), (0.036, True), (0.034, False)):
        planned = replace(PLANNED, figures={"graphs": size * GIB})
        assert errors(run, planned)["graphs"].met is met, size


def test_a_figure_fitted_to_its_run_is_no_prediction():
    run = replace(RUN, fitted={"kv_cache": "hccl_base_bytes"})
    found = errors(run)
    assert [each.counts for each in found.values()] == [False, False]  # tokens follow
    assert statistics_of(found.values()) is None
    assert not any(each.counts for each in errors(replace(RUN, inexact=True)).values())


@pytest.mark.parametrize(
    ("equation", "communicators", "expected"),
    [("E4", 1, 43), ("E4", 0, 41), ("E4", 3, 47), ("E2", 0, 42), ("E2", 1, 44)],
)
def test_a_kv_cache_without_constants_taken_from_runs(equation, communicators, expected):
    planned = replace(PLANNED, equation=equation, communicators=communicators)
    found = errors(planned=planned)
    assert found["kv_cache"].without_fitted == expected * GIB
    assert found["tokens"].without_fitted == pytest.approx(990 * expected / 41)


def test_other_figures_without_constants_taken_from_runs():
    run = replace(
        RUN, published={"graphs": PublishedFigure(1000), "non_torch": PublishedFigure(GIB)}
    )
    assert errors(run)["graphs"].without_fitted == 4000
    assert errors(run)["non_torch"].without_fitted == GIB
    unknown = replace(PLANNED, graph_count=None)
    assert errors(run, unknown)["graphs"].without_fitted is None
    plain = replace(PLANNED, taken=())
    assert errors(run, plain)["graphs"].without_fitted == 5000


def test_statistics_are_of_signed_errors():
    kv = [0.02, -0.01, 0.001, 0.003, -0.004, 0.0, 0.0, 0.0, 0.0, -0.05]
    found = []
    for number, relative in enumerate(kv):
        planned = replace(PLANNED, figures={"kv_cache": 40 * GIB * (1 + relative)})
        found += errors_of(
            replace(RUN, id=str(number), published={"kv_cache": PublishedFigure(40 * GIB)}), planned
        )
    stats = statistics_of(found)
    assert stats.count == 10
    assert stats.median == pytest.approx(0.0)
    assert stats.percentile_90 == pytest.approx(0.02)
    assert stats.worst.run.id == "9"
    assert stats.met == 7


def test_a_limit_is_held_against_its_interval():
    run = replace(RUN, published={}, limit=StartLimit("max-num-batched-tokens", 45056, 47104))
    for value, met in ((46_000, True), (45_056 * 0.991, True), (47_104 * 1.03, False)):
        [error] = errors_of(run, replace(PLANNED, limit=value))
        assert error.met is met
    assert errors_of(run, PLANNED) == []


# --- the spread that a plan prints ----------------------------------------------------------------


def many(count, run=RUN):
    return [
        error
        for number in range(count)
        for error in errors_of(
            replace(run, id=str(number)),
            replace(PLANNED, figures={"kv_cache": 40 * GIB * (1 + number / 1000)}),
        )
    ]


def test_five_runs_support_a_spread_and_four_do_not():
    assert json.loads(spreads_text(many(4), {"910b": "ascend910b"})) == []
    [row] = json.loads(spreads_text(many(5), {"910b": "ascend910b"}))
    assert row == {
        "equation": "E4", "profile": "ascend910b", "runs": 5, "low_bytes": 0,
        "median_bytes": 85899346, "high_bytes": 171798692,
    }  # fmt: skip


def test_runs_that_were_fitted_to_support_no_spread():
    fitted = many(5, replace(RUN, fitted={"kv_cache": "hccl_base_bytes"}))
    assert json.loads(spreads_text(fitted, {"910b": "ascend910b"})) == []


def test_a_spread_is_of_a_kind(monkeypatch):
    row = ErrorSpread("E4", "ascend910b", 7, -3, 1, 6)
    monkeypatch.setattr(spread, "list_spreads", lambda: (row,))
    assert spread_of("E4", "ascend910b") == row
    assert spread_of("E2", "ascend910b") is None
    assert spread_of("E4", "mine") is None
    assert spread_of(None, None) is None


def test_the_spreads_that_are_kept_are_of_enough_runs():
    assert all(
        each.runs >= 5 and each.low_bytes <= each.median_bytes <= each.high_bytes
        for each in list_spreads()
    )
