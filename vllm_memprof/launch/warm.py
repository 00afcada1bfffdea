"""Processes that have imported the engine, from the launcher's side: found, started, asked, ended.

The other side is ``engines.warm``, which says what a connection carries. A warm process belongs to
one user and one key: the interpreter, the sources of memprof, and the environment. Its socket is
named after both in Linux's abstract namespace: it cannot be left behind, two processes cannot have
the same name, and another user's is told by its owner. For plans on a simulated device alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_memprof.launch.watch import OWN_CHILDREN, read_stat
from vllm_memprof.record.schema import ENV_HOLD, TRAVELS
from vllm_memprof.sim.runtime import ENV_ALIKE, ENV_STATE, PACKAGE_DIR, STAMP
from vllm_memprof.socket_credentials import peer_of

#: Set to anything but 0: every plan is a process of its own from the start.
ENV_NO_WARM = "MEMPROF_NO_WARM"
MODULE = "vllm_memprof.engines.warm"
#: Seconds without a plan after which a warm process ends.
IDLE_S = 300
#: Warm processes of one user; one of an engine holds about a gigabyte.
MOST = 3

#: Variables of a run, which its fork gets.
_OF_A_RUN = (*TRAVELS, ENV_STATE, ENV_ALIKE, ENV_HOLD)
#: Variables of a terminal or a shell, which no import reads. Any other is part of the key.
_OF_A_SHELL = re.compile(
    r"_|SHLVL|PWD|OLDPWD|TERM|COLORTERM|COLUMNS|LINES|PS[0-9]|LS_COLORS|LESS\w*|HIST\w*|WINDOWID"
    r"|DISPLAY|STY|TMUX\w*|SSH_\w*|XDG_SESSION_\w*|GPG_TTY|PYTEST_CURRENT_TEST|MAIL|PROMPT_COMMAND"
)
_TICK_S = 0.05
#: Seconds that a fork may take to be there, the import of the engine included.
_START_S = 120.0
_LISTED = re.compile(r"@(memprof-warm-(\d+)-[0-9a-f]+)$")


class WarmChild:
    """The engine's main process, a fork of a warm one: what ``subprocess.Popen`` is for a cold one.

    Args:
        name: of the warm process's socket.
        connection: on which the request was sent.
    """

    pid: int

    def __init__(self, name: str, connection: socket.socket) -> None:
        self.name = name
        self.returncode: int | None = None
        self._connection, self._received = connection, b""

    def answer(self) -> dict[str, int] | None:
        """Return the next answer; None: it is not there yet.

        Raises:
            OSError: there will be none.
        """
        while b"\n" not in self._received:
            try:
                data = self._connection.recv(4096)
            except (BlockingIOError, TimeoutError):
                return None
            if not data:
                raise ConnectionResetError(f"{self.name} has ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        told: dict[str, int] = json.loads(line)
        return told

    def poll(self) -> int | None:
        """Return its status as ``subprocess`` counts, None while it runs.

        Where the warm process was killed nobody knows the status: that of SIGKILL.
        """
        if self.returncode is None:
            try:
                told = self.answer()
            except OSError:
                told = {"status": -signal.SIGKILL}
            if told is not None:
                self.returncode = told["status"]
                self._connection.close()
        return self.returncode

    def tell(self, at_end: Callable[[], None]) -> None:
        """Call it, in a thread, once there is something to ask ``poll`` for."""

        def wait() -> None:
            select.select([self._connection], [], [])
            at_end()

        threading.Thread(target=wait, daemon=True).start()

    def send_signal(self, number: int) -> None:
        """Signal it while it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class WarmProcess(NamedTuple):
    """A warm process of this user."""

    name: str  # of its socket
    pid: int


