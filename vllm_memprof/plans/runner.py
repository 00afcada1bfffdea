"""Makes the plans of a question: plans enter, rows leave in the order of their ends.

A question (a sweep, a search, a division, a calibrated plan) has a folder; ``plans/<name>/`` in it
are the run folders. What differs between questions is which plan they ask for next, and what they
make of rows and reports: a ``PlanRunner`` takes plans from the cache, has the others made by a
pool, and keeps them.

A plan is ``memprof plan`` in a group of its own, ended when its time is up. It has simulated
devices of its own, and ends the engine's processes; this module ends ``memprof plan``: a signal to
its main process is passed on to the engine, a second one hastens.

One loop in one thread: children die with the thread that started them. SIGINT and SIGTERM end the
plans under way, each at most once asked; what had ended before is kept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from vllm_memprof.accounting.model import Report
from vllm_memprof.errors import MemprofError
from vllm_memprof.launch import warm
from vllm_memprof.launch.engine import end_with_parent
from vllm_memprof.launch.folder import DIR_MODE
from vllm_memprof.launch.signals import catch_signals, signal_name
from vllm_memprof.plans.model import Plan, PlanRow, Sweep, Task
from vllm_memprof.plans.store import (
    OUTPUT_FILE,
    Store,
    key_of,
    output_of,
    read_row,
    report_of,
    row_of,
    write_row,
)

#: Seconds beyond the engine's own deadline, for the start and the end of ``memprof plan``.
GRACE_S = 90.0
#: Seconds between two signals to a plan that is to end, and how many ask before it is killed.
_STEP_S, _ASKED = 5.0, 3
#: Seconds between two looks at a plan under way.
TICK_S = 0.05
#: Of a question's folder: the run folders of its plans.
PLANS_DIR = "plans"
#: Host memory that the engine takes per plan and, with a process for each, per further rank.
ENGINE_HOST_BYTES = 1600 << 20
RANK_HOST_BYTES = 1100 << 20


class Interrupted(Exception):
    """A signal (``number``) ended a sweep or a search; ``sweep`` has the plans made before it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal_name(number)}")
        self.number = number
        self.sweep: Sweep | None = None


class Watcher:
    """Is told of the plans under way; says nothing."""

    def started(self, task: Task) -> None:
        """The process of a plan was started."""

    def running(self, tasks: Sequence[tuple[Task, float]]) -> None:
        """These plans are under way, for so many seconds each."""

    def ending(self, text: str) -> None:
        """A signal came, and plans are ended."""

    def finished(self, place: int, row: PlanRow, how: str) -> None:
        """``how``: made, cached, or there already."""


#: Makes plans; yields the row of each when it has ended.
Pool = Callable[[Sequence[Task], Watcher], Iterator[tuple[Task, PlanRow]]]


class PlanProcess:
    """A plan under way.

    Args:
        task: its request; the parent of its run folder exists.

    Raises:
        OSError: it cannot be started.
    """

    _process: subprocess.Popen[bytes] | warm.WarmChild

    def __init__(self, task: Task) -> None:
        self.task = task
        self.started_s = time.monotonic()
        self.ended: str | None = None  # why memprof ended it
        self.start()

    def start(self) -> None:
        """Start it."""
        self._signals, self._next_s = 0, 0.0
        task, forked = self.task, None
        command = task.plan.command(task.run_dir)
        with output_of(task.run_dir).open("wb") as output:
            if task.environ is None and task.plan.device.simulated and warm.is_wanted(os.environ):
                fork = [command[0], "-m", "vllm_memprof.cli.warm", *command[3:]]
                forked = warm.start(fork, os.environ, output.fileno())
            self._process = forked or subprocess.Popen(
                command,
                env=task.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
                preexec_fn=end_with_parent(),
            )

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
        if self.ended is not None and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _STEP_S
            self._signals += 1
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self._signals > _ASKED:  # the kernel tells the engine that its parent died
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.send_signal(signal.SIGINT)
        return False

    def wait(self) -> None:
        """Return when it has ended."""
        while not self.poll():
            time.sleep(TICK_S)

    def end(self, why: str) -> None:
        """Ask it to end; called again, send the next signal at once."""
        self.ended = self.ended or why
        self._next_s = 0.0
        self.poll()

    def row(self) -> PlanRow:
        """Return its row, once it has ended; its output is kept in the run folder."""
        run_dir, output = self.task.run_dir, output_of(self.task.run_dir)
        row = row_of(self.task.plan, run_dir, self._process.returncode, self.ended)
        if run_dir.is_dir():
            output.replace(run_dir / OUTPUT_FILE)
        else:
            output.unlink(missing_ok=True)
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


