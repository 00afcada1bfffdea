"""Follow a run that another process records: its folder is read, nothing of it is changed.

Events enter as they are written; a view gets what is known. The run goes on whatever happens here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from vllm_memprof.errors import RunRecordError
from vllm_memprof.launch.live import View
from vllm_memprof.launch.progress import EngineProgress, RankBudget
from vllm_memprof.record.host import host_name
from vllm_memprof.record.loader import load_info
from vllm_memprof.record.tail import EventTail
from vllm_memprof.text import join, text

_TICK_S = 0.3
#: Between two looks at whether the run is still recorded.
_LOOK_S = 1.0


class Attached:
    """A run folder that is followed.

    Args:
        run_dir: the folder.
        read_budgets: returns what accounting says of its ranks; called when the engine is ready.

    Raises:
        RunRecordError: there is no such folder, or it is no run folder.
    """

    def __init__(self, run_dir: Path, read_budgets: Callable[[], Iterable[RankBudget]]) -> None:
        self.run_dir = run_dir
        self.info = load_info(run_dir)
        self.progress = EngineProgress()
        self._tail = EventTail(run_dir)
        self._read_budgets = read_budgets
        self.read()

    def read(self) -> None:
        """Take in all events that have been written since."""
        while events := self._tail.poll():
            for file, event in events:
                self.progress.fold(file, event)
        if not self.progress.serves and self.progress.ready_at(self.info) is not None:
            self.progress.serve(self._read_budgets())

    def clock(self) -> int:
        """Return CLOCK_MONOTONIC of the run: of another host, or after its end, its last event."""
        if self.info.status == "running" and self.info.host == host_name():
            return time.monotonic_ns()
        times = [process.last_t_ns for process in self.progress.processes]
        return max(times, default=self.info.start_t_ns or 0)

    def ended(self) -> str | None:
        """Return how the run ended, as a sentence; None while it is recorded, or may be."""
        with contextlib.suppress(RunRecordError):  # the folder may be gone, or be written just now
            self.info = load_info(self.run_dir)
        command = f"memprof report {self.run_dir}"
        if self.info.status == "running":
            return None
        said = text("the run has ended: {status}", status=self.info.status)
        end = join(", ", [said, self.info.exit_reason])
        return text("{end}; all of it: {command}", end=end, command=command)

    def follow(self, view: View, left: Callable[[], bool]) -> str | None:
        """Show the run until it ends or the view is left.

        Args:
            view: what shows it.
            left: whether the user has left the view.

        Returns:
            How the run ended; None if it was left.
        """
        end, next_look_s = None, 0.0
        while end is None and not left():
            if time.monotonic() >= next_look_s:
                next_look_s = time.monotonic() + _LOOK_S
                end = self.ended()
            self.read()
            view.update(self.progress)
            time.sleep(_TICK_S)
        return end
