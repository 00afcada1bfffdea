"""SIGKILL of one worker in weight load, profile run, and serving: who died, in which phase, nothing lost."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.support.engine import (
    assert_nothing_left,
    engine_pids,
    finish,
    read_events,
    start_memprof,
    wait_until,
)

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

    def ready():
        assert process.poll() is None, (tmp_path / "run.out").read_text()[-3000:]
        return any(
            event["kind"] == "ready" and event["what"] == "server" for event in read_events(run_dir)
        )

    wait_until(ready, 200, "the server is ready")
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
