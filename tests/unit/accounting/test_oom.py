"""The allocation that failed."""

from __future__ import annotations

from tests.unit.accounting.builders import process, run_of, span
from vllm_memprof.accounting import build_report


def test_oom_is_copied_from_its_phase() -> None:
    oom = span("oom", None, None, detail={"requested_bytes": 5, "device": 0, "more": 1})
    found = build_report(run_of(process([oom]))).ranks[0].oom
    assert found is not None
    assert (found.requested_bytes, found.free_bytes) == (5, None)
    assert "more" not in vars(found)
