"""Attach: a run of another process is shown, and nothing of it is changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.host_runs import write_hosts
from vllm_memprof.cli import app
from vllm_memprof.errors import RunRecordError, UsageError
from vllm_memprof.launch.attach import Attached
from vllm_memprof.record.held import hold, is_held
from vllm_memprof.sources import build_run, build_runs

DATA = Path(__file__).parents[2] / "data"
HOST = os.uname().nodename
HOLDER = """
import sys, time
from pathlib import Path
from vllm_memprof.record.held import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that is under way, as its folder says."""
    folder = tmp_path / "run"
    shutil.copytree(DATA / "recorded_tp2", folder)
    set_info(folder, status="running", host=HOST, ended=None, exit_code=None, mode="serve")
    [core] = [path for path in (folder / "events").iterdir() if "kv_plan" in path.read_text()]
    with core.open("a") as stream:
        stream.write(json.dumps({"kind": "ready", "t_ns": time.monotonic_ns(), "what": "server"}))
        stream.write("\n")
    return folder


def set_info(folder: Path, **values: Any) -> None:
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, **values}))


@pytest.fixture
def holder(run_dir: Path) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_run_is_held_while_its_recorder_lives(run_dir: Path, holder: Any) -> None:
    assert is_held(run_dir, HOST) is True
    assert is_held(run_dir, "another host") is True
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert is_held(run_dir, HOST) is False
    assert is_held(run_dir, "another host") is None  # its locks need not be visible here
    assert is_held(run_dir / "absent", HOST) is None


def test_holding_adds_no_file_and_ends(run_dir: Path) -> None:
    before = sorted(run_dir.rglob("*"))
    with hold(run_dir):
        assert is_held(run_dir, HOST) is True
        assert sorted(run_dir.rglob("*")) == before
    assert is_held(run_dir, HOST) is False


def once(run_dir: Path) -> Any:
    return CliRunner().invoke(app, ["attach", str(run_dir), "--once"])


def test_one_reading(run_dir: Path, holder: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    done = once(run_dir)
    assert done.exit_code == 0, done.output
    rank = next(line for line in done.output.splitlines() if line.startswith("TP1"))
    assert rank.split() == [
        "TP1",
        "after",
        "shutdown",
        "53.58",
        "53.55",
        "0.98",
        "44.13",
        "6.40",
        "2.11",
    ]
    assert "not measured without --sample" in done.output
    assert "ended" not in done.output
    assert "gone" not in done.output
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_a_recorder_that_died_is_said_to_be_gone(run_dir: Path, holder: Any) -> None:
    holder.kill()
    holder.wait()
    done = once(run_dir)
    assert done.exit_code == 0
    assert "the process that recorded this run is gone and did not write its end" in done.output
    assert "TP0" in done.output


def test_a_run_of_another_host_is_not_said_to_be_gone(run_dir: Path) -> None:
    set_info(run_dir, host="another host")
    assert "gone" not in once(run_dir).output


def test_a_run_that_has_ended(run_dir: Path) -> None:
    set_info(run_dir, status="failed", exit_reason="worker TP1 was killed by SIGKILL")
    done = once(run_dir)
    assert done.exit_code == 0
    assert done.output.endswith(
        "memprof: the run has ended: failed, worker TP1 was killed by SIGKILL; "
        f"all of it: memprof report {run_dir}\n"
    )


@pytest.mark.parametrize("what", ["absent", "no-run", "a-file"])
def test_what_is_no_run(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "no-run":
        path.mkdir()
    elif what == "a-file":
        path.touch()
    done = CliRunner().invoke(app, ["attach", str(path)])
    assert isinstance(done.exception, RunRecordError)
    assert done.exception.exit_code == 3
    assert done.exception.hint


def test_plain_lines_follow_the_run_to_its_end(run_dir: Path, holder: Any) -> None:
    """Phases that are there, then what it does; and the recorder dies meanwhile."""
    attached = subprocess.Popen(
        [sys.executable, "-m", "vllm_memprof", "attach", str(run_dir)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert attached.stdout is not None
    lines = []
    for line in attached.stdout:
        lines.append(line.rstrip())
        if "| headroom 2.11 GiB (m) |" in line:
            holder.kill()
    attached.stdout.close()
    assert attached.wait(30) == 0
    assert any("TP0 weight_load" in line and "GiB reserved" in line for line in lines)
    assert sum("| headroom 2.11 GiB (m) |" in line for line in lines) == 1
    assert "the process that recorded this run is gone" in lines[-1]


def test_events_of_the_run_arrive(run_dir: Path) -> None:
    attached = Attached(run_dir, list)
    assert attached.progress.serves
    worker = next(process for process in attached.progress.workers if process.label == "TP0")
    with (run_dir / "events" / worker.file).open("a") as stream:
        event = {"kind": "phase", "t_ns": time.monotonic_ns(), "phase": "sleep", "edge": "before"}
        stream.write(json.dumps({**event, "id": 9999, "snapshot": None}) + "\n")
    attached.read()
    assert worker.where() == "in sleep"


def test_a_run_that_was_copied_while_it_served() -> None:
    """Two ranks of the real engine, six clients, every 16th step sampled."""
    done = once(DATA / "serving/tp2")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert "6 running, 0 waiting" in lines
    rows = [line.split() for line in lines if line.startswith("TP")]
    assert rows == [
        ["TP0", "serving", "55.63", "55.61", "1.26", "55.56", "4.07", "4.07"],
        ["TP1", "serving", "55.63", "55.61", "0.91", "55.56", "4.42", "4.42"],
    ]
    assert "not measured" not in done.output


def test_a_run_that_has_ended_in_chinese() -> None:
    done = CliRunner().invoke(app, ["attach", str(DATA / "graph_tp2"), "--once", "--lang", "zh"])
    assert done.exit_code == 0
    assert "memprof: 运行已结束：ok；全部内容：memprof report " in done.stdout
    assert "推理峰值时的设备" in done.stdout
    refused = CliRunner().invoke(app, ["attach", str(DATA / "graph_tp2"), "--lang", "fr"])
    assert isinstance(refused.exception, UsageError)


def test_a_run_whose_launcher_is_gone_has_failed(run_dir: Path) -> None:
    with hold(run_dir):
        assert build_run(run_dir).run.status == "running"
    run = build_run(run_dir).run
    reason = "the process that recorded this run is gone and did not write its end"
    assert (run.status, run.exit_reason) == ("failed", reason)
    set_info(run_dir, host="elsewhere")  # where nothing is known of the process
    assert build_run(run_dir).run.status == "running"


def test_a_deployment_whose_second_launcher_is_gone_has_failed(tmp_path: Path) -> None:
    """``report --deployment``, as ``report`` says it of one run."""
    first, second = write_hosts(tmp_path)
    set_info(second, status="running", host=HOST)
    with hold(second):
        assert build_runs([str(first), str(second)]).run.status == "running"
    report = build_runs([str(first), str(second)])
    assert report.run.status == "failed"
    reason = "the process that recorded this run is gone and did not write its end"
    assert reason in str(report.run.exit_reason)
    assert report.deployment is not None
    assert [row.status for row in report.deployment.hosts] == ["ok", "failed"]