def start(
    command: Sequence[str],
    env: Mapping[str, str],
    output: int,
    interrupted: Callable[[], bool] = lambda: False,
) -> WarmChild | None:
    """Start the engine as a fork of a warm process, which is started where there is none.

    Args:
        command: the interpreter, its options, ``-m``, the driver, and the driver's arguments.
        env: the engine's environment.
        output: descriptor for all that it prints.
        interrupted: asked while waiting; then nothing is started.

    Returns:
        None where it cannot be done; the engine is to be started cold then.
    """
    place = command.index("-m")
    options, driver, arguments = command[1:place], command[place + 1], list(command[place + 2 :])
    imported = {name: value for name, value in env.items() if name not in _OF_A_RUN}
    name = name_of([command[0], *options, driver], imported)
    request = {"arguments": arguments, "env": dict(env), "folder": os.getcwd()}
    with contextlib.suppress(OSError):
        try:
            connection = _connect(name)
        except ConnectionRefusedError:
            connection = _begin(name, command[0], options, driver, imported)
        child, until_s = WarmChild(name, connection), time.monotonic() + _START_S
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            socket.send_fds(connection, [b" "], [output])
            connection.sendall(json.dumps(request).encode() + b"\n")
            connection.settimeout(_TICK_S)
            while not interrupted() and time.monotonic() <= until_s:
                if (told := child.answer()) is not None:
                    child.pid = told["pid"]
                    connection.setblocking(False)
                    stack.pop_all()
                    return child
    if interrupted():
        stop(name)
    return None


def name_of(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the name of the socket of a warm process, without the zero byte before it.

    Args:
        command: the interpreter, its options, the driver.
        env: variables that it is started with.
    """
    kept = {name: value for name, value in env.items() if not _OF_A_SHELL.fullmatch(name)}
    sources = [
        (str(path), stat.st_mtime_ns, stat.st_size)
        for path in sorted(PACKAGE_DIR.rglob("*"))
        if path.suffix in {".py", ".toml", ".json"}
        for stat in (path.stat(),)
    ]
    stamp = Path(command[0]).parent.parent / STAMP
    with contextlib.suppress(OSError):
        sources.append((str(stamp), stamp.stat().st_mtime_ns, 0))
    content = json.dumps([list(command), sorted(kept.items()), sources])
    return f"memprof-warm-{os.getuid()}-{hashlib.sha256(content.encode()).hexdigest()[:24]}"


def list_warm() -> list[WarmProcess]:
    """Return the warm processes of this user that listen. (/proc/net/unix)"""
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return []
    names = {
        found[1]
        for found in map(_LISTED.search, lines)
        if found is not None and int(found[2]) == os.getuid()
    }
    processes = []
    for name in sorted(names):
        with contextlib.suppress(OSError), _connect(name) as connection:
            processes.append(WarmProcess(name, peer_of(connection).pid))
    return processes


def stop(name: str) -> bool:
    """Ask a warm process to end once its plans have ended; return whether it was there."""
    with contextlib.suppress(OSError), _connect(name) as connection:
        connection.sendall(b'{"stop": true}\n')
        return True
    return False


def stop_all() -> list[WarmProcess]:
    """Ask every warm process of this user to end; return those that were there."""
    return [process for process in list_warm() if stop(process.name)]


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether warm processes may be used: on Linux, unless ``MEMPROF_NO_WARM`` is set."""
    return sys.platform == "linux" and environ.get(ENV_NO_WARM, "0") in ("", "0")


def _connect(name: str) -> socket.socket:
    """Return a connection to a warm process of this user.

    Raises:
        ConnectionRefusedError: nobody has this name.
        OSError: it cannot be reached, or another user has taken its name.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0{name}")
        if peer_of(connection).uid != os.getuid():
            raise PermissionError(f"{name} belongs to another user")
    except OSError:
        connection.close()
        raise
    return connection


def _begin(
    name: str, python: str, options: Sequence[str], driver: str, env: Mapping[str, str]
) -> socket.socket:
    """Start a warm process, and return a connection to it.

    The socket listens before the process is there: who connects meanwhile waits.

    Raises:
        OSError: it cannot be started.
    """
    # the oldest by their start: numbers of processes begin again
    running = sorted(list_warm(), key=lambda each: getattr(read_stat(each.pid), "start_ticks", 0))
    for first in running[: max(0, len(running) - MOST + 1)]:
        stop(first.name)
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(f"\0{name}")
        except OSError:  # somebody else was faster
            return _connect(name)
        listener.listen(64)
        command = [python, *options, "-m", MODULE, driver, "3", str(IDLE_S)]
        nowhere = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (0, 1, 2)]
        taken = [*nowhere, (os.POSIX_SPAWN_DUP2, listener.fileno(), 3)]
        OWN_CHILDREN.add(
            os.posix_spawn(python, command, dict(env), file_actions=taken, setsid=True)
        )
    return _connect(name)
