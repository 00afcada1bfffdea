"""A setting that a search has checked: written into a file, and taken by starts of the same kind."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import MEMPROF, STACK

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

DEVICE = ["--device", "sim:910b", "--stack", STACK]
SIZES = ["--load-format=dummy", "--max-num-seqs=8", "--enforce-eager"]
LENGTH = "--max-model-len=2048"
CONFIG = """# as it is served
max-model-len: 2048   # tokens
max_num_seqs: 8
load-format: dummy
enforce-eager: true
gpu-memory-utilization: 0.2  # a guess
"""


def memprof(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(
        [*MEMPROF, *args], capture_output=True, text=True, cwd=folder, env=env, timeout=400,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def served(folder: Path, name: str) -> dict[str, Any]:
    """The report of a plan that ran its largest batches."""
    report = json.loads((folder / name / "report.json").read_text())
    step = report["run"]["full_step"]
    assert (report["run"]["outcome"], report["ranks"][0]["oom"], step["not_run"]) == (
        "ok", None, None,
    )  # fmt: skip
    assert step["prefill_tokens"]
    return report["ranks"][0]["budget"]


def test_what_a_search_found_is_written_and_served(sim_stack: str, tmp_path: Path) -> None:
    search = ["--find", "gpu-memory-utilization", "--between", "0.4:0.5", "--step", "0.1"]
    found = memprof(
        tmp_path, "fit", "memprof/tiny", *search, *DEVICE, *SIZES, LENGTH, "--run-dir", "fit"
    )
    assert found.returncode == 0, found.stderr
    config = tmp_path / "vllm.yaml"
    config.write_text(CONFIG)
    config.chmod(0o640)

    shown = memprof(tmp_path, "apply", "fit", "--to", "vllm.yaml")
    assert shown.returncode == 0, shown.stderr
    assert "-gpu-memory-utilization: 0.2  # a guess\n+gpu-memory-utilization: 0.5  # a guess" in (
        shown.stdout
    )
    assert config.read_text() == CONFIG
    written = memprof(tmp_path, "apply", "fit", "--to", "vllm.yaml", "--yes")
    assert (written.returncode, written.stdout) == (0, shown.stdout)
    assert config.read_text() == CONFIG.replace("0.2", "0.5")
    assert config.stat().st_mode & 0o777 == 0o640

    plan = ["plan", "memprof/tiny", *DEVICE, "--until", "ready", "--run-dir"]
    done = memprof(tmp_path, *plan, "from-file", "--config", "vllm.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert served(tmp_path, "from-file")["gpu_memory_utilization"] == 0.5

    other = memprof(tmp_path, *plan, "other", "--use-checked", "fit", *SIZES, "-tp", "2")
    assert other.returncode == 2
    assert "--max-model-len 2048 when checked, not given here" in other.stderr
    assert "--tensor-parallel-size not given when checked, 2 here" in other.stderr
    assert not (tmp_path / "other").exists()
    done = memprof(tmp_path, *plan, "same", "--use-checked", "fit", *SIZES, LENGTH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert served(tmp_path, "same")["gpu_memory_utilization"] == 0.5

    longer = tmp_path / "longer.yaml"
    longer.write_text(CONFIG.replace("2048", "4096"))
    refused = memprof(tmp_path, "apply", "fit", "--to", "longer.yaml", "--yes")
    assert refused.returncode == 2
    assert "--max-model-len 2048 when checked, 4096 here" in refused.stderr
    assert longer.read_text() == CONFIG.replace("2048", "4096")
