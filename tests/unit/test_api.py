"""``vllm_memprof.load``: every kind of input, and the page of docs/python.md run as it stands."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import vllm_memprof as mp
from tests.support.render import render_json
from vllm_memprof.cli import main
from vllm_memprof.errors import LaunchError, RunRecordError, UsageError
from vllm_memprof.options import value_of, words_of
from vllm_memprof.plans import runner
from vllm_memprof.plans.model import Plan, PlanRow
from vllm_memprof.report.files import write_reports
from vllm_memprof.sources import build_run

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "tests" / "data"
RUN = DATA / "recorded_tiny_tp2"
LOG = DATA / "logs" / "two_methods_910b_tp2.md"


def test_importing_the_package_loads_no_pandas() -> None:
    code = "import sys, vllm_memprof; print('pandas' in sys.modules)"
    code += "; vllm_memprof.load; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_run_folder_and_its_report_give_the_same_tables(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(render_json(build_run(RUN)))
    folder, again = mp.load(RUN), mp.load(path)
    for name in ("phases", "snapshots", "device_memory", "budget", "audit", "kv", "findings"):
        pd.testing.assert_frame_equal(
            getattr(folder, name).drop(columns="time_s", errors="ignore"),
            getattr(again, name).drop(columns="time_s", errors="ignore"),
        )


def test_a_log_with_several_starts_and_one_of_them() -> None:
    whole, second = mp.load(LOG), mp.load(f"{LOG}#2")
    assert len(whole.reports) > 1
    assert [report.run.id for report in second.reports] == [whole.reports[1].run.id]


def test_several_runs_share_their_tables() -> None:
    both = mp.load_many([RUN, DATA / "recorded_tp1"])
    assert both.kv.run.nunique() == 2
    assert len(both.kv) == 3


def test_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    path.write_text("tensor-parallel-size,status,kv_cache_bytes,tokens\n2,ok,1024,8\n4,oom,,\n")
    plans = mp.load(path).plans
    assert str(plans.kv_cache_bytes.dtype) == "Int64"
    assert plans.kv_cache_bytes.isna().tolist() == [False, True]
    with pytest.raises(RunRecordError, match="is a sweep"):
        mp.load_many([path])


@pytest.mark.parametrize("name", ["missing", "missing.csv"])
def test_what_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunRecordError, match=name):
        mp.load(tmp_path / name)


def test_another_csv_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(RunRecordError, match="not the csv of a sweep"):
        mp.load(path)


def test_a_notebook_shows_the_verdict_and_escapes_names(tmp_path: Path) -> None:
    run = mp.load(RUN)
    shown = run._repr_html_()
    assert "KV cache" in shown
    assert "<table" in shown
    assert "<html" in run.to_html()


# --- plans and sweeps -----------------------------------------------------------------------------


def test_options_of_the_engine_by_their_python_names() -> None:
    assert words_of(
        {
            "tensor_parallel_size": 4,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "quantization": None,
            "gpu_memory_utilization": 0.9,
            "limit_mm_per_prompt": {"image": 2},
            "cudagraph_capture_sizes": [1, 2],
        }
    ) == [
        "--tensor-parallel-size",
        "4",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--gpu-memory-utilization",
        "0.9",
        "--limit-mm-per-prompt",
        '{"image": 2}',
        "--cudagraph-capture-sizes",
        "1",
        "2",
    ]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Plan, Path]]:
    """Plans are made by hand: a folder that is recorded already, nothing for a model "broken"."""
    made: list[tuple[Plan, Path]] = []

    def make(plan: Plan, run_dir: Path) -> PlanRow:
        made.append((plan, run_dir))
        if plan.model == "broken":
            return PlanRow({}, "failed", "no such option --nonsense")
        shutil.copytree(DATA / "plan_tp2", run_dir)
        write_reports(build_run(run_dir), run_dir)
        return PlanRow(dict(plan.values), "ok", tokens=8, kv_cache_bytes=1024)

    def run_here(tasks: Sequence[Any], watcher: Any, jobs: int) -> Iterator[Any]:
        for task in tasks:
            watcher.started(task)
            yield task, make(task.plan, task.run_dir)

    monkeypatch.setattr(runner, "run_plan", make)
    monkeypatch.setattr(runner, "run_here", run_here)
    monkeypatch.chdir(tmp_path)
    return made


def test_a_plan_gives_the_figures_of_its_run(planned: list[tuple[Plan, Path]]) -> None:
    run = mp.plan("M", device="sim:910b", tensor_parallel_size=2, ranks="one", rank=1)
    ((plan, run_dir),) = planned
    assert plan.own == {"device": "sim:910b", "ranks": "one", "rank": "1"}
    assert plan.engine_args == ["--tensor-parallel-size", "2"]
    assert run_dir.parent == Path.cwd() / "reports"
    assert run.kv.tokens.tolist() == mp.load(DATA / "plan_tp2").kv.tokens.tolist()
    mp.plan("M")
    mp.plan("M", run_dir="here")
    assert len({path for _, path in planned}) == 3  # each in a folder of its own
    assert planned[2][1] == Path.cwd() / "here"
    with pytest.raises(UsageError, match="is not empty"):
        mp.plan("M", run_dir="here")


def test_a_plan_that_left_nothing_says_why(planned: list[tuple[Plan, Path]]) -> None:
    with pytest.raises(LaunchError, match="no plan of broken: no such option --nonsense"):
        mp.plan("broken")


def test_a_sweep_gives_a_row_per_plan(planned: list[tuple[Plan, Path]]) -> None:
    over = {"tensor_parallel_size": [2, 4], "enforce_eager": [True, False]}
    found = mp.sweep("M", over, device="sim:910b", max_model_len=4096, cache=False, folder="s")
    assert found.plans["tensor-parallel-size"].tolist() == [2, 2, 4, 4]
    assert found.plans["enforce-eager"].tolist() == [True, False, True, False]
    assert found.plans.tokens.tolist() == [8, 8, 8, 8]
    assert all(value_of(plan.engine_args, "max-model-len") == "4096" for plan, _ in planned)
    again = mp.sweep("M", over, device="sim:910b", max_model_len=4096, cache=False, folder="s")
    assert len(planned) == 4  # what is there is kept
    pd.testing.assert_frame_equal(again.plans, found.plans)
    assert {path.name for path in Path("s").iterdir()} >= {"sweep.csv", "sweep.json"}


def test_mistakes_of_a_sweep(planned: list[tuple[Plan, Path]]) -> None:
    for over in ({}, {"max_model_len": []}):
        with pytest.raises(UsageError, match="no option with a value"):
            mp.sweep("M", over)
    with pytest.raises(UsageError, match="at least 1"):
        mp.sweep("M", {"max_model_len": [1]}, jobs=0)
    assert planned == []


def test_ctrl_c_ends_a_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(tasks: Sequence[Any], watcher: Any, jobs: int) -> Iterator[Any]:
        yield tasks[0], PlanRow(dict(tasks[0].plan.values), "ok", tokens=8, kv_cache_bytes=1024)
        raise runner.Interrupted(signal.SIGINT)

    monkeypatch.setattr(runner, "run_here", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mp.sweep("M", {"max_model_len": [1, 2]}, folder=tmp_path / "s", cache=False)
    assert len(mp.load(tmp_path / "s" / "sweep.csv").plans) == 1  # what was made is kept


def test_the_command_makes_its_sweep_by_the_same_function(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs: list[Any] = []

    def make_sweep(job: Any, *_: object) -> None:
        jobs.append(job)
        raise UsageError("asked")

    monkeypatch.setattr("vllm_memprof.cli.commands.sweep.make_sweep", make_sweep)
    words = ["sweep", "M", "--over", "max_model_len=1,2", "-o", str(tmp_path / "s")]
    assert main(words) == 2
    assert [len(job.plans) for job in jobs] == [2]


# --- the page -------------------------------------------------------------------------------------


def test_the_page_runs_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.S)
    *blocks, makes = blocks
    assert "mp.plan(" in makes  # needs an engine: tests/integration/test_python.py
    assert len(blocks) == 4  # the import, and three questions
    names: dict[str, object] = {}
    exec(blocks[0], names)
    for block in blocks[1:]:
        *lines, last = block.strip().splitlines()
        assert len(lines) == 2  # three lines each
        exec("\n".join(lines), names)
        answer = eval(last, names)
        assert isinstance(answer, pd.DataFrame)
        assert len(answer)
