"""What a run lacks for a finding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.accounting.builders import process, recorded, run_of
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.findings.needs import (
    DEVICE_BUDGET,
    GRANTED,
    HOOKS,
    KV_ALLOCATED,
    NOTHING,
    RECOMPUTED,
    Need,
    item_known,
)


@pytest.fixture(scope="module")
def whole() -> Report:
    return build_report(recorded("graph_tp2"))


@pytest.fixture(scope="module")
def bare() -> Report:
    report = build_report(run_of(process([], {})))
    return replace(report, run=replace(report.run, source="log"))


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (HOOKS, "a log does not tell"),
        (GRANTED, "no KV cache was granted"),
        (RECOMPUTED, "the equation could not be checked"),
        (DEVICE_BUDGET, "no KV cache was granted"),
        (KV_ALLOCATED, "the KV cache was not allocated"),
    ],
)
def test_a_need_is_met_or_has_a_reason(
    need: Need, reason: str, whole: Report, bare: Report
) -> None:
    assert need.lacking(whole, whole.ranks[0]) is None
    assert need.lacking(bare, bare.ranks[0]) == reason
    assert NOTHING.lacking(bare, bare.ranks[0]) is None


def test_an_item_is_known_or_does_not_apply(whole: Report) -> None:
    planned = build_report(recorded("plan_tp2"))
    graph = item_known("graph")
    assert graph.lacking(whole, whole.ranks[0]) is None
    assert graph.lacking(planned, planned.ranks[0])
    eager = replace(planned, run=replace(planned.run, eager=True))
    assert graph.lacking(eager, eager.ranks[0]) is None
    assert item_known("of no equation").lacking(whole, whole.ranks[0]) is None
