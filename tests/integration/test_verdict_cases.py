"""The verdict on a device against what happens there: the engine is driven to its limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sim


def hold(folder: Path, *options: str) -> list[str]:
    """Run cases; return the rows of their table."""
    command = [sys.executable, "-m", "scripts.verdict_cases", "--folder", str(folder), *options]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.rpartition("| set-up |")[2].splitlines()[2:]
    return [line for line in table if line.startswith("| ")]


@pytest.mark.timeout(900)
def test_what_fits_is_served_and_what_does_not_runs_out_of_memory(
    sim_stack: str, tmp_path: Path
) -> None:
    """One of each verdict, on the set-up that starts fastest."""
    few = ["--setup", "text, eager", "--utilization", "0.5", "--utilization", "0.9"]
    rows = hold(tmp_path, *few)
    assert ["| fits | served |" in row for row in rows] == [True, False]
    assert "| exceeds |" in rows[1]


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_twenty_cases(sim_stack: str, tmp_path: Path) -> None:
    rows = hold(tmp_path)
    assert len(rows) == 20
    assert min(sum(f"| {verdict} |" in row for row in rows) for verdict in ("fits", "exceeds")) >= 5
