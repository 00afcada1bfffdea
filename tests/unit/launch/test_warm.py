"""Warm processes, with a driver that imports no engine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from vllm_memprof.engines import engine_row
from vllm_memprof.launch import warm
from vllm_memprof.launch.prepare import can_fork
from vllm_memprof.launch.request import LaunchRequest, parse_device
from vllm_memprof.launch.watch import ProcStat

ROOT = Path(__file__).parents[3]
DRIVER = "tests.unit.launch.fake_driver"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")


def until(holds: Callable[[], object], seconds: float = 10.0) -> None:
    end_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.02)


class Asked:
    """One plan of the fake driver, and what it printed."""

    def __init__(self, *arguments: str, env: dict[str, str]) -> None:
        self.read, write = os.pipe()
        command = [sys.executable, "-m", DRIVER, *arguments]
        found = warm.start(command, env, write)
        os.close(write)
        assert found is not None
        self.child = found

    def ends(self) -> tuple[int, str]:
        until(lambda: self.child.poll() is not None)
        assert self.child.returncode is not None
        with os.fdopen(self.read) as stream:
            return self.child.returncode, stream.read()


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment of this test alone; its warm processes are gone afterwards."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OF_THE_TEST": str(tmp_path)}
    yield variables
    name = warm.name_of([sys.executable, DRIVER], variables)
    for process in warm.list_warm():
        if process.name == name:
            os.kill(process.pid, signal.SIGKILL)


def server_of(asked: Asked) -> psutil.Process:
    pid = next(each.pid for each in warm.list_warm() if each.name == asked.child.name)
    return psutil.Process(pid)


def test_forks_have_the_environment_folder_output_and_session_of_their_plan(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env["SAID"] = "a"
    asked = Asked("say", env={**env, "MEMPROF_RUN_DIR": "of this plan"})
    status, printed = asked.ends()
    assert status == 0
    first, told, error = printed.splitlines()
    assert (first, error) == ("imported once", "to stderr")
    assert f'"folder": "{tmp_path}"' in told
    assert '"env": "a"' in told
    assert f'"session": {asked.child.pid}' in told
    again = Asked("say", env={**env, "MEMPROF_RUN_DIR": "of another"})
    assert again.child.name == asked.child.name
    assert again.child.pid != asked.child.pid
    server = server_of(again)
    assert again.ends()[1].startswith("imported once\n")
    assert server.is_running()


@pytest.mark.parametrize(
    ("arguments", "status", "printed"),
    [
        (("fail", "3"), 3, ""),
        (("raise",), 1, "RuntimeError: of the driver"),
        (("die",), -signal.SIGKILL, ""),
    ],
)
def test_the_end_of_a_fork_is_told(
    env: dict[str, str], arguments: tuple[str, ...], status: int, printed: str
) -> None:
    found = Asked(*arguments, env=env).ends()
    assert found[0] == status
    assert printed in found[1]


@pytest.mark.parametrize("politely", [["politely"], pytest.param([], marks=pytest.mark.full)])
def test_what_a_plan_leaves_behind_ends(
    env: dict[str, str], tmp_path: Path, politely: list[str]
) -> None:
    """As workers that their engine did not wait for; one that ignores SIGTERM is killed."""
    started = time.monotonic()
    asked = Asked("leave", str(tmp_path / "pid"), *politely, env=env)
    status, _ = asked.ends()
    assert status == 0
    left = int((tmp_path / "pid").read_text())
    until(lambda: not psutil.pid_exists(left), 5 if politely else 40)
    assert (time.monotonic() - started > 25) is not bool(politely)


def test_a_warm_process_without_a_plan_imports_what_the_first_did_not_wait_for(
    env: dict[str, str],
) -> None:
    printed = Asked("say", env=env).ends()[1]
    assert '"idle": false' in printed
    end_s = time.monotonic() + 30
    while '"idle": false' in (printed := Asked("say", env=env).ends()[1]):
        assert time.monotonic() < end_s
        time.sleep(1.5)  # a pause in which it has nothing to do
    assert "imported when idle" not in printed  # of no plan


def test_the_end_of_a_fork_wakes_who_waits_for_it(env: dict[str, str]) -> None:
    asked, ended = Asked("fail", "3", env=env), threading.Event()
    asked.child.tell(ended.set)
    assert ended.wait(10)
    assert asked.child.poll() == 3


def test_signals_reach_the_fork(env: dict[str, str], tmp_path: Path) -> None:
    asked = Asked("wait", str(tmp_path / "pid"), env=env)
    until((tmp_path / "pid").exists)
    asked.child.send_signal(signal.SIGINT)
    assert asked.ends()[0] == -signal.SIGINT
    asked.child.send_signal(signal.SIGINT)  # gone: nobody else gets it


def test_a_client_that_is_killed_takes_its_plan_with_it(
    env: dict[str, str], tmp_path: Path
) -> None:
    code = (
        "import os, sys, time\n"
        "from vllm_memprof.launch import warm\n"
        f"plan = warm.start([sys.executable, '-m', {DRIVER!r}, 'wait', sys.argv[1]], os.environ, 1)\n"
        "time.sleep(60)\n"
    )
    file = tmp_path / "pid"
    client = subprocess.Popen(
        [sys.executable, "-c", code, str(file)], env=env, stdout=subprocess.DEVNULL
    )
    until(lambda: file.exists() and file.read_text())
    plan = psutil.Process(int(file.read_text()))
    server = psutil.Process(plan.ppid())
    client.kill()
    client.wait()
    until(lambda: not plan.is_running())
    assert server.is_running()


def test_a_warm_process_that_is_killed_leaves_nothing(env: dict[str, str], tmp_path: Path) -> None:
    asked = Asked("wait", str(tmp_path / "pid"), env=env)
    until((tmp_path / "pid").exists)
    plan, server = psutil.Process(asked.child.pid), server_of(asked)
    server.kill()
    assert asked.ends()[0] == -signal.SIGKILL
    until(lambda: not plan.is_running() or plan.status() == psutil.STATUS_ZOMBIE)
    assert asked.child.name not in {each.name for each in warm.list_warm()}
    again = Asked("say", env=env)  # another one takes the name
    assert again.child.name == asked.child.name
    assert again.ends()[0] == 0


def test_stops_when_told_once_its_plans_have_ended(env: dict[str, str], tmp_path: Path) -> None:
    asked = Asked("wait", str(tmp_path / "pid"), env=env)
    until((tmp_path / "pid").exists)
    server = server_of(asked)
    assert warm.stop(asked.child.name)
    time.sleep(0.1)
    assert server.is_running()
    assert asked.child.poll() is None
    asked.child.send_signal(signal.SIGTERM)
    assert asked.ends()[0] == -signal.SIGTERM
    until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    assert not warm.stop(asked.child.name)


def test_ends_by_itself_when_idle(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "IDLE_S", 1)
    asked = Asked("say", env=env)
    server = server_of(asked)
    asked.ends()
    until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)


def test_an_interrupted_wait_leaves_no_warm_process(env: dict[str, str]) -> None:
    command = [sys.executable, "-m", DRIVER, "say"]
    name = warm.name_of([command[0], DRIVER], env)
    assert warm.start(command, env, 1, lambda: True) is None
    until(lambda: name not in {each.name for each in warm.list_warm()})


def test_an_import_that_fails_is_left_to_the_cold_start(env: dict[str, str]) -> None:
    assert warm.start([sys.executable, "-m", "tests.no_such_driver", "say"], env, 1) is None


def test_the_name_follows_what_an_import_may_read() -> None:
    def name(**env: str) -> str:
        return warm.name_of(["python", "driver"], {"PATH": "/bin", **env})

    assert name(SHLVL="2", TERM="x", SSH_CLIENT="y", _="z") == name()
    assert name(VLLM_USE_V1="1") != name()
    assert name(ANYTHING="1") != name()
    assert warm.name_of(["other", "driver"], {"PATH": "/bin"}) != name()


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
def test_two_users_share_none(env: dict[str, str]) -> None:
    asked = Asked("say", env=env)
    assert asked.ends()[0] == 0

    def answer_as_nobody(name: str) -> int:
        """Return how many bytes a process of another user gets for a request."""
        pid = os.fork()
        if pid == 0:
            got = 99
            with contextlib.suppress(BaseException):
                os.setuid(65534)
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(5)
                connection.connect(f"\0{name}")
                got = len(connection.recv(100))
            os._exit(got)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert answer_as_nobody(asked.child.name) == 0

    taken, held = f"memprof-warm-{os.getuid()}-0123abcd", os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setuid(65534)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"\0{taken}")
            listener.listen()
            os.write(held[1], b"x")
            time.sleep(30)
        os._exit(0)
    try:
        assert os.read(held[0], 1) == b"x"
        assert taken not in {each.name for each in warm.list_warm()}
        with pytest.raises(PermissionError):
            warm._connect(taken)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_the_oldest_ends_where_there_are_as_many_as_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its start: the number of a process may be lower than that of an older one."""
    there = [warm.WarmProcess(name, pid) for name, pid in (("new", 7), ("mid", 80), ("old", 90))]
    ticks, ended = {7: 300, 80: 200, 90: 100}, list[str]()
    monkeypatch.setattr(warm, "list_warm", lambda: there)
    monkeypatch.setattr(warm, "read_stat", lambda pid: ProcStat("S", 1, ticks[pid], 0))
    monkeypatch.setattr(warm, "stop", ended.append)
    monkeypatch.setattr(warm.os, "posix_spawn", lambda *_, **__: 1)
    monkeypatch.setattr(warm, "OWN_CHILDREN", set())
    with contextlib.suppress(OSError):
        warm._begin("memprof-warm-test-oldest", sys.executable, [], "driver", {}).close()
    assert ended == ["old"]


@pytest.mark.parametrize(
    ("mode", "until", "device", "version", "engine", "forks"),
    [
        ("plan", "kv", "sim:910b", "0.23.0", "vllm", True),
        ("plan", "ready", "sim:910b", "0.23.0", "vllm", True),
        ("plan", "ready", "sim:910b", "0.13.0", "vllm", False),  # its import opens a device
        ("plan", "ready", "npu", "0.23.0", "vllm", False),
        ("offline", "kv", "sim:910b", "0.23.0", "vllm", False),
        ("plan", "kv", "sim:910b", "0.5.23", "sglang", False),
        ("plan", "kv", "sim:910b", None, "vllm", False),
    ],
)
def test_which_engines_are_forks(
    mode: str, until: str, device: str, version: str | None, engine: str, forks: bool
) -> None:
    request = LaunchRequest(mode, "m", device=parse_device(device), until=until, engine=engine)
    assert can_fork(request, engine_row(engine), version) == forks
