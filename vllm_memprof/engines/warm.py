"""A process that has imported the engine, and forks for each plan.

Importing the engine is most of a small plan's time. This process does it once, opens no device, and
waits on a Unix socket; for each request it forks, and the fork runs the driver as a process of its
own would: with the request's environment, folder and output, in a session of its own. One thread;
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

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm_memprof.socket_credentials import peer_of

#: Seconds that a plan has to end by itself after its client went away.
_ENDS_WITHIN_S = 30.0
_TICK_S = 1.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MOST_BYTES = 1 << 24


@dataclass
class _Plan:
    """One connection."""

    connection: socket.socket
    received: bytes = b""
    output: int | None = None
    pid: int | None = None
    kill_at_s: float | None = None


class Server:
    """Takes requests until there are none.

    Args:
        listener: bound and listening.
        idle_s: seconds without a plan after which it ends.
        run: the driver's ``main_in_fork``.
        printed: what the import printed, a file; every plan's output begins with it.
    """

    def __init__(
        self,
        listener: socket.socket,
        idle_s: float,
        run: Callable[[Sequence[str]], int],
        printed: int,
    ) -> None:
        self._listener, self._idle_s, self._run, self._printed = listener, idle_s, run, printed
        self._plans: list[_Plan] = []
        self._stopping = False
        self._last_s = time.monotonic()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._wake, wake = socket.socketpair()
        for end in (self._wake, wake):
            end.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._own = (listener, self._wake, wake)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _ENDING:
            signal.signal(number, self._stop)

    def serve(self) -> None:
        """Serve until told to stop, or idle."""
        while not self._is_over():
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake:
                    with contextlib.suppress(OSError):
                        self._wake.recv(4096)
                else:
                    self._read(key.data)
            self._collect()
            self._end_the_forsaken()

    def _is_over(self) -> bool:
        if any(plan.pid is not None for plan in self._plans):
            self._last_s = time.monotonic()
            return False
        return self._stopping or time.monotonic() - self._last_s > self._idle_s

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if peer_of(connection).uid != os.getuid():
                connection.close()
                return
            connection.setblocking(False)
            plan = _Plan(connection)
            self._plans.append(plan)
            self._selector.register(connection, selectors.EVENT_READ, plan)

    def _read(self, plan: _Plan) -> None:
        """Take the request, or note that the client went away."""
        try:
            data, descriptors = _receive(plan.connection)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        for descriptor in descriptors:
            if plan.output is None:
                plan.output = descriptor
            else:
                os.close(descriptor)
        if not data:
            self._selector.unregister(plan.connection)
            if plan.pid is None:
                self._close(plan)
            else:
                _signal_group(plan.pid, signal.SIGTERM)
                plan.kill_at_s = time.monotonic() + _ENDS_WITHIN_S
            return
        plan.received += data
        if plan.pid is None and plan.received.endswith(b"\n"):
            self._take(plan)
        elif len(plan.received) > _MOST_BYTES:
            self._close(plan)

    def _take(self, plan: _Plan) -> None:
        try:
            request = json.loads(plan.received)
            plan.received = b""
            if request.get("stop"):
                self._stopping = True
                self._close(plan)
                return
            arguments, env, folder = request["arguments"], request["env"], request["folder"]
        except (ValueError, KeyError, AttributeError):
            self._close(plan)
            return
        if plan.output is None or self._stopping:
            self._close(plan)
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # a fork gets none before it is ready
        plan.pid = os.fork()
        if plan.pid == 0:
            self._become(plan, arguments, env, folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        os.close(plan.output)
        plan.output = None
        _answer(plan, pid=plan.pid)

    def _become(
        self, plan: _Plan, arguments: list[str], env: dict[str, str], folder: str
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
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            assert plan.output is not None
            os.dup2(plan.output, 1)
            os.dup2(plan.output, 2)
            os.close(plan.output)
            _repeat(self._printed)
            self._selector.close()
            for end in (*self._own, *(other.connection for other in self._plans)):
                end.close()
            os.environ.clear()
            os.environ.update(env)
            os.chdir(folder)
            random.seed()
            status = self._run(arguments)
        except SystemExit as error:
            status = _status_of(error)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(status)

    def _collect(self) -> None:
        """Collect every process that ended: plans, and what they left behind."""
        while True:
            try:
                pid, waited = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for plan in [plan for plan in self._plans if plan.pid == pid]:
                _answer(plan, status=os.waitstatus_to_exitcode(waited))
                self._close(plan)

    def _end_the_forsaken(self) -> None:
        for plan in self._plans:
            if plan.kill_at_s is not None and time.monotonic() > plan.kill_at_s:
                plan.kill_at_s = None
                assert plan.pid is not None
                _signal_group(plan.pid, signal.SIGKILL)

    def _close(self, plan: _Plan) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(plan.connection)
        plan.connection.close()
        if plan.output is not None:
            os.close(plan.output)
        self._plans.remove(plan)


def _repeat(printed: int) -> None:
    """Print what a file holds, from its beginning."""
    place = 0
    while chunk := os.pread(printed, 1 << 16, place):
        place += len(chunk)
        while chunk:
            chunk = chunk[os.write(1, chunk) :]


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return what has come, and descriptors that came with it."""
    descriptors = array.array("i")
    data, beside, _, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(4 * descriptors.itemsize))
    for level, kind, content in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(content) // descriptors.itemsize * descriptors.itemsize
            descriptors.frombytes(content[:whole])
    return data, list(descriptors)


def _answer(plan: _Plan, **answer: int) -> None:
    with contextlib.suppress(OSError):
        plan.connection.sendall(json.dumps(answer).encode() + b"\n")


def _signal_group(pid: int, number: int) -> None:
    """Signal a fork that was not collected yet, and its group where it has one already."""
    with contextlib.suppress(OSError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)


def _status_of(error: SystemExit) -> int:
    """Return the status with which the interpreter would end."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


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
    driver.import_engine()
    gc.collect()
    gc.freeze()
    gc.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    Server(listener, float(idle_s), driver.main_in_fork, printed).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
