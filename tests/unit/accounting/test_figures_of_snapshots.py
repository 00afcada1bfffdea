"""The figures of an engine that its equation takes."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.accounting.builders import recorded
from vllm_memprof.accounting import build_report


def test_a_zero_that_no_capture_stands_behind_is_unknown() -> None:
    eager = recorded("eager_tp2")
    processes = [replace(p, figures={**p.figures, "graph_bytes": 0}) for p in eager.processes]
    assert build_report(replace(eager, processes=processes)).ranks[0].budget.term("graph") is None
