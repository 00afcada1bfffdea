"""Shared by the commands of many plans: progress, signals, the folder, how an answer is printed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from vllm_memprof.accounting.model import Report
from vllm_memprof.cli import print_error
from vllm_memprof.cli.arguments import ENGINE_ARGS
from vllm_memprof.cli.run import request
from vllm_memprof.cli.show import (
    can_repaint,
    progress_bar,
    say,
    typed_command,
    write_reports,
    write_result,
)
from vllm_memprof.document import Document
from vllm_memprof.engines import engine_row
from vllm_memprof.engines.base import refuse
from vllm_memprof.errors import MemprofError
from vllm_memprof.files import from_here, write_atomically
from vllm_memprof.launch.folder import create_run_dir
from vllm_memprof.launch.prepare import require_device
from vllm_memprof.plans.calibrated import Calibrated
from vllm_memprof.plans.model import Fit, Plan, PlanRow, Task
from vllm_memprof.plans.prove import proved, start_of
from vllm_memprof.plans.runner import PLANS_DIR, Interrupted, PlanRunner, Watcher
from vllm_memprof.plans.share import DeviceShare
from vllm_memprof.plans.store import Store
from vllm_memprof.report.json_text import render_result_json
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.runtime import prepare_runtime
from vllm_memprof.units import format_bytes, format_gib, one_line

Found = TypeVar("Found", Fit, DeviceShare, Calibrated)

#: Options of memprof that a plan has.
_OF_A_PLAN = ("engine", "device", "stack", "python", "ranks", "rank", "until")
#: Seconds between two lines of plans under way, where lines cannot be repainted.
_PLAIN_EVERY_S = 60.0


class PlanProgress(Watcher):
    """A line per plan; on a terminal a bar below them, and what is under way.

    Args:
        total: number of plans; None: not known.
        live: the terminal can be repainted.
    """

    def __init__(self, total: int | None, live: bool) -> None:
        self._of = "" if total is None else f"/{total}"
        self._done = 0
        self._next_s = time.monotonic() + _PLAIN_EVERY_S
        columns = [BarColumn(bar_width=24), MofNCompleteColumn()] if total is not None else []
        what = TextColumn("{task.description}", markup=False)
        self._bar = progress_bar(live, "plans", *columns, TimeElapsedColumn(), what)
        self._task = self._bar.add_task("", total=total)

    def running(self, tasks: Sequence[tuple[Task, float]]) -> None:
        said = "; ".join(f"{task.plan.title} for {seconds:.0f} s" for task, seconds in tasks)
        room = max(10, self._bar.console.width - 55)
        self._bar.update(self._task, description=one_line(said, room))
        if self._bar.disable and tasks and time.monotonic() > self._next_s:
            self.ending(f"under way: {said}")

    def ending(self, text: str) -> None:
        """Say a line."""
        self._next_s = time.monotonic() + _PLAIN_EVERY_S
        if not self._bar.disable:
            self._bar.console.print(f"memprof: {text}")
            return
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone; the plans go on
            say(text)

    def finished(self, place: int, row: PlanRow, how: str) -> None:
        self._done += 1
        text = f"{row.status}: {row.reason}"
        if row.ok:
            size, tokens = format_gib(row.kv_cache_bytes), format_bytes(row.tokens)
            text = f"KV cache {size} GiB, {tokens} tokens"
        if how == "made" and row.seconds is not None:
            how = f"{row.seconds:.1f} s"
        self.ending(f"{self._done}{self._of} {row.title}: {text} ({how})")
        self._bar.advance(self._task)

    def close(self) -> None:
        self._bar.stop()


@contextlib.contextmanager
def progress(total: int | None, quiet: bool, kept: str) -> Iterator[PlanProgress]:
    """Show plans under way: live on a terminal, plain lines elsewhere.

    Args:
        total: number of plans; None: not known.
        quiet: plain lines.
        kept: what is said after a signal, which ends the command, of what was made before it.
    """
    shown = PlanProgress(total, can_repaint() and not quiet)
    try:
        yield shown
    except Interrupted as error:
        shown.close()
        say(f"{error}{kept}")
        raise typer.Exit(128 + error.number) from None
    finally:
        shown.close()


def requested_plan(ctx: typer.Context, **own: object) -> Plan:
    """Return the plan that the options of a command ask for.

    Args:
        ctx: its options.
        own: options of memprof with another value than typed.

    Raises:
        UsageError: an option that no plan has, or an engine that the command does not run.
    """
    asked = ctx.params
    refuse(engine_row(asked["engine"]), f"memprof {ctx.info_name}")
    request("plan", ctx, **own)  # refuses what no plan has
    given = {name: asked[name] for name in _OF_A_PLAN if name in asked} | own
    return Plan.asked(asked["model"], ctx.meta[ENGINE_ARGS], given, asked["startup_timeout"])


def answer(
    ctx: typer.Context,
    title: str,
    make: Callable[[PlanRunner], Found],
    document: Callable[[Found, int], Document],
    kept: str = "; plans that are made are kept in the cache",
) -> tuple[Found, Path]:
    """Make the plans in a new folder, write the answer there, and print it.

    Args:
        ctx: of the command, whose name is that of the answer's file.
        title: for the name of the folder.
        make: answers, from what makes plans.
        document: of the answer.
        kept: as of ``progress``.

    Returns:
        The answer, and its folder.

    Raises:
        MemprofError: the folder or the answer cannot be made.
    """
    asked, started_s = ctx.params, time.monotonic()
    folder = create_run_dir(asked["run_dir"], title, PLANS_DIR)
    with progress(None, asked["quiet"], kept) as shown:
        runner = PlanRunner(folder, shown, None if asked["no_cache"] else Store())
        found = replace(
            make(runner),
            command=typed_command(),
            seconds=round(time.monotonic() - started_s, 1),
        )
    write_atomically(folder / f"{ctx.info_name}.json", render_result_json(found))
    write_result(ctx, found, document)
    return found, folder


def write_proved(ctx: typer.Context, reports: Sequence[Report], where: list[str]) -> None:
    """Try the cures of the last report, and write all as ``write_reports`` does.

    What is known until a signal, or instead of what cannot be tried, is written as well.
    """
    *others, report = reports
    try:
        plan, on = start_of(report, ctx.params["device"])
        folder = create_run_dir(None, f"{report.run.model.rstrip('/')}-prove", PLANS_DIR)
        with progress(None, False, "; the report has what is known until then") as shown:
            for known in proved(report, plan, on, PlanRunner(folder, shown, Store())):
                report = known
        say(f"the plans are in {from_here(folder)}")
    except MemprofError as error:
        print_error(error)
    finally:
        write_reports(ctx, [*others, report], where)


def check_setup(plan: Plan) -> None:
    """Check what every plan needs once, before many of them fail for it.

    Raises:
        MemprofError: no such device, profile, stack or model; or the stack is not set up.
    """
    if plan.device.profile is not None:
        prepare_runtime(plan.device.profile, plan.stack)
        resolve_model(plan.model, plan.engine_args)
    else:
        require_device(plan.device, plan.own.get("stack"))