def default_jobs(plans: Sequence[Plan]) -> int:
    """Return the number of plans at a time: by cores and free memory; 1 on real devices."""
    if not all(plan.shares_nothing for plan in plans):
        return 1
    cores = len(os.sched_getaffinity(0))
    ranks = max(
        (1 if plan.own.get("ranks") == "one" else plan.devices for plan in plans), default=1
    )
    apart = ranks > 1 or any(plan.engine != "vllm" for plan in plans)
    each = ENGINE_HOST_BYTES + RANK_HOST_BYTES * (ranks if apart else 0)
    return max(1, min(cores // ranks, psutil.virtual_memory().available // each))


def run_here(
    tasks: Sequence[Task],
    progress: Watcher,
    jobs: int = 1,
    start: Callable[[Task], PlanProcess] = PlanProcess,
) -> Iterator[tuple[Task, PlanRow]]:
    """Make the plans, ``jobs`` at a time.

    Raises:
        Interrupted: by a signal, after the plans under way have ended; their rows are not given.
    """
    waiting, under_way = list(tasks), list[PlanProcess]()
    signals, passed_on = list[int](), 0
    with catch_signals(signals.append):
        try:
            while waiting or under_way:
                while waiting and len(under_way) < jobs and not signals:
                    under_way.append(start(waiting.pop(0)))
                    progress.started(under_way[-1].task)
                progress.running([(plan.task, plan.seconds) for plan in under_way])
                for plan in [plan for plan in under_way if plan.poll()]:
                    under_way.remove(plan)
                    row = plan.row()
                    if plan.ended is None or not signals:
                        yield plan.task, row
                if len(signals) > passed_on:
                    waiting.clear()
                    passed_on = len(signals)
                    progress.ending(f"ending plans: {len(under_way)}; again to hasten")
                    for plan in under_way:
                        plan.end("interrupted")
                time.sleep(TICK_S)
        finally:
            for plan in under_way:  # the caller stopped taking rows
                plan.end("interrupted")
            for plan in under_way:
                plan.wait()
        if signals:
            warm.stop_all()
            raise Interrupted(signals[0])


@dataclass
class PlanRunner:
    """Makes the plans of one question."""

    folder: Path  # of the question
    progress: Watcher = field(default_factory=Watcher)
    store: Store | None = None  # None: no plan is taken from the cache, or kept there
    pool: Pool = run_here

    def task(
        self, place: int, plan: Plan, name: str, environ: Mapping[str, str] | None = None
    ) -> Task:
        """Return a plan to make in the folder of that name."""
        return Task(place, plan, self.folder / PLANS_DIR / name, key_of(plan, environ), environ)

    def make(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, PlanRow]]:
        """Yield the rows of plans: of those that are there and in the cache first.

        Raises:
            Interrupted: by a signal; plans that were made are kept.
        """
        (self.folder / PLANS_DIR).mkdir(mode=DIR_MODE, parents=True, exist_ok=True)
        rest = []
        for task in tasks:
            row, how = read_row(task.run_dir, task.key), "there already"
            if row is None:
                shutil.rmtree(task.run_dir, ignore_errors=True)
                output_of(task.run_dir).unlink(missing_ok=True)
                row, how = None if self.store is None else self.store.take(task), "cached"
            if row is None:
                rest.append(task)
            else:
                yield task, self.done(task, row, how)
        for task, row in self.pool(rest, self.progress) if rest else ():
            yield task, self.done(task, row)

    def make_one(
        self, place: int, plan: Plan, name: str, environ: Mapping[str, str] | None = None
    ) -> PlanRow:
        """Make one plan; the arguments are those of ``task``.

        Raises:
            Interrupted: by a signal.
        """
        return next(self.make([self.task(place, plan, name, environ)]))[1]

    def done(self, task: Task, row: PlanRow, how: str = "made") -> PlanRow:
        """Return a row with its place in the folder; mark and keep what was made."""
        run = str(task.run_dir.relative_to(self.folder))
        row = replace(row, values=dict(task.plan.values), run=run)
        if how == "made":
            write_row(task.run_dir, task.key, row)
            if self.store is not None:
                self.store.keep(task, row)
        self.progress.finished(task.place, row, how)
        return row

    def report(self, row: PlanRow) -> Report | None:
        """Return the report of a plan; None where it left nothing that can be read."""
        try:
            return report_of(self.folder / (row.run or ""))
        except MemprofError:
            return None
