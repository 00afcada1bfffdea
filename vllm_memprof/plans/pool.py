"""Makes plans side by side on this machine: plans enter, rows leave in the order of their ends.

One loop in one thread: children die with the thread that started them. SIGINT and SIGTERM end the
plans under way, each at most once asked; what had ended before is kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from vllm_memprof.launch import warm
from vllm_memprof.launch.signals import catch_signals, signal_name
from vllm_memprof.plans.process import PlanProcess
from vllm_memprof.plans.request import Plan
from vllm_memprof.plans.rows import PlanRow, Sweep

_TICK_S = 0.05
#: Host memory that the engine takes per plan and, with a process for each, per further rank.
ENGINE_HOST_BYTES = 1600 << 20
RANK_HOST_BYTES = 1100 << 20


class Interrupted(Exception):
    """A signal (``number``) ended a sweep or a search; ``sweep`` has the plans made before it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal_name(number)}")
        self.number = number
        self.sweep: Sweep | None = None


@dataclass(frozen=True)
class Task:
    """One plan to make, by its place in the sweep."""

    place: int
    plan: Plan
    run_dir: Path


class PlanWatcher(Protocol):
    """Receives the progress of the plans under way."""

    def started(self, task: Task) -> None: ...
    def running(self, tasks: Sequence[tuple[Task, float]]) -> None: ...
    def ending(self, text: str) -> None: ...


Pool = Callable[[Sequence[Task], PlanWatcher], Iterator[tuple[Task, PlanRow]]]


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
    tasks: Sequence[Task], watcher: PlanWatcher, jobs: int
) -> Iterator[tuple[Task, PlanRow]]:
    """Make the plans, ``jobs`` at a time.

    Raises:
        Interrupted: by a signal, after the plans under way have ended; their rows are not given.
    """
    waiting, under_way = list(tasks), list[tuple[Task, PlanProcess]]()
    signals: list[int] = []
    with catch_signals(signals.append):
        try:
            while waiting or under_way:
                while waiting and len(under_way) < jobs and not signals:
                    task = waiting.pop(0)
                    under_way.append((task, PlanProcess(task.plan, task.run_dir)))
                    watcher.started(task)
                watcher.running([(task, process.seconds) for task, process in under_way])
                for pair in [pair for pair in under_way if pair[1].poll()]:
                    under_way.remove(pair)
                    row = pair[1].row()
                    if pair[1].ended is None or not signals:
                        yield pair[0], row
                if signals:
                    waiting.clear()
                    _end(under_way, signals, watcher)
                time.sleep(_TICK_S)
        finally:
            for _, process in under_way:  # the caller stopped taking rows
                process.end("interrupted")
            for _, process in under_way:
                while not process.poll():
                    time.sleep(_TICK_S)
        if signals:
            warm.stop_all()
            raise Interrupted(signals[0])


def _end(
    under_way: Sequence[tuple[Task, PlanProcess]], signals: list[int], watcher: PlanWatcher
) -> None:
    """End the plans, once for each signal that came."""
    asked = sum(process.ended is not None for _, process in under_way)
    if asked < len(under_way):
        watcher.ending(
            f"ending {len(under_way)} plan{'s' if len(under_way) > 1 else ''}; again to hasten"
        )
    elif len(signals) < 2:
        return
    del signals[1:]
    for _, process in under_way:
        process.end("interrupted")
