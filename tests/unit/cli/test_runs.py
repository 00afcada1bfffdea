"""Commands without a run take the newest in ``reports/``, and a part of a name stands for a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vllm_memprof.cli import main
from vllm_memprof.cli.show import find_run, recorded, run_before
from vllm_memprof.errors import RunRecordError

DATA = Path(__file__).parents[2] / "data"
RUNS = {"20260101-Qwen3-8B": "plan_tp2", "20260102-Qwen3-14B": "graph_tp2"}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs; the one whose name is later was started first."""
    monkeypatch.chdir(tmp_path)
    for number, (name, source) in enumerate(RUNS.items()):
        folder = tmp_path / "reports" / name
        shutil.copytree(DATA / source, folder)
        info = json.loads((folder / "run.json").read_text())
        info["started"] = f"2026-01-0{9 - number}T08:00:00Z"
        (folder / "run.json").write_text(json.dumps(info))
    (tmp_path / "reports" / "no-run").mkdir()
    return tmp_path


def status(*command: str) -> object:
    try:
        return main(list(command))
    except SystemExit as ended:  # Typer's way
        return ended.code


def test_the_newest_is_the_one_that_was_started_last(capsys: Any) -> None:
    assert [run.name for run in recorded()] == list(RUNS)
    assert find_run(None) == "reports/20260101-Qwen3-8B"
    assert "reports/20260101-Qwen3-8B, the newest of 2" in capsys.readouterr().err


def test_a_part_of_a_name_stands_for_a_run_and_a_path_for_itself(capsys: Any) -> None:
    assert find_run("qwen3-14b") == "reports/20260102-Qwen3-14B"
    assert find_run("qwen3") == "reports/20260101-Qwen3-8B"
    for typed in ("reports/20260102-Qwen3-14B", "reports/*", "elsewhere/run", "-"):
        assert find_run(typed) == typed
    with pytest.raises(RunRecordError, match="no run in reports/ of that name") as caught:
        find_run("20260101-Qwen3-9B".lower()[9:])
    assert "in reports/: " in str(caught.value.hint)
    with pytest.raises(RunRecordError) as caught:
        find_run("nosuch")
    assert caught.value.hint == f"in reports/: {', '.join(RUNS)}"
    with pytest.raises(RunRecordError) as caught:
        find_run("20260102-Qwen3-15B")
    assert "20260102-Qwen3-14B" in str(caught.value.hint)


def test_one_run_is_compared_with_the_newest_before_it(capsys: Any) -> None:
    assert run_before("reports/20260101-Qwen3-8B") == "reports/20260102-Qwen3-14B"
    assert "the newest before it" in capsys.readouterr().err
    with pytest.raises(RunRecordError, match="is older than"):
        run_before("reports/20260102-Qwen3-14B")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["report", "--format", "json"], 0),
        (["report", "14b", "--format", "json"], 0),
        (["diff"], 0),
        (["diff", "8b"], 0),
        (["diff", "14b"], 3),
        (["check", "--min-kv-cache", "1GiB"], 0),
        (["check", "--min-kv-cache", "100GiB"], 1),
        (["check", "14b", "--max-weights", "1GiB", "--min-kv-cache-tokens", "1000"], 1),
        (["check", "--min-kv-cache", "40GB"], 2),
        (["check", "--min-kv-cache", "40"], 2),  # bytes that guard nothing
        (["check"], 2),
        (["attach", "--once"], 0),
    ],
)
def test_commands_that_read_runs(command: list[str], code: int, capsys: Any) -> None:
    assert status(*command) == code
    assert "reports/2026010" in capsys.readouterr().err or code == 2


def test_limits_of_options_take_the_place_of_those_of_the_file(place: Path, capsys: Any) -> None:
    (place / "budget.toml").write_text('[budget]\nmin_kv_cache = "100GiB"\nmax_weights = "20GiB"\n')
    assert status("check", "--budget", "budget.toml") == 1
    assert status("check", "--budget", "budget.toml", "--min-kv-cache", "1GiB") == 0
    shown = capsys.readouterr().out
    assert "20GiB" in shown


def test_where_nothing_is_recorded(place: Path) -> None:
    shutil.rmtree(place / "reports")
    with pytest.raises(RunRecordError, match="no run is recorded in reports/"):
        find_run(None)
