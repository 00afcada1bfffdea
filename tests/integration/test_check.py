"""The project's own guard: a plan of a small model against a committed budget, as docs/ci.md tells others to do it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml

from tests.support.engine import MEMPROF

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
BUDGET = ROOT / "tests/budgets/tiny_910b.toml"
#: One unit tighter where a limit is above 0.
TIGHTER = {"min": 1, "max": -1}


def check(run_dir: Path, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [*MEMPROF, "check", str(run_dir), *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **env}, timeout=60
    )


def test_a_plan_keeps_the_committed_budget_to_the_byte(run_memprof, tmp_path):
    args = ["--max-model-len", "4096", "--gpu-memory-utilization", "0.9"]
    run = run_memprof("plan", "memprof/tiny", "--device", "sim:910b", *args)
    assert run.returncode == 0, run.output[-3000:]

    junit, summary = tmp_path / "junit.xml", tmp_path / "summary.md"
    done = check(
        run.run_dir,
        "--budget",
        BUDGET,
        "--format",
        "github",
        "--junit",
        junit,
        GITHUB_STEP_SUMMARY=str(summary),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ET.parse(junit).getroot().get("failures") == "0"
    assert "within budget" in summary.read_text()

    limits = json.loads(check(run.run_dir, "--budget", BUDGET, "--format", "json").stdout)["limits"]
    exact = {row["key"]: row["readings"][0] for row in limits if row["unit"] in ("bytes", "tokens")}
    assert len(exact) == 7
    assert {key: reading["margin"] for key, reading in exact.items()} == dict.fromkeys(exact, 0)

    tighter = tmp_path / "tighter.toml"
    wanted = {
        key: reading["limit"] + TIGHTER[key[:3]]
        for key, reading in exact.items()
        if reading["limit"]
    }
    tighter.write_text(
        "[budget]\n" + "".join(f"{key} = {limit}\n" for key, limit in wanted.items())
    )
    done = check(run.run_dir, "--budget", tighter, "--format", "json")
    assert done.returncode == 1
    failed = {
        row["key"]: row["readings"][0]["margin"]
        for row in json.loads(done.stdout)["limits"]
        if not row["ok"]
    }
    assert failed == dict.fromkeys(wanted, -1)

    proposed = check(run.run_dir, "--init", "--margin", "0%").stdout
    for key, reading in exact.items():
        assert f"\n{key} = {reading['limit']} " in proposed


def test_the_action_plans_comments_and_fails_over_budget(sim_stack, tmp_path):
    """The steps of action.yml that are commands, as GitHub runs them: bash -eo pipefail."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps = {each["name"]: each for each in action["runs"]["steps"] if "name" in each}
    given = {name: row.get("default", "") for name, row in action["inputs"].items()}
    given |= {"model": "memprof/tiny", "stack": sim_stack, "budget": str(BUDGET)}
    given |= {"arguments": "--max-model-len 4096 --gpu-memory-utilization '0.9'"}
    own = tmp_path / "bin"
    own.mkdir()
    for name, body in {
        "memprof": shlex.join([*MEMPROF]) + ' "$@"',
        "python": shlex.quote(sys.executable) + ' "$@"',
        "gh": 'echo "$@" > gh.txt; cat "${@: -1}" >> gh.txt',
    }.items():
        (own / name).write_text(f"#!/bin/bash\n{body}\n")
        (own / name).chmod(0o755)

    def step(name: str, **inputs: str) -> subprocess.CompletedProcess[str]:
        values = {f"inputs.{key}": value for key, value in {**given, **inputs}.items()}
        values["github.event.pull_request.html_url"] = "https://github.com/o/r/pull/1"
        asked = steps[name].get("env", {})
        env = {
            key: values[re.fullmatch(r"\$\{\{ (.*) \}\}", each)[1]] for key, each in asked.items()
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", steps[name]["run"]]
        env |= {**os.environ, **env, "MEMPROF_NO_WARM": "1", "PATH": f"{own}:{os.environ['PATH']}"}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    planned = step("plan")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert step("check").returncode == 0
    report = tmp_path / action["outputs"]["report"]["value"]
    assert report.is_file()
    over = tmp_path / "over.toml"
    over.write_text('[budget]\nmin_kv_cache = "60GiB"\n')
    assert step("comment", budget="over.toml", baseline=str(report)).returncode == 0
    posted, _, body = (tmp_path / "gh.txt").read_text().partition("\n")
    assert posted.startswith("pr comment https://github.com/o/r/pull/1 ")
    assert "60.0000 GiB" in body
    assert "KV cache" in body
    failed = step("check", budget="over.toml")
    assert failed.returncode == 1
    assert "::error" in failed.stdout
    ran = step("run", run="python -c 'import torch, torch_npu; print(torch.npu.device_count())'")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[-1] == "8"
