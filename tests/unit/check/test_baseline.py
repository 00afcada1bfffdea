"""What forbids the comparison with a baseline, and what does not bear on memory."""

from __future__ import annotations

import pytest

from tests.support.runs import report_of
from vllm_memprof.check.baseline import differences

RUN = "graph_tp2"


@pytest.mark.parametrize(
    ("argument", "value", "forbids"),
    [
        ("--max-num-seqs", "16", True),
        ("--additional-config", '{"weight_nz_mode": 0}', True),
        ("--seed", "7", False),
        ("--port", "8001", False),
    ],
)
def test_arguments_that_bear_on_memory_forbid_the_comparison(
    argument: str, value: str, forbids: bool
) -> None:
    run = report_of(RUN)
    other = report_of(RUN, command=[*run.run.command, argument, value])
    assert bool(differences(run, other)) == forbids


def test_each_difference_names_both_sides() -> None:
    found = differences(report_of(RUN), report_of(RUN, model="org/another"))
    assert found == ["model Qwen/Qwen3-VL-8B-Instruct in the baseline, org/another in the run"]
