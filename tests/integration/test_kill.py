"""Processes killed in weight load, profile run, and serving: who died, in which phase, nothing lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import psutil
import pytest

from tests.integration.test_serve import free_port
from tests.support.engine import (
    MEMPROF,
    assert_nothing_left,
    engine_pids,
    finish,
    read_events,
    start_memprof,
    wait_for_server,
    wait_until,
)
from tests.support.load import Load

pytestmark = [pytest.mark.sim, pytest.mark.alone, pytest.mark.timeout(300)]

MODEL_ARGS = [
    "Qwen/Qwen3-14B",
    "--device",
    "sim:910b",
    "--tensor-parallel-size",
    "2",
    "--enforce-eager",
]
MODEL_ARGS += ["--max-model-len", "8192"]


def open_phases(events, label: str) -> tuple[int | None, list[str]]:
    """The pid of the worker with this label, and its phases that are under way, outermost first."""
    named = [
        event["file"]
        for event in events
        if event["kind"] == "identity" and event.get("label") == label
    ]
    if not named:
        return None, []
    phases: dict[int, str] = {}
    for event in events:
        if event["file"] != named[-1] or event["kind"] != "phase":
            continue
        if event["edge"] == "before":
            phases[event["id"]] = event["phase"]
        else:
            phases.pop(event["id"], None)
    return int(named[-1].removesuffix(".jsonl").rsplit("-", 1)[1]), list(phases.values())


def kill_in(run_dir, label: str, phase: str, process) -> None:
    """Stops the worker inside the phase, makes sure that it is still there, and kills it."""

    def caught():
        assert process.poll() is None, "the run ended first"
        pid, phases = open_phases(read_events(run_dir), label)
        if pid is None or phase not in phases:
            return False
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, 5, "stopped")
        if phase in open_phases(read_events(run_dir), label)[1]:
            os.kill(pid, signal.SIGKILL)
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    wait_until(caught, 120, f"{label} is in {phase}")


@pytest.mark.parametrize(
    "phase", ["weight_load", pytest.param("profile_run", marks=pytest.mark.full)]
)
def test_a_worker_killed_during_start_up(sim_stack, tmp_path, cleanup_processes, phase):
    run_dir = tmp_path / "run"
    process = start_memprof(["offline", *MODEL_ARGS, "--prompt", "hi"], run_dir)
    cleanup_processes.append(process)
    kill_in(run_dir, "TP1", phase, process)
    killed_at = time.monotonic()
    pids = engine_pids(run_dir)
    before = len(read_events(run_dir))
    run = finish(process, run_dir, 60)
    assert time.monotonic() - killed_at < 30
    assert_nothing_left(pids)
    assert run.returncode != 0
    assert run.info["status"] == "failed"
    assert "TP1" in run.info["exit_reason"]
    assert phase in run.info["exit_reason"]
    assert "SIGKILL" in run.info["exit_reason"] or "vanished" in run.info["exit_reason"]
    assert "TP1" in run.output
    assert len(run.events()) >= before
    assert {rank["label"] for rank in run.report["ranks"]} == {"TP0", "TP1"}


def test_a_worker_killed_while_serving(sim_stack, tmp_path, cleanup_processes):
    run_dir = tmp_path / "run"
    process = start_memprof(["serve", *MODEL_ARGS, "--host", "127.0.0.1", "--port", "0"], run_dir)
    cleanup_processes.append(process)

    wait_for_server(process, run_dir, 200)
    pid, phases = open_phases(read_events(run_dir), "TP0")
    assert phases == []
    pids = engine_pids(run_dir)
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    run = finish(process, run_dir, 60)
    assert time.monotonic() - killed_at < 30
    assert_nothing_left(pids)
    assert run.returncode != 0
    assert "TP0" in run.info["exit_reason"]
    assert "serving" in run.info["exit_reason"]
    for rank in run.report["ranks"]:  # the start-up had ended: its books are whole
        assert rank["budget"]["residual_bytes"] == 0


TINY_ARGS = ["memprof/tiny", "--device", "sim:910b", "--tensor-parallel-size", "2"]
TINY_ARGS += ["--enforce-eager", "--max-model-len", "4096", "--host", "127.0.0.1"]


def pid_of(run_dir, who: str) -> int:
    """The process of a rank, or the one that made the KV plan."""
    if who.startswith("TP"):
        return open_phases(read_events(run_dir), who)[0]
    (file,) = {event["file"] for event in read_events(run_dir) if event["kind"] == "kv_plan"}
    return int(file.removesuffix(".jsonl").rsplit("-", 1)[1])


@pytest.mark.full
@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("launcher", signal.SIGTERM),
        ("launcher", signal.SIGINT),
        ("launcher", signal.SIGKILL),
        ("EngineCore", signal.SIGTERM),
        ("EngineCore", signal.SIGKILL),
        ("TP1", signal.SIGKILL),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_somebody_is_killed_under_load(sim_stack, tmp_path, cleanup_processes, who, number):
    run_dir = tmp_path / "run"
    port = free_port()
    process = start_memprof(
        ["serve", *TINY_ARGS, "--served-model-name", "tiny", "--port", str(port), "--sample", "1"],
        run_dir,
    )
    cleanup_processes.append(process)

    wait_for_server(process, run_dir, 200)
    load = Load(port, "tiny", clients=4, max_tokens=40).start()
    wait_until(lambda: len(load.answers.tokens) > 4, 60, "requests are answered")
    pids = engine_pids(run_dir)
    assert len(pids) >= 4  # API server, engine core, two workers
    os.kill(process.pid if who == "launcher" else pid_of(run_dir, who), number)
    killed_at = time.monotonic()
    if (who, number) == ("launcher", signal.SIGKILL):
        assert process.wait(20) == -signal.SIGKILL
        wait_until(lambda: not any(map(is_running, pids)), 60, "the engine has ended")
        done = subprocess.run(
            [*MEMPROF, "report", str(run_dir), "--format", "json"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        shown = subprocess.run(
            [*MEMPROF, "attach", str(run_dir)], capture_output=True, text=True, timeout=60
        )
        assert "the process that recorded this run is gone" in shown.stdout
        assert report["run"]["outcome"] == "truncated"
    else:
        run = finish(process, run_dir, 90)
        assert_nothing_left(pids)
        report = run.report
        if who == "launcher":
            # vLLM waits for its clients, and these do not leave: memprof ends it then
            at_once = run.info["exit_reason"] == f"ended by {number.name}"
            assert run.info["exit_reason"].startswith(f"ended by {number.name}")
            assert run.info["status"] == "ok"
            assert run.returncode == (0 if at_once else 128 + signal.SIGKILL)
        else:
            assert run.returncode != 0
            assert run.info["status"] == "failed"
            assert who in run.info["exit_reason"]
            assert "while serving" in run.info["exit_reason"]
    assert time.monotonic() - killed_at < 80
    load.stop(1.0)
    assert {rank["label"] for rank in report["ranks"]} == {"TP0", "TP1"}
    for rank in report["ranks"]:
        assert rank["budget"]["residual_bytes"] == 0
        assert rank["samples"]


@pytest.mark.full
def test_a_worker_that_gets_sigterm_goes_on(sim_stack, tmp_path, cleanup_processes):
    """As without memprof: the handler that torch_npu installs ignores the signal from then on.

    (torch_npu/dynamo/torchair/core/_backend.py::_signal_handler, 2.10)
    """
    run_dir = tmp_path / "run"
    port = free_port()
    process = start_memprof(
        ["serve", *TINY_ARGS, "--served-model-name", "tiny", "--port", str(port)], run_dir
    )
    cleanup_processes.append(process)
    wait_for_server(process, run_dir, 200)
    load = Load(port, "tiny", clients=4, max_tokens=40).start()
    wait_until(lambda: len(load.answers.tokens) > 4, 60, "requests are answered")
    os.kill(pid_of(run_dir, "TP1"), signal.SIGTERM)
    answered = len(load.answers.tokens)
    wait_until(
        lambda: len(load.answers.tokens) > answered + 8, 60, "requests are answered after it"
    )
    assert load.stop().failures == []
    os.kill(process.pid, signal.SIGINT)
    run = finish(process, run_dir, 90)
    assert (run.returncode, run.info["status"]) == (0, "ok")


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
