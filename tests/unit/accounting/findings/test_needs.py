"""What a run lacks for a finding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.accounting.builders import process, recorded, run_of
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.findings.needs import Need
from vllm_memprof.accounting.findings.table import FINDINGS


@pytest.fixture(scope="module")
def whole() -> Report:
    return build_report(recorded("graph_tp2"))


@pytest.fixture(scope="module")
def bare() -> Report:
    report = build_report(run_of(process([], {})))
    return replace(report, run=replace(report.run, source="log"))


@pytest.mark.parametrize(
    ("finding", "reason"),
    [
        ("hook-not-bound", "a log does not tell"),
        ("rank-skew", "no available KV cache is known"),
        ("equation-unbalanced", "the equation could not be checked"),
        ("headroom-small", "no available KV cache is known"),
        ("kv-allocation-off-plan", "the KV cache was not allocated"),
    ],
)
def test_a_need_is_met_or_has_a_reason(
    finding: str, reason: str, whole: Report, bare: Report
) -> None:
    need = FINDINGS[finding].needs
    assert need.lacking(whole, whole.ranks[0]) is None
    assert need.lacking(bare, bare.ranks[0]) == reason
    assert FINDINGS["gb-is-gib"].needs.lacking(bare, bare.ranks[0]) is None


def test_an_item_is_known_or_does_not_apply(whole: Report) -> None:
    planned = build_report(recorded("plan_tp2"))
    graph = Need("", item="graph")
    assert graph.lacking(whole, whole.ranks[0]) is None
    assert graph.lacking(planned, planned.ranks[0])
    eager = replace(planned, run=replace(planned.run, eager=True))
    assert graph.lacking(eager, eager.ranks[0]) is None
    assert Need("", item="of no equation").lacking(whole, whole.ranks[0]) is None
