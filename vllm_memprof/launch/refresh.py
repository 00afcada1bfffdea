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
from collections.abc import Callable, Iterable, Sequence

from vllm_memprof.launch.live import View
from vllm_memprof.launch.progress import EngineProgress
from vllm_memprof.launch.status import RankBudget
from vllm_memprof.launch.watch import OWN_CHILDREN

#: Seconds until the first one and between two, at least.
_EVERY_S = 120.0
#: Of the seconds that one took, until the next.
_REST = 30.0


class Refresher(View):
    """Gives views newer figures of the ranks.

    Args:
        command: prints a report as JSON.
        read: makes the figures of what it printed.
        views: that get them, in the thread that updates this one.
        every_s: seconds between two, at least.
        rest: of the seconds that one took, until the next, at least.
    """

    def __init__(
        self,
        command: Sequence[str],
        read: Callable[[bytes], list[RankBudget]],
        views: Iterable[View],
        every_s: float = _EVERY_S,
        rest: float = _REST,
    ) -> None:
        self._command, self._read, self._views = list(command), read, list(views)
        self._every_s, self._rest = every_s, rest
        self._found: list[RankBudget] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memprof-refresh", daemon=True)

    def serve(self, budgets: Iterable[RankBudget]) -> None:
        self._thread.start()

    def update(self, progress: EngineProgress, last_line: str = "") -> None:
        found, self._found = self._found, None
        if found:
            for view in self._views:
                view.serve(found)

    def close(self) -> None:
        self._closed.set()
        child = self._child
        if child is not None:
            with contextlib.suppress(OSError):
                child.kill()
        if self._thread.ident is not None:
            self._thread.join(2.0)

    def _run(self) -> None:
        rest_s = self._every_s
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
            rest_s = max(self._every_s, self._rest * (time.monotonic() - began_s))
