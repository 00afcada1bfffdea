"""The page by command: into a file, through a pipe, from a log with several starts."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.page import Page
from tests.unit.accounting.builders import DATA

MEMPROF = [sys.executable, "-m", "vllm_memprof"]
RUN = DATA / "recorded_tp1"
LOG = DATA / "logs" / "two_methods_910b_tp2.md"


@pytest.mark.parametrize(("command", "source", "runs"), [("report", RUN, 1), ("explain", LOG, 5)])
def test_into_a_file_and_through_a_pipe(
    command: str, source: Path, runs: int, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    call = [*MEMPROF, command, str(source), "--format", "html"]
    done = subprocess.run([*call, "-o", str(page)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert page.stat().st_mode & 0o777 == 0o600
    text = page.read_text(encoding="utf-8")
    assert Page(text).count["article"] == runs
    assert subprocess.run(call, capture_output=True, encoding="utf-8", check=True).stdout == text


def test_a_terminal_is_asked_for_a_file() -> None:
    """Five megabytes on a screen are no use to anybody."""
    leader, terminal = pty.openpty()
    call = [*MEMPROF, "report", str(RUN), "--format", "html"]
    done = subprocess.run(call, stdout=terminal, stderr=subprocess.PIPE, text=True, check=False)
    os.close(terminal)
    os.close(leader)
    assert done.returncode == 2
    assert "--format html is for a file\n  try: -o FILE" in done.stderr
