"""A worker of an engine whose launcher has ended: real processes, under titles as engines set them.

A reaper (``sleep``, made the subreaper of its descendants) starts a launcher (Python), which starts
a worker under the title ``VLLM::Worker_TP0``. Killing the launcher leaves the worker to the reaper,
on any machine, whatever its process 1 is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

TITLE = "VLLM::Worker_TP0"
_REAPER = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
os.execvp("sleep", ["sleep", "120"])
"""
_LAUNCHER = """
import os, subprocess, sys, time
worker = subprocess.Popen([sys.argv[1], "-c", sys.argv[2]], executable=sys.executable)
print("FAMILY", os.getpid(), worker.pid, flush=True)
time.sleep(120)
"""
#: Holds nothing; says so.
IDLE = "import sys, time; print('READY', flush=True); time.sleep(120)"


@dataclass
class Family:
    """A reaper, a launcher and a worker."""

    reaper: subprocess.Popen[str]
    launcher: int
    worker: int

    def kill_launcher(self) -> None:
        """End the launcher by SIGKILL, and wait until the worker has its new parent."""
        os.kill(self.launcher, signal.SIGKILL)
        worker = psutil.Process(self.worker)
        for _ in range(500):
            if worker.ppid() != self.launcher:
                return
            time.sleep(0.01)
        raise AssertionError("the worker kept its parent")

    def close(self) -> None:
        for pid in (self.worker, self.launcher):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.reaper.kill()
        self.reaper.wait(30)
        if self.reaper.stdout is not None:
            self.reaper.stdout.close()


def start_family(
    code: str = IDLE,
    ready: str = "READY",
    env: Mapping[str, str] | None = None,
    title: str = TITLE,
) -> Family:
    """Start all three; the worker runs ``code``, which prints a line that begins with ``ready``."""
    reaper = subprocess.Popen(
        [sys.executable, "-c", _REAPER, _LAUNCHER, title, code],
        env=None if env is None else dict(env),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reaper.stdout is not None
    found: dict[str, str] = {}
    while len(found) < 2:
        line = reaper.stdout.readline()
        assert line, "a process ended before it was ready"
        found |= {word: line for word in ("FAMILY", ready) if line.startswith(word)}
    _, launcher, worker = found["FAMILY"].split()
    return Family(reaper, int(launcher), int(worker))
