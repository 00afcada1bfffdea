"""The head of a report: the engine, and labels that tell ranks apart."""

from __future__ import annotations

from tests.unit.accounting.builders import process, run_of
from vllm_memprof.accounting import build_report


def test_the_engine_is_known_from_its_processes() -> None:
    run = run_of(process([]), engine=None, engine_version=None)
    assert (build_report(run).run.engine, build_report(run).run.engine_version) == (
        "vllm-ascend",
        "0.23.0",
    )


def test_replicas_keep_their_ranks_apart() -> None:
    run = run_of(process([], dp_rank=0), process([], dp_rank=1, pid=2))
    assert [rank.label for rank in build_report(run).ranks] == ["DP0 TP0", "DP1 TP0"]
