"""What accounting says of a run that serves, made again now and then by a process of its own.

A report of a long run takes seconds and memory: neither is to be had from the launcher's loop. The
process runs at low priority, and at most a thirtieth of the time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from vllm_memprof.launch.live import View
from vllm_memprof.launch.progress import EngineProgress, RankBudget
from vllm_memprof.launch.watch import OWN_CHILDREN

#: Seconds until the first one and between two, at least.
_EVERY_S = 120.0
#: Of the seconds that one took, until the next, at least.
_REST = 30.0


class Refresher(View):
    """Gives the state of a run newer figures of the ranks, in the thread that updates this view.

    Args:
        command: prints a report as JSON.
        read: makes the figures of what it printed.
    """

    def __init__(self, command: Sequence[str], read: Callable[[bytes], list[RankBudget]]) -> None:
        self._command, self._read = list(command), read
        self._found: list[RankBudget] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memprof-refresh", daemon=True)

    def update(self, progress: EngineProgress) -> None:
        if progress.serves and self._thread.ident is None:
            self._thread.start()
        found, self._found = self._found, None
        if found:
            progress.serve(found)

    def close(self) -> None:
        self._closed.set()
        if self._child is not None:
            self._child.kill()
        if self._thread.ident is not None:
            self._thread.join(2.0)

    def _run(self) -> None:
        rest_s = _EVERY_S
        while not self._closed.wait(rest_s):
            began_s = time.monotonic()
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self._child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                pid = self._child.pid
                OWN_CHILDREN.add(pid)
                try:
                    with contextlib.suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, pid, 15)
                    printed, _ = self._child.communicate()
                finally:
                    OWN_CHILDREN.discard(pid)
                self._found = self._read(printed if self._child.returncode == 0 else b"")
            rest_s = max(_EVERY_S, _REST * (time.monotonic() - began_s))
