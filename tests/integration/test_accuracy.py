"""Published runs on hardware, planned: three cheap rows give what docs/accuracy.json keeps.

The others are planned by ``make accuracy``.
"""

from __future__ import annotations

import pytest

from scripts.accuracy import ROWS, read_kept, simulate
from scripts.accuracy_errors import PlannedRow, errors_of
from scripts.accuracy_runs import PublishedRun, load_runs
from tests.support.engine import OLD_STACK, STACK, require_stack

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
    planned, kept = PlannedRow(**simulate(run)), read_kept()[name]
    assert planned.status == "ok", planned.reason
    assert planned.figures == kept.figures, "make accuracy: docs/accuracy.json is of other plans"
    assert (planned.equation, planned.constants) == (kept.equation, kept.constants)
    errors = errors_of(run, planned)
    assert errors
    for error in errors:
        if error.figure not in {**run.explained, **run.unexplained}:
            assert error.met is not False, f"{error.figure} {error.relative:+.2%}"


@pytest.mark.full  # CI: the rows above; this one holds why a row needs its graph mode
def test_a_piece_of_a_graph_keeps_its_arguments_and_a_whole_graph_does_not():
    """The peak lies in the MLP: by default the piece after attention also holds what it was given.

    That is the residual, 1,024 elements of 2 bytes a token, and what attention gave, 16 heads of
    128.
    """
    tokens = 8192
    args = ["--max-model-len", "2048", "--max-num-batched-tokens", str(tokens)]
    args += ["--hf-overrides", '{"num_hidden_layers": 2}']
    run = PublishedRun("modes", "none", "0.23.0", "a3", "Qwen/Qwen3-0.6B", args=args, stack=STACK)
    peaks = {}
    for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"):
        planned = PlannedRow(
            **simulate(run, ["--compilation-config", f'{{"cudagraph_mode": "{mode}"}}'])
        )
        assert planned.status == "ok", planned.reason
        peaks[mode] = planned.figures["peak_activation"]
    more = peaks["FULL_AND_PIECEWISE"] - peaks["FULL_DECODE_ONLY"]
    # of each token; what is left is 1 KiB, two small blocks
    assert more // tokens == (1024 + 16 * 128) * 2
    assert more % tokens <= 1024
