"""The processes of the engine: the living, the dead and how they died, and the ending of the rest.

Runs in the launcher. Processes become known from the engine's events and by walking the launcher's
descendants; each is known by its id and its start time, never by its name, so that a reused id is
never signalled. Linux only.

How a process died is only told to its parent. But for the moment between its death and its parent's
``wait`` it is a zombie whose status stands in ``/proc``; a pidfd wakes us in that moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_memprof.launch.signals import signal_name

#: Children of the launcher that are not the engine's; their starter collects them.
OWN_CHILDREN: set[int] = set()

_PR_SET_CHILD_SUBREAPER = 36
_CLOCK_SLACK_S = 5.0  # the time of boot is known to a second, and clocks are adjusted
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcStat:
    """What ``/proc/<pid>/stat`` says. (proc(5))"""

    state: str  # Z: dead, not yet waited for
    ppid: int
    start_ticks: int  # since boot; with the pid it names a process for good
    wait_status: int  # as wait(2) gives it; only meaningful for a zombie


def read_stat(pid: int) -> ProcStat | None:
    """Read the state of a process; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return ProcStat(
        fields[0], int(fields[1]), int(fields[19]), int(fields[49]) if len(fields) > 49 else 0
    )


@dataclass(frozen=True)
class Death:
    """One process that is gone.

    ``signal`` and ``exit_code`` are both None where nobody could say how.
    """

    pid: int
    t_ns: int  # CLOCK_MONOTONIC when noticed
    signal: int | None = None
    exit_code: int | None = None

    def describe(self) -> str:
        """``was killed by SIGKILL``, ``exited with status 1``, ``vanished``."""
        if self.signal is not None:
            return f"was killed by {signal_name(self.signal)}"
        if self.exit_code is not None:
            return f"exited with status {self.exit_code}"
        return "vanished"

    @property
    def known(self) -> bool:
        """Return True when the way it died could be read."""
        return self.signal is not None or self.exit_code is not None

    @property
    def looks_orderly(self) -> bool:
        """Ended by itself without complaint, or by its parent's SIGTERM."""
        return self.exit_code == 0 or self.signal in (signal.SIGTERM, signal.SIGINT)


def _death(pid: int, stat: ProcStat | None) -> Death:
    now = time.monotonic_ns()
    if stat is None or stat.state not in "ZX":
        return Death(pid, now)
    status = stat.wait_status
    if os.WIFSIGNALED(status):
        return Death(pid, now, signal=os.WTERMSIG(status))
    return Death(pid, now, exit_code=os.WEXITSTATUS(status))


