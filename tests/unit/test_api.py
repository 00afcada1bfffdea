"""``vllm_memprof.load``: every kind of input, and the page of docs/python.md run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import vllm_memprof as mp
from vllm_memprof.errors import RunRecordError
from vllm_memprof.report import render_json
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


def test_the_page_runs_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.S)
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
