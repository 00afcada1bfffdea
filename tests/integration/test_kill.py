"""A process of a run is ended from outside: no process, no shared memory and no event is lost.

A cell is a signal, whom it goes to, and when. Each leaves a line of the table (``-s`` prints it).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from itertools import product
from pathlib import Path

import psutil
import pytest

from tests.support.engine import (
    FORK,
    MEMPROF,
    read_events,
    start_memprof,
    wait_for_server,
    wait_until,
)
from tests.support.load import Load
from tests.support.ports import free_port
from vllm_memprof.launch.shared_memory import left_behind

pytestmark = [pytest.mark.sim, pytest.mark.alone, pytest.mark.timeout(400)]

PHASES = {"load": "weight_load", "profile run": "profile_run", "capture": "graph_capture"}
WHO = {"launcher": "memprof", "engine core": "EngineCore", "worker": "TP1"}
#: The cells of every run of the tests.
ALWAYS = {("KILL", "launcher", "serving"), ("KILL", "worker", "under load")}
CELLS = [
    pytest.param(*cell, marks=() if cell in ALWAYS else pytest.mark.full, id="-".join(cell))
    for cell in [
        *product(("KILL", "TERM"), WHO, (*PHASES, "serving", "under load")),
        ("INT", "launcher", "under load"),
    ]
]


def arguments(when: str, port: int) -> list[str]:
    found = ["serve", "memprof/tiny", "--device", "sim:910b", "--tensor-parallel-size", "2"]
    found += ["--max-model-len", "4096", "--host", "127.0.0.1", "--port", str(port)]
    found += ["--served-model-name", "tiny", "--sample", "1"]
    return found if when == "capture" else [*found, "--enforce-eager"]


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


def stop_in(run_dir, phase: str, process) -> int:
    """Stop worker TP1 inside the phase; return its pid."""

    def caught():
        assert process.poll() is None, "the run ended first"
        pid, phases = open_phases(read_events(run_dir), "TP1")
        if pid is None or phase not in phases:
            return False
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, 5, "stopped")
        if phase in open_phases(read_events(run_dir), "TP1")[1]:
            return pid
        os.kill(pid, signal.SIGCONT)
        return False

    return wait_until(caught, 150, f"TP1 is in {phase}")


def tree_of(process) -> dict[psutil.Process, str]:
    """The processes of a run, the launcher's first, with their titles."""
    first = psutil.Process(process.pid)
    found = {}
    for each in (first, *first.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            found[each] = " ".join(each.cmdline())
    return found


def shared_memory_of(tree) -> set[tuple[str, int]]:
    """Path and inode of every file in /dev/shm that these processes have open or mapped."""
    found = set()
    for each in tree:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{each.pid}/maps").read_text()
            paths = set(re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE))
            with contextlib.suppress(FileNotFoundError):
                paths |= {os.readlink(fd) for fd in Path(f"/proc/{each.pid}/fd").iterdir()}
            for path in paths:
                with contextlib.suppress(OSError):
                    if path.startswith("/dev/shm/"):
                        found.add((path, os.stat(path).st_ino))
    return found


def still(files: set[tuple[str, int]]) -> list[str]:
    return [path for path, inode in files if os.path.exists(path) and os.stat(path).st_ino == inode]


def lost_events(run_dir, report) -> int:
    """Ends of phases that workers wrote and that the report does not have."""
    written, told = Counter(), Counter()
    labels = {event["file"]: event["label"] for event in read_events(run_dir)
              if event["kind"] == "identity" and event.get("label")}  # fmt: skip
    for event in read_events(run_dir):
        if event["kind"] == "phase" and event["edge"] == "after":
            written[labels.get(event["file"]), event["phase"]] += 1
    for rank in report["ranks"]:
        for phase in rank["phases"]:
            told[rank["label"], phase["phase"]] += 1
    return (written - told).total()


