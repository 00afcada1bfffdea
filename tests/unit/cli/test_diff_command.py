"""``memprof diff`` as a user runs it: what it reads, what it refuses, and with which status."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.render import render_json
from tests.unit.accounting.builders import DATA, recorded
from vllm_memprof.accounting import build_report

LOG = DATA / "logs" / "two_methods_910b_tp2.md"
RUN = DATA / "graph_tp2"


def call(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_memprof", "diff", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **env}, timeout=60
    )


def test_run_folders_reports_and_logs_are_read(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(render_json(build_report(recorded("skewed_tp2"))))
    several = tmp_path / "several.json"
    several.write_text(
        f"[{report.read_text()}, {render_json(build_report(recorded('graph_tp2')))}]"
    )
    packed = tmp_path / "log.gz"
    packed.write_bytes(gzip.compress(LOG.read_bytes()))
    wanted = json.loads(call(DATA / "skewed_tp2", RUN, "--format", "json").stdout)
    assert wanted["served"]["difference_bytes"] == 1 << 28
    for a, b in ((report, RUN), (f"{several}#1", f"{several}#2")):
        assert json.loads(call(a, b, "--format", "json").stdout) == wanted
    done = call(f"{packed}#2", f"{packed}#3", "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    served = json.loads(done.stdout)["served"]
    assert (served["a_equation"], served["b_equation"]) == ("E2", "E4")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["missing", RUN], 3, "there is no run folder and no file missing"),
        ([DATA / "budgets", RUN], 3, "no file"),
        ([DATA, RUN], 2, "the run folders are of"),
        ([RUN / "run.json", RUN], 3, "is not a report of memprof: schema 'memprof.run/1'"),
        ([LOG, RUN], 3, "holds 5 runs"),
        ([f"{LOG}#6", RUN], 3, "has no run 6"),
        ([f"{LOG}#0", RUN], 3, "has no run 0"),
        (["/dev/null", RUN], 3, "is a device, not a regular file"),
        ([DATA / "make_runs.py", RUN], 3, "no line about memory"),
        ([RUN], 3, "no run in reports/ is older than"),
        ([RUN, RUN, "--format", "csv"], 2, "--format 'csv' is not known"),
        ([RUN, RUN, "-o", DATA], 2, "is a folder"),
    ],
)
def test_what_cannot_be_compared(args: list[str | Path], code: int, words: str) -> None:
    done = call(*args)
    assert done.returncode == code
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_no_permission(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch(mode=0)
    done = call(path, RUN)
    assert done.returncode == 3
    assert "no permission" in done.stderr


@pytest.mark.parametrize(
    "text", ["{", '{"schema": 1}', "[1]", "[" * 100_000, '{"schema": "memprof.report/3"}', "{}"]
)
def test_damaged_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    done = call(path, RUN)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


def test_output_file_and_pipe(tmp_path: Path) -> None:
    target = tmp_path / "diff.md"
    done = call(DATA / "skewed_tp2", RUN, "--format", "markdown", "-o", target)
    assert (done.returncode, done.stdout) == (0, "")
    assert target.read_text().startswith("# memprof diff: KV cache differs by +0.25 GiB")
    assert target.stat().st_mode & 0o777 == 0o600
    for env in ({}, {"NO_COLOR": "1"}, {"COLUMNS": "80"}, {"TERM": "dumb"}):
        piped = call(DATA / "skewed_tp2", RUN, **env)
        assert "\x1b" not in piped.stdout
        assert "✓ B - A = sum of the causes" in piped.stdout


def test_a_name_with_a_number_sign(tmp_path: Path) -> None:
    path = tmp_path / "log#2"
    path.write_bytes((DATA / "logs" / "recorded_tp2_0.23.0.log").read_bytes())
    assert call(path, RUN).returncode == 0
