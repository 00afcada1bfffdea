"""The process of one plan: ``memprof plan`` in a group of its own, ended when its time is up.

``memprof plan`` has simulated devices of its own, and ends the engine's processes; this module ends
``memprof plan``: a signal to its main process is passed on to the engine, a second one hastens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from vllm_memprof.launch.engine import end_with_parent
from vllm_memprof.plans.plan_folder import OUTPUT_FILE, row_of
from vllm_memprof.plans.request import Plan, Task
from vllm_memprof.plans.rows import PlanRow

#: Seconds beyond the engine's own deadline, for the start and the end of ``memprof plan``.
GRACE_S = 90.0
#: Seconds between two signals to a plan that is to end; the last is SIGKILL.
_STEP_S = 5.0
#: Seconds between two looks at a plan under way.
TICK_S = 0.05


class PlanProcess:
    """A plan under way.

    Args:
        task: its request; the parent of its run folder exists.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.started_s = time.monotonic()
        self.ended: str | None = None  # why memprof ended it
        self._signals: list[int] = []
        self._next_s = 0.0
        run_dir = task.run_dir
        self._output = run_dir.parent / f"{run_dir.name}.{OUTPUT_FILE}"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                task.plan.command(run_dir),
                env=os.environ if task.environ is None else task.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
                preexec_fn=end_with_parent(),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_s

    def poll(self) -> bool:
        """Return True when it has ended; end it at its deadline, send the next signal."""
        if self._process.poll() is not None:
            return True
        limit_s = self.task.plan.timeout_s + GRACE_S
        if self.ended is None and self.seconds > limit_s:
            self.end(f"not ended within {limit_s:g} s")
        if self._signals and time.monotonic() >= self._next_s:
            number = self._signals.pop(0)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if number == signal.SIGKILL:  # the kernel tells the engine that its parent died
                    os.killpg(self._process.pid, number)
                else:
                    self._process.send_signal(number)
            self._next_s = time.monotonic() + _STEP_S
        return False

    def wait(self) -> None:
        """Return when it has ended."""
        while not self.poll():
            time.sleep(TICK_S)

    def end(self, why: str) -> None:
        """Ask it to end; called again, send the next signal at once."""
        if self.ended is None:
            self.ended = why
            self._signals = [signal.SIGINT, signal.SIGINT, signal.SIGINT, signal.SIGKILL]
        self._next_s = 0.0
        self.poll()

    def row(self) -> PlanRow:
        """Return its row, once it has ended; its output is kept in the run folder."""
        run_dir = self.task.run_dir
        row = row_of(self.task.plan, run_dir, self._process.returncode, self.ended)
        if run_dir.is_dir():
            self._output.replace(run_dir / OUTPUT_FILE)
        else:
            self._output.unlink(missing_ok=True)
        return row


def run_plan(plan: Plan, run_dir: Path, environ: Mapping[str, str] | None = None) -> PlanRow:
    """Make one plan. KeyboardInterrupt ends it and is raised again once it has ended."""
    process = PlanProcess(Task(0, plan, run_dir, environ=environ))
    try:
        process.wait()
    except BaseException:
        process.end("interrupted")
        process.wait()
        process.row()
        raise
    return process.row()
