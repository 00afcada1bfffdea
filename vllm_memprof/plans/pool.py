"""Makes plans side by side on this machine: plans enter, rows leave in the order of their ends.

One loop in one thread: children die with the thread that started them. SIGINT and SIGTERM end the
plans under way, each at most once asked; what had ended before is kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import psutil

from vllm_memprof.launch import warm
from vllm_memprof.launch.signals import catch_signals, signal_name
from vllm_memprof.plans.process import TICK_S, PlanProcess
from vllm_memprof.plans.request import Plan, Task
from vllm_memprof.plans.rows import PlanRow, Sweep

#: Host memory that the engine takes per plan and, with a process for each, per further rank.
ENGINE_HOST_BYTES = 1600 << 20
RANK_HOST_BYTES = 1100 << 20


class Interrupted(Exception):
    """A signal (``number``) ended a sweep or a search; ``sweep`` has the plans made before it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal_name(number)}")
        self.number = number
        self.sweep: Sweep | None = None


class Progress(Protocol):
    """Is told of the plans under way."""

    def started(self, task: Task) -> None:
        """The process of a plan was started."""

    def running(self, tasks: Sequence[tuple[Task, float]]) -> None:
        """These plans are under way, for so many seconds each."""

    def ending(self, text: str) -> None:
        """A signal came, and plans are ended."""

    def finished(self, place: int, row: PlanRow, how: str) -> None:
        """``how``: made, cached, or there already."""


class Silent(Progress):
    """Says nothing of them."""


#: Makes plans; yields the row of each when it has ended.
Pool = Callable[[Sequence[Task], Progress], Iterator[tuple[Task, PlanRow]]]


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
    tasks: Sequence[Task], progress: Progress, jobs: int = 1
) -> Iterator[tuple[Task, PlanRow]]:
    """Make the plans, ``jobs`` at a time.

    Raises:
        Interrupted: by a signal, after the plans under way have ended; their rows are not given.
    """
    waiting, under_way = list(tasks), list[PlanProcess]()
    signals: list[int] = []
    with catch_signals(signals.append):
        try:
            while waiting or under_way:
                while waiting and len(under_way) < jobs and not signals:
                    under_way.append(PlanProcess(waiting.pop(0)))
                    progress.started(under_way[-1].task)
                progress.running([(process.task, process.seconds) for process in under_way])
                for process in [process for process in under_way if process.poll()]:
                    under_way.remove(process)
                    row = process.row()
                    if process.ended is None or not signals:
                        yield process.task, row
                if signals:
                    waiting.clear()
                    _end(under_way, signals, progress)
                time.sleep(TICK_S)
        finally:
            for process in under_way:  # the caller stopped taking rows
                process.end("interrupted")
            for process in under_way:
                process.wait()
        if signals:
            warm.stop_all()
            raise Interrupted(signals[0])


def _end(under_way: Sequence[PlanProcess], signals: list[int], progress: Progress) -> None:
    """End the plans, once for each signal that came."""
    if any(process.ended is None for process in under_way):
        plural = "s" if len(under_way) > 1 else ""
        progress.ending(f"ending {len(under_way)} plan{plural}; again to hasten")
    elif len(signals) < 2:
        return
    del signals[1:]
    for process in under_way:
        process.end("interrupted")
