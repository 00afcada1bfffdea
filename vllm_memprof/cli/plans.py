"""Shared by the commands of many plans: progress, signals, and how the result is printed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from vllm_memprof.units import format_bytes, format_gib, one_line

if TYPE_CHECKING:
    from vllm_memprof.plans.pool import Task
    from vllm_memprof.plans.rows import PlanRow
    from vllm_memprof.plans.sweep import SweepProgress

#: Seconds between two lines of plans under way, where lines cannot be repainted.
_PLAIN_EVERY_S = 60.0
#: Said after a signal, where the plans that ended before it are in the cache.
KEPT = "; plans that are made are kept in the cache"
_Found = TypeVar("_Found")


class PlainProgress:
    """A line per plan, for pipes and logs."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._done = 0
        self._next_s = time.monotonic() + _PLAIN_EVERY_S

    def started(self, task: Task) -> None:
        pass

    def running(self, tasks: Sequence[tuple[Task, float]]) -> None:
        if tasks and time.monotonic() > self._next_s:
            self._next_s = time.monotonic() + _PLAIN_EVERY_S
            self._say(
                "under way: "
                + "; ".join(f"{task.plan.title} for {seconds:.0f} s" for task, seconds in tasks)
            )

    def ending(self, text: str) -> None:
        self._say(text)

    def finished(self, place: int, row: PlanRow, how: str) -> None:
        self._done += 1
        self._next_s = time.monotonic() + _PLAIN_EVERY_S
        of = f"/{self._total}" if self._total is not None else ""
        self._say(f"{self._done}{of} {describe(row, how)}")

    def close(self) -> None:
        pass

    def _say(self, text: str) -> None:
        try:
            print(f"memprof: {text}", file=sys.stderr, flush=True)
        except (OSError, ValueError):
            pass  # the terminal is gone; the plans go on


class LiveProgress(PlainProgress):
    """Finished plans scroll by; below them a bar, and what is under way."""

    def __init__(self, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        super().__init__(total)
        self._console = Console(stderr=True, highlight=False)
        columns = [BarColumn(bar_width=24), MofNCompleteColumn()] if total is not None else []
        self._bar = Progress(
            TextColumn("plans"), *columns, TimeElapsedColumn(), TextColumn("{task.description}"),
            console=self._console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total)
        self._bar.start()

    def running(self, tasks: Sequence[tuple[Task, float]]) -> None:
        text = "; ".join(f"{task.plan.title} {seconds:.0f} s" for task, seconds in tasks)
        room = max(10, self._console.width - 55)
        self._bar.update(self._task, description=one_line(text, room))

    def finished(self, place: int, row: PlanRow, how: str) -> None:
        super().finished(place, row, how)
        self._bar.advance(self._task)

    def close(self) -> None:
        self._bar.stop()

    def _say(self, text: str) -> None:
        self._bar.console.print(f"memprof: {text}", soft_wrap=True, markup=False)


def can_repaint() -> bool:
    """Return True where stderr is a terminal whose lines can be repainted."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def progress(total: int | None, quiet: bool) -> PlainProgress:
    """Return a live display on a terminal, plain lines elsewhere."""
    return LiveProgress(total) if can_repaint() and not quiet else PlainProgress(total)


def describe(row: PlanRow, how: str) -> str:
    """Return a plan in one line."""
    title = " ".join(f"{name}={value}" for name, value in row.values.items())
    if row.ok:
        text = f"KV cache {format_gib(row.kv_cache_bytes)} GiB, {format_bytes(row.tokens)} tokens"
    else:
        text = f"{row.status}: {row.reason}"
    took = "" if row.seconds is None else f"{row.seconds:.1f} s"
    return f"{title}: {text} ({how if how != 'made' else took or how})"


def make_plans(
    make: Callable[[SweepProgress], _Found], quiet: bool, kept: str = ""
) -> _Found | int:
    """Show the progress of what makes many plans; return its result, or a signal's exit status.

    Args:
        make: makes them.
        quiet: plain lines.
        kept: what is said after a signal, of what was made before it.
    """
    from vllm_memprof.plans.pool import Interrupted

    shown = progress(None, quiet)
    try:
        return make(shown)
    except Interrupted as error:
        shown.close()
        print(f"memprof: {error}{kept}", file=sys.stderr)
        return 128 + error.number
    finally:
        shown.close()
