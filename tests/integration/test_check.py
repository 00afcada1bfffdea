"""The project's own guard: a plan of a small model against a committed budget, as docs/ci.md tells others to do it."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.support.engine import MEMPROF

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]
BUDGET = Path(__file__).parents[1] / "budgets" / "tiny_910b.toml"
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
