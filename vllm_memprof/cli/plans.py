"""Shared by the commands of many plans: progress, signals, the folder, how an answer is printed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from vllm_memprof.cli.show import write_result
from vllm_memprof.files import write_atomically
from vllm_memprof.units import format_bytes, format_gib, one_line

if TYPE_CHECKING:
    from vllm_memprof.plans.calibrated_rows import Calibrated
    from vllm_memprof.plans.request import Plan, Task
    from vllm_memprof.plans.rows import Fit, PlanRow
    from vllm_memprof.plans.runner import PlanRunner
    from vllm_memprof.plans.share_rows import DeviceShare

    Found = TypeVar("Found", Fit, DeviceShare, Calibrated)

FORMATS = ("table", "markdown", "json")
#: Seconds between two lines of plans under way, where lines cannot be repainted.
_PLAIN_EVERY_S = 60.0


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
        title = " ".join(f"{name}={value}" for name, value in row.values.items())
        text = f"{row.status}: {row.reason}"
        if row.ok:
            size, tokens = format_gib(row.kv_cache_bytes), format_bytes(row.tokens)
            text = f"KV cache {size} GiB, {tokens} tokens"
        if how == "made" and row.seconds is not None:
            how = f"{row.seconds:.1f} s"
        self._say(f"{self._done}{of} {title}: {text} ({how})")

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


@contextmanager
def progress(total: int | None, quiet: bool, kept: str = "") -> Iterator[PlainProgress]:
    """Show plans under way: live on a terminal, plain lines elsewhere.

    Args:
        total: number of plans; None: not known.
        quiet: plain lines.
        kept: what is said after a signal, which ends the command, of what was made before it.
    """
    from vllm_memprof.plans.pool import Interrupted

    shown = LiveProgress(total) if can_repaint() and not quiet else PlainProgress(total)
    try:
        yield shown
    except Interrupted as error:
        shown.close()
        print(f"memprof: {error}{kept}", file=sys.stderr)
        raise typer.Exit(128 + error.number) from None
    finally:
        shown.close()


@dataclass(frozen=True)
class Asked:
    """The options that the questions of ``plan`` to many plans have in common, as typed."""

    folder: Path | None
    format_name: str
    lang: str
    quiet: bool
    use_store: bool

    def answer(
        self,
        title: str,
        file: str,
        make: Callable[[list[str], PlanRunner], Found],
        kept: str = "; plans that are made are kept in the cache",
    ) -> tuple[Found, Path]:
        """Make the plans in a new folder, write the answer there, and print it.

        Args:
            title: for the name of the folder.
            file: of the answer in it.
            make: answers, from the command as typed and what makes plans.
            kept: as of ``progress``.

        Returns:
            The answer, and its folder.

        Raises:
            MemprofError: the folder or the answer cannot be made.
        """
        from vllm_memprof.launch.folder import create_run_dir
        from vllm_memprof.plans.runner import PLANS_DIR, PlanRunner
        from vllm_memprof.plans.store import Store
        from vllm_memprof.redact import redact_command
        from vllm_memprof.report.results import render_result_json

        folder = create_run_dir(self.folder, title, PLANS_DIR)
        command = redact_command(["memprof", *sys.argv[1:]])
        with progress(None, self.quiet, kept) as shown:
            runner = PlanRunner(folder, shown, Store() if self.use_store else None)
            found = make(command, runner)
        write_atomically(folder / file, render_result_json(found))
        write_result(found, self.format_name, lang=self.lang)
        return found, folder


def check_setup(plan: Plan) -> None:
    """Check what every plan needs once, before many of them fail for it.

    Raises:
        MemprofError: no such device, profile or stack; or the stack is not set up.
    """
    from vllm_memprof.engines import engine_row
    from vllm_memprof.launch.prepare import require_device
    from vllm_memprof.launch.request import parse_device
    from vllm_memprof.sim.runtime import prepare_runtime

    device = parse_device(plan.own.get("device", "auto"))
    if device.profile is not None:
        stack = plan.own.get("stack") or engine_row(plan.engine).stack
        prepare_runtime(device.profile, stack)
    else:
        require_device(device, plan.own.get("stack"))