class ProcessWatch:
    """The engine's processes. Call ``close`` when done.

    Args:
        root_pid: the engine's main process, a child of this one. Its own death is the caller's to
            notice.
    """

    def __init__(self, root_pid: int) -> None:
        self._root_pid = root_pid
        self._alive: dict[int, int] = {}  # pid -> start_ticks
        self._dead: dict[int, int] = {}  # the same, until the kernel has forgotten them
        self._deaths: list[Death] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pidfds: dict[int, int] = {}  # fd -> pid
        self._poller = select.poll()
        # A poll under way does not see what is registered meanwhile: this pipe wakes it.
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, select.POLLIN)
        self.track(root_pid)
        self._thread = threading.Thread(
            target=self._wait_for_deaths, name="memprof-watch", daemon=True
        )
        self._thread.start()

    def track(self, pid: int, started_before: float | None = None) -> bool:
        """Make a process known.

        Args:
            pid: its id.
            started_before: ``time.time()`` at which it surely existed already; a process of this id
                that started later is another one, and ours is dead.

        Returns:
            True when it is new; a new one that is dead already counts as a death.
        """
        with self._lock:
            stat = read_stat(pid)
            if stat is not None and stat.start_ticks in (self._alive.get(pid), self._dead.get(pid)):
                return False
            if stat is not None and started_before is not None:
                started_s = psutil.boot_time() + stat.start_ticks / _CLOCK_TICKS
                if started_s > started_before + _CLOCK_SLACK_S:
                    stat = None
            if stat is None or stat.state in "ZX":
                if pid not in self._dead and pid not in self._alive:
                    self._deaths.append(_death(pid, stat))
                    self._dead[pid] = -1 if stat is None else stat.start_ticks
                return True
            self._alive[pid] = stat.start_ticks
            with contextlib.suppress(OSError, AttributeError):  # no pidfd: polled in refresh
                fd = os.pidfd_open(pid)
                self._pidfds[fd] = pid
                self._poller.register(fd, select.POLLIN)
                os.write(self._wake_write, b"x")
            return True

    def walk(self) -> None:
        """Make all descendants of this process and of the main one known, also those whose parents
        died (see ``adopt_orphans``); the launcher's own children and theirs are not the
        engine's."""
        own = set(OWN_CHILDREN)
        for root in (os.getpid(), self._root_pid):
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(root).children(recursive=True):  # parents first
                    if child.pid in own or child.ppid() in own:
                        own.add(child.pid)
                    else:
                        self.track(child.pid)

    def refresh(self) -> list[Death]:
        """Return the deaths noticed since the last call, in the order in which they were
        noticed."""
        with self._lock:
            for pid, start_ticks in list(self._alive.items()):
                stat = read_stat(pid)
                if stat is None or stat.state in "ZX" or stat.start_ticks != start_ticks:
                    self._note_death(pid, stat)
            deaths, self._deaths = self._deaths, []
            dead = dict(self._dead)
        for pid, start_ticks in dead.items():  # those that this process adopted are collected
            stat = read_stat(pid)
            if stat is not None and stat.start_ticks == start_ticks:
                if stat.ppid != os.getpid() or pid == self._root_pid:
                    continue  # its parent has not collected it yet
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            with self._lock:
                self._dead.pop(pid, None)
        return deaths

    def living(self) -> list[int]:
        """Return the known processes that still run, the main process included."""
        deaths = self.refresh()  # they stay for the next one
        with self._lock:
            self._deaths = deaths + self._deaths
            return sorted(self._alive)

    def signal(self, pids: Iterable[int], number: int) -> None:
        """Signal those processes, each only while it is still the one that was known."""
        for pid in pids:
            stat = read_stat(pid)
            if (
                stat is not None
                and stat.state not in "ZX"
                and stat.start_ticks == self._alive.get(pid)
            ):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")
        self._thread.join(1.0)
        with self._lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            for fd in self._pidfds:
                os.close(fd)
            self._pidfds.clear()

    def _wait_for_deaths(self) -> None:
        while True:
            ready = self._poller.poll()
            if self._closed.is_set():
                return
            for fd, _ in ready:
                if fd == self._wake_read:
                    os.read(fd, 4096)
                    continue
                pid = self._pidfds.get(fd)
                stat = None if pid is None else read_stat(pid)  # its parent is about to collect it
                with self._lock:
                    if pid is not None and pid in self._alive:
                        self._note_death(pid, stat)
                    elif pid is not None:
                        self._forget_pidfd(pid)

    def _note_death(self, pid: int, stat: ProcStat | None) -> None:
        """The lock is held."""
        known = self._alive.pop(pid)
        self._deaths.append(
            _death(pid, stat if stat is not None and stat.start_ticks == known else None)
        )
        self._dead[pid] = known
        self._forget_pidfd(pid)

    def _forget_pidfd(self, pid: int) -> None:
        for fd in [fd for fd, owner in self._pidfds.items() if owner == pid]:
            self._poller.unregister(fd)
            del self._pidfds[fd]
            os.close(fd)


def adopt_orphans() -> None:
    """Let processes whose parents die become children of this one, so that none slips out of sight.

    (prctl(2))
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True)
class EndingStep:
    """One step of an ending: after so many seconds in the step before, do this."""

    after_s: float
    what: str  # for the user, e.g. "SIGTERM to all its processes"
    action: Callable[[], None]


class Ending:
    """The engine is to end: steps of growing force, each after a time of patience, each to be
    hastened.

    Args:
        cause: why, for messages.
        steps: in order.
        now_s: ``time.monotonic()``.
    """

    def __init__(self, cause: str, steps: list[EndingStep], now_s: float) -> None:
        self.cause = cause
        self._steps = list(steps)
        self._since_s = now_s
        self.forced = False  # a step was taken

    @property
    def exhausted(self) -> bool:
        return not self._steps

    def advance(self, now_s: float) -> str | None:
        """Take the next step if it is due; return what was done, or None."""
        if not self._steps or now_s - self._since_s < self._steps[0].after_s:
            return None
        return self.hasten(now_s)

    def hasten(self, now_s: float) -> str | None:
        """Take the next step now."""
        if not self._steps:
            return None
        step = self._steps.pop(0)
        step.action()
        self.forced = True
        self._since_s = now_s
        return step.what
