"""A process that has imported the engine, or memprof, and forks for each plan.

The import is most of a small plan's time. This process does it once, opens no device, and waits on
a Unix socket; for each request it forks, and the fork runs the driver as a process of its own
would: with the request's environment, folder and output, in a session of its own. One thread;
nothing of one plan is left for the next.

A connection is one plan. The request is a line of JSON, ``arguments``, ``env`` and ``folder``, with
the descriptor of the output beside it. Answers are a line each: ``{"pid": 12}`` at the fork and
``{"status": 0}`` at its end, as ``subprocess`` counts. A client that goes away ends its plan.
``{"stop": true}`` ends this process once no plan is under way.

It ends by itself after its idle time. The socket has a name in Linux's abstract namespace, which
lives no longer than the process; it serves its own user alone.

    python -m vllm_memprof.engines.warm DRIVER DESCRIPTOR IDLE_SECONDS
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import wait
from typing import Any, NoReturn

from vllm_memprof.socket_credentials import peer_of

#: Seconds that a client has for its request, and a plan to end by itself after its client went
#: away.
_ASKS_WITHIN_S, _ENDS_WITHIN_S = 10.0, 30.0
#: How often deadlines are looked at; the end of a plan wakes the server.
_TICK_S = 1.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass
class _Plan:
    """A fork, and the connection of who asked for it."""

    pid: int
    connection: socket.socket
    kill_at_s: float = inf  # known once the client has gone away


class Server:
    """Takes requests until there are none.

    Args:
        listener: bound and listening.
        driver: the module.
        printed: what the import printed, a file; every plan's output begins with it.
    """

    def __init__(self, listener: socket.socket, driver: Any, printed: int) -> None:
        self._listener, self._driver = listener, driver
        self._printed = os.pread(printed, os.fstat(printed).st_size, 0)
        self._when_idle = getattr(driver, "import_when_idle", None)
        self._plans: list[_Plan] = []
        #: Process group of a plan that has ended -> when what is left of it is killed.
        self._left: dict[int, float] = {}
        self._stopping = False
        for number in _ENDING:
            signal.signal(number, self._stop)
        self._child_ended, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self, idle_s: float) -> None:
        """Serve until told to stop, or so many seconds without a plan."""
        last_s = time.monotonic()
        while (
            self._plans or self._left or not (self._stopping or time.monotonic() - last_s > idle_s)
        ):
            clients = {plan.connection: plan for plan in self._plans if plan.kill_at_s == inf}
            heard = wait([self._listener, self._child_ended, *clients], _TICK_S)
            if self._when_idle and not heard and not self._plans:
                self._when_idle = self._when_idle()
                gc.freeze()
            for ready in heard:
                if ready is self._listener:
                    self._accept()
                elif ready is self._child_ended:
                    os.read(self._child_ended, 1 << 16)
                else:  # a client says nothing more: it went away
                    plan = clients[ready]  # type: ignore[index]  # one of those that are waited for
                    _signal_group(plan.pid, signal.SIGTERM)
                    plan.kill_at_s = time.monotonic() + _ENDS_WITHIN_S
            self._collect()
            for plan in self._plans:
                last_s = time.monotonic()
                if last_s > plan.kill_at_s:
                    _signal_group(plan.pid, signal.SIGKILL)
            for group, kill_at_s in list(self._left.items()):
                if not _group_gets(group, 0):
                    del self._left[group]
                elif time.monotonic() > kill_at_s:
                    _group_gets(group, signal.SIGKILL)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _accept(self) -> None:
        """Take one request; what is none, and one of another user, gets no answer."""
        connection, _ = self._listener.accept()
        connection.settimeout(_ASKS_WITHIN_S)
        try:
            if peer_of(connection).uid != os.getuid():
                raise PermissionError
            asked, outputs, _, _ = socket.recv_fds(connection, 1 << 16, 1)
            while not asked.endswith(b"\n"):
                asked += connection.recv(1 << 16) or b"\n"
            request = json.loads(asked)
            self._stopping |= "stop" in request
            [output] = outputs
        except (OSError, ValueError):
            connection.close()
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # a fork gets none before it is ready
        pid = os.fork()
        self._plans.append(_Plan(pid, connection))
        if pid == 0:
            self._become(output, **request)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        os.close(output)
        _answer(connection, pid=pid)

    def _become(
        self, output: int, arguments: list[str], env: dict[str, str], folder: str
    ) -> NoReturn:
        """Be the process of this plan; never returns."""
        status = 1
        try:
            parent = os.getppid()
            os.setsid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for number in (*_ENDING, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.close(output)
            with open(1, "wb", closefd=False) as stdout:
                stdout.write(self._printed)
            for end in (self._listener, *(plan.connection for plan in self._plans)):
                end.close()
            os.environ.clear()
            os.environ.update(env)
            os.chdir(folder)
            random.seed()
            status = self._driver.main_in_fork(arguments)
        except SystemExit as error:  # as the interpreter would end
            said = error.code
            status = said if isinstance(said, int) else int(said is not None)
            if status and status is not said:
                print(said, file=sys.stderr)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            traceback.print_exc()
        finally:
            for stdio in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stdio.flush()
            os._exit(status)

    def _collect(self) -> None:
        """Collect every process that ended: plans, and what they left behind."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                for plan in [plan for plan in self._plans if plan.pid == ended[0]]:
                    _answer(plan.connection, status=os.waitstatus_to_exitcode(ended[1]))
                    plan.connection.close()
                    self._plans.remove(plan)
                    if _group_gets(plan.pid, signal.SIGTERM):  # forks that outlive it
                        self._left[plan.pid] = time.monotonic() + _ENDS_WITHIN_S


def _answer(connection: socket.socket, **answer: int) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _group_gets(group: int, number: int) -> bool:
    """Signal a process group; return whether it has any process."""
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True


def _signal_group(pid: int, number: int) -> None:
    """Signal a fork that was not collected yet, and its group where it has one already."""
    if not _group_gets(pid, number):
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def main(argv: Sequence[str]) -> int:
    """Import the driver's engine, and serve; returns the exit status."""
    name, descriptor, idle_s = argv
    os.chdir("/")
    listener = socket.socket(fileno=int(descriptor))
    listener.listen(64)  # once more: the kernel names the process that listened as the peer
    printed = os.memfd_create("memprof-warm")
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    gc.disable()
    driver: Any = importlib.import_module(name)
    driver.import_ahead()
    gc.freeze()  # without collecting: half a second for the little that an import leaves
    gc.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    Server(listener, driver, printed).serve(float(idle_s))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
