"""A sweep on a local Ray with two workers, on an engine that takes no time."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.unit.plans.test_plan_commands import (
    call,
    env,
    identities,
    interrupted_after,
    rows,
    starts,
    wait_for,
)
from vllm_memprof.plans.model import Plan
from vllm_memprof.plans.on_ray import make_plan

__all__ = ["env"]  # a fixture

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"
)
PLAN = Plan(
    "some/model",
    [],
    own={"device": "cpu", "python": str(Path(__file__).with_name("fake_python.py"))},
)


def test_a_task_brings_the_run_folder_back(tmp_path: Path) -> None:
    from vllm_memprof.version import __version__

    files, row = make_plan(PLAN, __version__, {"FAKE_PLAN_LOG": str(tmp_path / "starts")})
    assert {"run.json", "report.json", "engine.log", "report.md"} <= set(files)
    assert any(name.startswith("events/") for name in files)
    assert (row["status"], row["run_id"]) == ("ok", json.loads(files["run.json"])["id"])
    assert len(starts(tmp_path)) == 1  # the environment that was given reached the engine


def test_a_node_of_another_release_says_so() -> None:
    files, row = make_plan(replace(PLAN, values={"x": "1"}), "0.0.1", {})
    assert files == {}
    assert (row["status"], row["final"], row["values"]) == ("failed", False, {"x": "1"})
    assert "has memprof" in row["reason"]


def test_without_ray_the_command_says_what_to_install(env: dict[str, str], tmp_path: Path) -> None:
    code = "import sys, importlib.util as u; f = u.find_spec\n"
    code += "u.find_spec = lambda n, *a: None if n == 'ray' else f(n, *a)\n"
    code += "from vllm_memprof.cli import main; sys.exit(main(sys.argv[1:]))"
    args = [
        "sweep",
        "some/model",
        "--device",
        "cpu",
        "--python",
        "python3",
        "--over",
        "max-num-seqs=1",
        "--ray",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "-m pip install ray" in " ".join(done.stderr.split())


@needs_ray
def test_a_sweep_on_two_workers_with_a_ctrl_c(env: dict[str, str], tmp_path: Path) -> None:
    args = [
        "--over",
        "max-num-seqs=1,2,3,4,5,6",
        "-o",
        "sweep",
        "--ray=local",
        "--jobs",
        "2",
        "--refuse=6",
    ]
    code, stderr, children = interrupted_after(
        2, {**env, "FAKE_PLAN_SECONDS": "1"}, tmp_path, *args
    )
    assert code == 130, stderr
    wait_for(
        lambda: not any(psutil.pid_exists(pid) for pid in children),
        "something of Ray outlived the sweep",
    )
    before, ended = identities(tmp_path / "sweep"), len(starts(tmp_path))
    assert 2 <= len(before) < 6

    done = call(env, tmp_path, "sweep", *args)
    assert done.returncode == 0, done.stderr
    after = identities(tmp_path / "sweep")
    assert len(set(after.values())) == 6
    assert {name: after[name] for name in before} == before
    assert len(starts(tmp_path)) - ended == 6 - len(before)
    assert [row["status"] for row in rows(tmp_path / "sweep")] == ["ok"] * 5 + ["failed"]


@needs_ray
def test_no_cluster_is_said(env: dict[str, str], tmp_path: Path) -> None:
    done = call(env, tmp_path, "sweep", "--over", "max-num-seqs=1", "--ray")
    assert done.returncode == 1
    assert "no Ray cluster at 'auto'" in done.stderr
