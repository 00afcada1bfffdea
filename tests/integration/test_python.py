"""Plans and sweeps from Python, on the engine: the figures are those of a run that is loaded."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import vllm_memprof as mp
from tests.support.engine import STACK

pytestmark = [pytest.mark.sim, pytest.mark.full, pytest.mark.timeout(300)]


def test_a_plan_and_a_sweep(
    sim_stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = {"device": "sim:910b", "stack": STACK, "enforce_eager": True}
    run = mp.plan("memprof/tiny", run_dir="run", max_model_len=256, **where)
    assert run.reports[0].run.outcome == "ok"
    (tokens,) = run.kv.tokens.tolist()
    assert tokens > 256
    pd.testing.assert_frame_equal(run.budget, mp.load("run").budget)

    over = {"max_model_len": [256, 1 << 30]}
    found = mp.sweep("memprof/tiny", over, folder="sweep", cache=False, jobs=1, **where)
    fits, too_long = found.plans.to_dict("records")
    assert (fits["status"], fits["tokens"]) == ("ok", tokens)
    assert too_long["status"] == "failed"
    assert "max_model_len" in too_long["reason"]