@pytest.mark.parametrize(("name", "who", "when"), CELLS)
def test_a_process_is_ended(sim_stack, tmp_path, cleanup_processes, monkeypatch, name, who, when):
    if (name, who, when) in ALWAYS and when == "under load":
        monkeypatch.setenv(*FORK)
    number, run_dir, port = signal.Signals[f"SIG{name}"], tmp_path / "run", free_port()
    process = start_memprof(arguments(when, port), run_dir)
    cleanup_processes.append(process)
    load = stopped = None
    if when in PHASES:
        stopped = stop_in(run_dir, PHASES[when], process)
    else:
        wait_for_server(process, run_dir, 200)
    if when == "under load":
        load = Load(port, "tiny", clients=4, max_tokens=40).start()
        wait_until(lambda: len(load.answers.tokens) > 4, 60, "requests are answered")
    tree = tree_of(process)
    assert len(tree) >= 5  # memprof, API server, engine core, two workers
    files = shared_memory_of(tree)
    pid = stopped or open_phases(read_events(run_dir), "TP1")[0]
    if who == "launcher":
        pid = process.pid
    elif who == "engine core":
        pid = next(each.pid for each, title in tree.items() if "VLLM::EngineCore" in title)
    begun = time.monotonic()
    os.kill(pid, number)
    if stopped is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
    goes_on = (name, who) == ("TERM", "worker")
    if goes_on:
        # the handler that torch_npu installs ignores it, as without memprof
        # (torch_npu/dynamo/torchair/core/_backend.py::_signal_handler, 2.10)
        if load is not None:
            answered = len(load.answers.tokens)
            wait_until(lambda: len(load.answers.tokens) > answered + 8, 60, "requests go on")
            assert load.stop().failures == []
        wait_for_server(process, run_dir, 200)
        os.kill(process.pid, signal.SIGINT)
    status = process.wait(120)
    seconds = time.monotonic() - begun
    if load is not None:
        load.stop(1.0)
    if who == "launcher" and name == "KILL":
        wait_until(lambda: not any(map(is_running, tree)), 60, "the engine has ended")
    orphans = [title for each, title in tree.items() if is_running(each)]
    left_by_it = len(still(files))
    if who == "launcher" and name == "KILL":
        # as the next start does; threads of a process may end after its first one
        wait_until(lambda: [left_behind(remove=True)] and not still(files), 20, "they are gone")
    told = subprocess.run([*MEMPROF, "report", str(run_dir)], capture_output=True, text=True)
    done = subprocess.run([*MEMPROF, "report", str(run_dir), "--format", "json"],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    run, lost = report["run"], lost_events(run_dir, report)
    print(f"\n| {name} | {who} | {when} | {status} | {seconds:.1f} | {len(orphans)} | {len(files)}"
          f" | {left_by_it} | {len(still(files))} | {lost} | {run['status']} | "
          f"{run['exit_reason']} |")  # fmt: skip
    assert orphans == []
    assert still(files) == []
    assert lost == 0
    assert {rank["label"] for rank in report["ranks"]} == {"TP0", "TP1"}
    if run["status"] != "ok":
        assert "".join(run["exit_reason"].split())[:60] in "".join(told.stdout.split())
    if when not in PHASES:
        assert all(rank["budget"]["residual_bytes"] == 0 for rank in report["ranks"])
    if load is not None:
        assert all(rank["samples"] for rank in report["ranks"])
    judge(name, who, when, status, seconds, run, WHO[who], goes_on)


def judge(name, who, when, status, seconds, run, person, goes_on) -> None:
    reason, early = run["exit_reason"] or "", when in PHASES
    place = PHASES.get(when, "while serving")
    if goes_on:
        assert (status, run["status"]) == (0, "ok")
    elif (name, who) == ("KILL", "launcher"):
        assert (status, run["outcome"]) == (-signal.SIGKILL, "failed")
        assert "the process that recorded this run is gone" in reason
    elif who == "launcher" and early:
        assert (status, run["status"]) == (128 + signal.SIGTERM, "terminated")
        assert reason.startswith("interrupted by SIGTERM: ")
        assert f"TP1 in {place}" in reason
        assert seconds < 5
    elif who == "launcher":
        # vLLM waits for its clients, and these do not leave: memprof ends it then
        assert run["status"] == "ok"
        assert reason.startswith(f"ended by SIG{name}")
        assert status == (0 if reason == f"ended by SIG{name}" else 128 + signal.SIGKILL)
    else:
        assert status != 0
        assert run["status"] == "failed"
        assert seconds < 30
        assert f"{person} (pid " in reason
        # a capture, which is part of the warm-up, may end before its engine core's end is seen
        assert place in reason or (when == "capture" and "warm_up" in reason)
        assert f"SIG{name}" in reason or (name == "TERM" and "exited with status" in reason)
        assert "GiB of host memory" in reason
        # an engine core that is asked to end while it serves ends its workers first
        assert "; after it " in reason or (name, who, early) == ("TERM", "engine core", False)


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
