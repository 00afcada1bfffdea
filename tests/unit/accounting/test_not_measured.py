"""Phases without a record, and the reason."""

from __future__ import annotations

from tests.unit.accounting.builders import recorded
from vllm_memprof.accounting import build_report


def test_plan_stops_after_the_plan() -> None:
    report = build_report(recorded("plan_tp2"))
    assert {gap.reason for gap in report.not_measured} == {"memprof plan stops after the KV plan"}
    assert report.ranks[0].kv.blocks == 5040
    assert report.ranks[0].budget.fits_request_bytes is not None
