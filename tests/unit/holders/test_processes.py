"""Processes by their number: those that live, have ended, are of elsewhere, or are left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.left_behind import TITLE, Family, start_family
from vllm_memprof.holders import processes
from vllm_memprof.holders.processes import (
    describe,
    left_behind,
    listed_process,
    numbers_of_the_driver,
)
from vllm_memprof.holders.rows import (
    ELSEWHERE,
    ENDED,
    HERE,
    HOST_NUMBERS,
    OWN_NUMBERS,
    UNKNOWN_NUMBERS,
)

GIB = 1 << 30
SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def family() -> Iterator[Callable[..., Family]]:
    started: list[Family] = []

    def start(*args: str, **named: str) -> Family:
        started.append(start_family(*args, **named))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def sleeper() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str, **named: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([*words], **named))  # type: ignore[call-overload]
        until_s = time.monotonic() + 10
        while not psutil.Process(started[-1].pid).cmdline() and time.monotonic() < until_s:
            time.sleep(0.01)  # it is being executed
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait(30)


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return where run folders are looked for."""
    monkeypatch.setattr(processes, "DEFAULT_PARENT", tmp_path)
    return tmp_path


def record(folder: Path, pid: int, ppid: int, wall: float, role: str = "worker") -> Path:
    """Write the first line of a recorder's file; return the run folder."""
    run_dir = folder / "a-run"
    (run_dir / "events").mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    line = {"host": host, "pid": pid, "ppid": ppid, "role": role, "wall": wall}
    (run_dir / "events" / f"{host}-{pid}.jsonl").write_text(json.dumps(line) + "\n")
    return run_dir


def test_a_process_that_lives(sleeper: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = sleeper(sys.executable, "-c", SLEEP, "--api-key", "sk-very-secret-1234567")
    row = listed_process(process.pid, GIB, OWN_NUMBERS)
    assert (row.pid, row.bytes, row.where) == (process.pid, GIB, HERE)
    assert row.user == psutil.Process().username()
    assert row.parent_pid == os.getpid()
    assert row.command is not None
    assert row.command[0] == sys.executable
    assert "very-secret" not in " ".join(row.command)
    assert (row.engine, row.role, row.left_behind) == (None, None, None)


def test_a_process_that_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait(30)
    row = listed_process(process.pid, GIB, OWN_NUMBERS)
    assert (row.where, row.bytes, row.command) == (ENDED, GIB, None)
    assert "no such process lives" in (row.why or "")


def test_a_zombie_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", SLEEP])
    process.send_signal(signal.SIGKILL)
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    row = listed_process(process.pid, GIB, OWN_NUMBERS)
    process.wait(30)
    assert (row.where, row.bytes) == (ENDED, GIB)
    assert "has not waited" in (row.why or "")


@pytest.mark.parametrize("numbers", [HOST_NUMBERS, UNKNOWN_NUMBERS])
def test_a_number_of_another_namespace_is_never_looked_up(numbers: str) -> None:
    """Not even where a process of that number lives here: it is another one."""
    row = listed_process(os.getpid(), GIB, numbers)
    assert (row.pid, row.bytes, row.where) == (os.getpid(), GIB, ELSEWHERE)
    assert (row.user, row.command, row.engine, row.left_behind) == (None, None, None, None)
    assert "host" in (row.why or "")


def test_whose_numbers_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for inode, numbers in ((4026531836, OWN_NUMBERS), (4026532501, HOST_NUMBERS)):
        link = tmp_path / str(inode)
        link.symlink_to(f"pid:[{inode}]")
        monkeypatch.setattr(processes, "_OWN_NAMESPACE", link)
        assert numbers_of_the_driver(False) == numbers
    monkeypatch.setattr(processes, "_OWN_NAMESPACE", tmp_path / "missing")
    assert numbers_of_the_driver(False) == UNKNOWN_NUMBERS
    assert numbers_of_the_driver(True) == OWN_NUMBERS


def test_a_worker_is_left_behind_when_its_launcher_is_killed(
    family: Callable[..., Family],
) -> None:
    members = family()
    before = describe(members.worker)
    assert before is not None
    assert (before.engine, before.role, before.left_behind) == ("vllm", "Worker_TP0", False)
    assert members.worker not in {row.pid for row in left_behind()}
    members.kill_launcher()
    after = describe(members.worker)
    assert after is not None
    assert after.left_behind is True
    assert after.why == f"its parent is {members.reaper.pid} (sleep), which starts no engine: " + (
        "its own has ended"
    )
    assert members.worker in {row.pid for row in left_behind()}
    assert psutil.pid_exists(members.worker)


def test_a_child_of_a_process_left_behind_is_left_behind(family: Callable[..., Family]) -> None:
    """An engine core whose launcher is gone still is the parent of its workers."""
    core = (
        "import subprocess, sys, time\n"
        f"worker = subprocess.Popen(['sglang::scheduler_TP1', '-c', {SLEEP!r}], "
        f"executable={sys.executable!r})\n"
        "print('READY', worker.pid, flush=True)\ntime.sleep(60)\n"
    )
    members = family(core, title="VLLM::EngineCore_DP0")
    (worker,) = psutil.Process(members.worker).children()
    for _ in range(500):
        if worker.cmdline()[:1] == ["sglang::scheduler_TP1"]:
            break
        time.sleep(0.01)
    try:
        row = describe(worker.pid)
        assert row is not None
        assert (row.engine, row.role, row.left_behind) == ("sglang", "scheduler_TP1", False)
        members.kill_launcher()
        row = describe(worker.pid)
        assert row is not None
        assert row.left_behind is True
        assert (row.why or "").startswith(f"the parent of {members.worker} is ")
    finally:
        worker.kill()


def test_a_record_names_the_parent_that_has_ended(
    family: Callable[..., Family], parent: Path
) -> None:
    """The parent now is a Python program, which could have started it: the record knows better."""
    members = family()
    run_dir = record(parent, members.worker, ppid=1 << 22, wall=time.time())
    row = describe(members.worker)
    assert row is not None
    assert (row.run_dir, row.left_behind) == (str(run_dir), True)
    assert row.why == f"its parent, {1 << 22}, has ended"
    record(parent, members.worker, ppid=members.launcher, wall=time.time())
    row = describe(members.worker)
    assert row is not None
    assert (row.run_dir, row.left_behind) == (str(run_dir), False)


def test_a_record_of_an_earlier_process_of_that_number_is_not_its(
    family: Callable[..., Family], parent: Path
) -> None:
    members = family()
    record(parent, members.worker, ppid=1 << 22, wall=time.time() - 3600)
    row = describe(members.worker)
    assert row is not None
    assert (row.run_dir, row.left_behind) == (None, False)


def test_a_program_of_the_user_is_not_left_behind(
    family: Callable[..., Family], parent: Path
) -> None:
    """``nohup python serve.py &``: its shell may end, also where memprof recorded it as a worker."""
    members = family(title="python3")
    members.kill_launcher()
    record(parent, members.worker, ppid=members.launcher, wall=time.time())
    row = describe(members.worker)
    assert row is not None
    assert (row.role, row.left_behind) == ("worker", None)
    assert members.worker not in {row.pid for row in left_behind()}


def test_the_title_is_the_engines(family: Callable[..., Family]) -> None:
    assert psutil.Process(family().worker).cmdline()[0] == TITLE
