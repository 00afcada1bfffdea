"""Published runs on hardware, planned: three cheap rows give what docs/accuracy.json keeps.

The others are planned by ``make accuracy``.
"""

from __future__ import annotations

import pytest

from scripts.accuracy import ROWS, read_kept, simulate
from tests.support.engine import OLD_STACK, STACK, require_stack
from vllm_memprof.accuracy.errors import Planned, errors_of
from vllm_memprof.accuracy.runs import load_runs

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]

#: One rank, eager: one of each device and equation, the smallest there are.
CHEAP = {
    "qwen3-embedding-0.6b-a3-eager": STACK,
    "qwen2-0.5b-a3-eager": OLD_STACK,
    "qwen3-8b-910b4-eager": OLD_STACK,
}


@pytest.mark.parametrize("name", CHEAP)
def test_a_published_run_is_planned_as_kept(name):
    require_stack(CHEAP[name])
    [run] = [run for run in load_runs(ROWS) if run.id == name]
    planned, kept = Planned(**simulate(run)), read_kept()[name]
    assert planned.status == "ok", planned.reason
    assert planned.figures == kept.figures, "make accuracy: docs/accuracy.json is of other plans"
    assert (planned.equation, planned.constants) == (kept.equation, kept.constants)
    errors = errors_of(run, planned)
    assert errors
    for error in errors:
        if error.figure not in {**run.explained, **run.unexplained}:
            assert error.met is not False, f"{error.figure} {error.relative:+.2%}"
