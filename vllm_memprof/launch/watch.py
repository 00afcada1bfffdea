"""The processes of the engine: the living, the dead and how they died.

Runs in the launcher. Processes become known from the engine's events and by walking the launcher's
descendants; each is known by its id and its start time, never by its name, so that a reused id is
never signalled. Linux only.

How a process died is only told to its parent. But for the moment between its death and its parent's
``wait`` it is a zombie whose status stands in ``/proc``; a pidfd wakes us in that moment, and since
Linux 6.15 tells the status afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from vllm_memprof.launch.signals import signal_name

#: Children of the launcher that are not the engine's; their starter collects them.
OWN_CHILDREN: set[int] = set()

_PR_SET_CHILD_SUBREAPER = 36
_GET_INFO, _INFO_EXIT = 0xC040FF0B, 1 << 3  # PIDFD_GET_INFO (include/uapi/linux/pidfd.h, 6.15)
_CLOCK_SLACK_S = 5.0  # the time of boot is known to a second, and clocks are adjusted
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class ProcStat(NamedTuple):
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
    return ProcStat(fields[0], int(fields[1]), int(fields[19]), int(fields[49]))


@dataclass(frozen=True)
class Death:
    """One process that is gone."""

    pid: int
    t_ns: int  # CLOCK_MONOTONIC when noticed
    code: int | None = None  # as ``subprocess`` counts it; None: nobody could say

    def describe(self) -> str:
        """``was killed by SIGKILL``, ``exited with status 1``, ``vanished``."""
        if self.code is None:
            return "vanished"
        if self.killed:
            return f"was killed by {signal_name(-self.code)}"
        return f"exited with status {self.code}"

    @property
    def killed(self) -> bool:
        return self.code is not None and self.code < 0

    @property
    def looks_orderly(self) -> bool:
        """Ended by itself without complaint, or by its parent's SIGTERM."""
        return self.code in (0, -signal.SIGTERM, -signal.SIGINT)


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
        self._pidfds: dict[int, int] = {}  # pid -> fd
        self._poller = select.epoll()
        self._end = os.eventfd(0)
        self._poller.register(self._end, select.EPOLLIN)
        self.track(root_pid)
        self._thread = threading.Thread(
            target=self._wait_for_deaths, name="memprof-watch", daemon=True
        )
        self._thread.start()

    def track(self, pid: int, started_before: float | None = None) -> None:
        """Make a process known; a new one that is dead already counts as a death.

        Args:
            pid: its id.
            started_before: ``time.time()`` at which it surely existed already; a process of this id
                that started later is another one, and ours is dead.
        """
        with self._lock:
            stat = read_stat(pid)
            if stat is not None and stat.start_ticks in (self._alive.get(pid), self._dead.get(pid)):
                return
            if stat is not None and started_before is not None:
                started_s = psutil.boot_time() + stat.start_ticks / _CLOCK_TICKS
                if started_s > started_before + _CLOCK_SLACK_S:
                    stat = None
            if stat is not None and stat.state not in "ZX":
                self._alive[pid] = stat.start_ticks
                with contextlib.suppress(OSError):  # no pidfd: polled in refresh
                    self._pidfds[pid] = os.pidfd_open(pid)
                    self._poller.register(self._pidfds[pid], select.EPOLLIN)
            elif pid not in self._dead and pid not in self._alive:
                self._note_death(pid, stat, -1 if stat is None else stat.start_ticks)

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
            for pid in list(self._alive):
                self._note_if_dead(pid, read_stat(pid))
            for pid, start_ticks in list(self._dead.items()):
                stat = read_stat(pid)
                if stat is not None and stat.start_ticks == start_ticks:
                    if stat.ppid != os.getpid() or pid == self._root_pid:
                        continue  # its parent has not collected it yet
                    with contextlib.suppress(ChildProcessError):  # one that this process adopted
                        if os.waitpid(pid, os.WNOHANG) == (0, 0):
                            continue  # threads of it are ending
                del self._dead[pid]
            deaths, self._deaths = self._deaths, []
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
            known = stat is not None and stat.start_ticks == self._alive.get(pid)
            if stat is not None and known and stat.state not in "ZX":
                with contextlib.suppress(OSError):
                    os.kill(pid, number)

    def close(self) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join(1.0)
        with self._lock:
            self._poller.close()
            for fd in (self._end, *self._pidfds.values()):
                os.close(fd)
            self._pidfds.clear()

    def _wait_for_deaths(self) -> None:
        while True:
            ready = [fd for fd, _ in self._poller.poll()]
            if self._end in ready:
                return
            # their parents are about to collect them: before the lock can be had
            found = [(pid, read_stat(pid)) for pid, fd in list(self._pidfds.items()) if fd in ready]
            with self._lock:
                for pid, stat in found:
                    self._note_if_dead(pid, stat)

    def _note_if_dead(self, pid: int, stat: ProcStat | None) -> None:
        """The lock is held."""
        ticks = self._alive.get(pid)
        if ticks is not None and (stat is None or stat.state in "ZX" or stat.start_ticks != ticks):
            self._note_death(pid, stat, ticks)

    def _note_death(self, pid: int, stat: ProcStat | None, start_ticks: int) -> None:
        """The lock is held."""
        self._alive.pop(pid, None)
        status = None
        if stat is not None and stat.state in "ZX" and stat.start_ticks == start_ticks:
            status = stat.wait_status
        if (fd := self._pidfds.pop(pid, None)) is not None:
            status = _collected(fd) if status is None else status
            os.close(fd)  # the poller forgets it
        code = None if status is None else os.waitstatus_to_exitcode(status)
        self._deaths.append(Death(pid, time.monotonic_ns(), code))
        self._dead[pid] = start_ticks


def _collected(pidfd: int) -> int | None:
    """Return the wait status of a process that its parent has collected; None: the kernel keeps
    none."""
    info = bytearray(struct.pack("Q56x", _INFO_EXIT))
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _GET_INFO, info)
        mask, status = struct.unpack("Q52xi", info)
        return status if mask & _INFO_EXIT else None
    return None


def adopt_orphans() -> None:
    """Let processes whose parents die become children of this one, so that none slips out of sight.

    (prctl(2))
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
