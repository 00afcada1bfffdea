"""Poison mode from the launcher's side: its file of reads, and the command that judges them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm_memprof.cli.commands import sim
from vllm_memprof.errors import UsageError
from vllm_memprof.sim import selftest
from vllm_memprof.sim.poison import (
    ANSWERED,
    CALL_SITE_DIR,
    UNWRITTEN,
    PoisonedRead,
    load_poisoned_reads,
    poison_env,
)


def line(pid, kind=UNWRITTEN, left_by="aclnnX", read_by="aclrtMemcpy", site="a.py:1 f", size=4):
    row = {"kind": kind, "left_by": left_by, "read_by": read_by, "call_site": site}
    return json.dumps({**row, "pid": pid, "bytes": size}) + "\n"


def test_equal_reads_of_several_processes_are_one(tmp_path):
    path = tmp_path / "reads.jsonl"
    assert load_poisoned_reads(path) == []
    path.write_text(line(1) + line(2, size=8) + line(2, kind=ANSWERED))
    assert load_poisoned_reads(path) == [
        PoisonedRead(UNWRITTEN, "aclnnX", "aclrtMemcpy", "a.py:1 f", 4),
        PoisonedRead(ANSWERED, "aclnnX", "aclrtMemcpy", "a.py:1 f", 4),
    ]


def test_other_processes_of_python_start_as_ever(tmp_path):
    """What reports lines of Python is on the path of processes without the device, too."""
    env = {**os.environ, **poison_env(tmp_path / "reads"), "PYTHONPATH": str(CALL_SITE_DIR)}
    code = "import sys; print('sitecustomize' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.parametrize(
    ("kinds", "status", "said"),
    [
        ([], 0, "0 reads of values that nobody wrote, 0 of values"),
        ([ANSWERED], 0, "0 reads of values that nobody wrote, 1 of values"),
        ([ANSWERED, UNWRITTEN], 1, "1 reads of values that nobody wrote, 1 of values"),
    ],
)
def test_a_value_that_nobody_wrote_fails(monkeypatch, kinds, status, said):
    reads = [
        PoisonedRead(kind, "aclnnX", "aclrtMemcpy", "a.py:1 f < b.py:2 g", 4) for kind in kinds
    ]
    monkeypatch.setattr(sim, "run_selftest", lambda stack, model, device: reads)
    result = CliRunner().invoke(sim.app, ["selftest"])
    assert result.exit_code == status
    assert said in result.output
    assert result.output.count("aclnnX") == len(kinds)
    assert result.output.find(UNWRITTEN) <= max(result.output.find(ANSWERED), 0)


def test_the_selftest_refuses_a_stack_of_another_engine() -> None:
    with pytest.raises(UsageError, match="stacks of vllm-ascend; sglang"):
        selftest.run_selftest("sglang-0.5.23", "memprof/tiny", "910b")
