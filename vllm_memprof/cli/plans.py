"""Shared by the commands of many plans: progress, signals, the folder, how an answer is printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from vllm_memprof.cli.arguments import ENGINE_ARGS
from vllm_memprof.cli.show import can_repaint, check_format, write_result
from vllm_memprof.files import write_atomically
from vllm_memprof.units import format_bytes, format_gib, one_line

if TYPE_CHECKING:
    from vllm_memprof.plans.calibrated import Calibrated
    from vllm_memprof.plans.request import Plan, Task
    from vllm_memprof.plans.rows import Fit, PlanRow
    from vllm_memprof.plans.runner import PlanRunner
    from vllm_memprof.plans.share import DeviceShare

    Found = TypeVar("Found", Fit, DeviceShare, Calibrated)

FORMATS = ("table", "markdown", "json")
#: Options of memprof that a plan has.
_OF_A_PLAN = ("engine", "device", "stack", "python", "ranks", "rank", "until")

Ranks = Annotated[
    str,
    typer.Option(
        "--ranks",
        metavar="R",
        help="Ranks to run: one, all, edges (first, last, differing); auto: all if they fit.",
    ),
]
Rank = Annotated[
    int | None, typer.Option("--rank", metavar="K", help="The rank that --ranks one runs.")
]
Until = Annotated[
    str,
    typer.Option(
        "--until",
        metavar="U",
        help="kv: stop at the KV plan; ready: go on, and run the largest batches.",
    ),
]
Wants = Annotated[
    list[str] | None,
    typer.Option(
        "--want",
        metavar="W",
        help="A condition: tokens=500000, concurrency=8@32768, concurrency=8, kv-cache=40GiB; "
        "repeatable.",
    ),
]
Headroom = Annotated[
    str | None,
    typer.Option(
        "--headroom", metavar="SIZE", help="Device memory that must stay free at the peak."
    ),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Do not read or write the cache of plans.")
]
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
        text = f"{row.status}: {row.reason}"
        if row.ok:
            size, tokens = format_gib(row.kv_cache_bytes), format_bytes(row.tokens)
            text = f"KV cache {size} GiB, {tokens} tokens"
        if how == "made" and row.seconds is not None:
            how = f"{row.seconds:.1f} s"
        self._say(f"{self._done}{of} {row.title}: {text} ({how})")

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


def requested_plan(ctx: typer.Context, formats: Sequence[str] = FORMATS, **own: object) -> Plan:
    """Return the plan that the options of a command ask for.

    Args:
        ctx: its options.
        formats: of its answer.
        own: options of memprof with another value than typed.

    Raises:
        UsageError: a format that it does not have, an option that no plan has, or an engine that
            the command does not run.
    """
    from vllm_memprof.cli.run import request
    from vllm_memprof.engines import engine_row
    from vllm_memprof.engines.base import refuse
    from vllm_memprof.plans.request import Plan

    check_format(ctx.params["format_name"], lang=ctx.params["lang"], formats=formats)
    refuse(engine_row(ctx.params["engine"]), f"memprof {ctx.info_name}")
    request("plan", ctx, **own)  # refuses what no plan has
    given = {name: ctx.params[name] for name in _OF_A_PLAN if name in ctx.params} | own
    arguments = ctx.meta[ENGINE_ARGS]
    return Plan.asked(ctx.params["model"], arguments, given, ctx.params["startup_timeout"])


def answer(
    ctx: typer.Context,
    title: str,
    make: Callable[[PlanRunner], Found],
    kept: str = "; plans that are made are kept in the cache",
) -> tuple[Found, Path]:
    """Make the plans in a new folder, write the answer there, and print it.

    Args:
        ctx: of the command, whose name is that of the answer's file.
        title: for the name of the folder.
        make: answers, from what makes plans.
        kept: as of ``progress``.

    Returns:
        The answer, and its folder.

    Raises:
        MemprofError: the folder or the answer cannot be made.
    """
    from vllm_memprof.launch.folder import create_run_dir
    from vllm_memprof.plans.documents import answer_document
    from vllm_memprof.plans.runner import PLANS_DIR, PlanRunner
    from vllm_memprof.plans.store import Store
    from vllm_memprof.redact import redact_command
    from vllm_memprof.report.json_text import render_result_json

    asked, started_s = ctx.params, time.monotonic()
    folder = create_run_dir(asked["run_dir"], title, PLANS_DIR)
    with progress(None, asked["quiet"], kept) as shown:
        runner = PlanRunner(folder, shown, None if asked["no_cache"] else Store())
        found = replace(
            make(runner),
            command=redact_command(["memprof", *sys.argv[1:]]),
            seconds=round(time.monotonic() - started_s, 1),
        )
    write_atomically(folder / f"{ctx.info_name}.json", render_result_json(found))
    write_result(found, answer_document, asked["format_name"], lang=asked["lang"])
    return found, folder


def check_setup(plan: Plan) -> None:
    """Check what every plan needs once, before many of them fail for it.

    Raises:
        MemprofError: no such device, profile, stack or model; or the stack is not set up.
    """
    from vllm_memprof.launch.prepare import require_device
    from vllm_memprof.sim.presets import resolve_model
    from vllm_memprof.sim.runtime import prepare_runtime

    if plan.device.profile is not None:
        prepare_runtime(plan.device.profile, plan.stack)
        resolve_model(plan.model, plan.engine_args)
    else:
        require_device(plan.device, plan.own.get("stack"))
