"""Shared by serve, offline and plan: run the engine, print the report, keep it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_memprof.cli.arguments import ENGINE_ARGS
from vllm_memprof.cli.live import rank_budgets, refresher, shown_of
from vllm_memprof.cli.show import can_repaint, say, typed_command, write_reports
from vllm_memprof.errors import MemprofError
from vllm_memprof.files import from_here
from vllm_memprof.launch.live import GuardedView, LiveView, PlainView
from vllm_memprof.launch.run import EngineRun
from vllm_memprof.record.host import shortfalls
from vllm_memprof.redact import select_env
from vllm_memprof.text import text
from vllm_memprof.units import format_size

if TYPE_CHECKING:
    from vllm_memprof.accounting.model import Report
    from vllm_memprof.launch.metrics import Exporter
    from vllm_memprof.launch.progress import RankBudget
    from vllm_memprof.launch.request import LaunchRequest
    from vllm_memprof.launch.run import Job, RunOutcome
    from vllm_memprof.record.schema import RunInfo
    from vllm_memprof.sim.runtime import SimRuntime


def request(mode: str, ctx: typer.Context, **own: Any) -> LaunchRequest:
    """Return what was asked of a command that starts an engine.

    Args:
        mode: serve, offline or plan.
        ctx: its options, those with the name of a field of LaunchRequest, and the engine's
            arguments.
        own: fields with another value.

    Raises:
        UsageError: the device is none that memprof knows.
    """
    from vllm_memprof.launch.request import LaunchRequest, parse_device

    names = LaunchRequest.__dataclass_fields__
    given = {name: value for name, value in ctx.params.items() if name in names} | own
    given |= {
        "mode": mode,
        "engine_args": ctx.meta[ENGINE_ARGS],
        "device": parse_device(ctx.params["device"]),
        "sample": None if given.get("sample") == "off" else given.get("sample"),
        "typed": ["memprof", *sys.argv[1:]],
    }
    return LaunchRequest(**given)


def import_report() -> None:
    """Import what a report is made with, while the engine starts."""
    import vllm_memprof.logs.to_record
    import vllm_memprof.report.files
    import vllm_memprof.sources  # noqa: F401


def run(ctx: typer.Context, request: LaunchRequest, exporter: Exporter | None = None) -> None:
    """Run the engine, print the report, and exit with the engine's status, or 1 without one.

    Progress is a live view on a terminal; plain lines in pipes, in logs and with ``--quiet``.

    Args:
        ctx: the command, whose options say how the report is written.
        request: what was asked for.
        exporter: of metrics, one of the views.

    Raises:
        MemprofError: the engine could not be started.
    """
    from vllm_memprof.launch.prepare import prepare_job

    check: Callable[[RunInfo], None] | None = None
    if (name := ctx.params["use_checked"]) is not None:
        from vllm_memprof.cli.checked import checked_setting

        checked = checked_setting(name)
        # what is typed as well comes last, and differs
        words = [*checked.words, *request.engine_args]
        request = replace(request, engine_args=words, typed=[*request.typed, *checked.words])
        check = partial(checked.require_same, arguments=words)
        say(f"{' '.join(checked.words)}, as checked in {name}")
    job = prepare_job(request, check=check)
    serves = request.mode == "serve"
    shown = shown_of(
        job.info,
        request.mode,
        time.monotonic_ns(),
        ctx.params["lang"],
        output=serves and not request.quiet,
        foot=text("Ctrl-C: end the server"),
        leave=text("q: back to the line, the server goes on"),
        requests=request.mode == "offline" and not request.quiet,
    )
    if can_repaint() and not request.quiet:
        view: PlainView = LiveView(shown, ctx.params.get("screen", False))
    else:
        title = text("{run}: recording to {folder}", run=shown.title, folder=job.run_dir)
        view = PlainView(replace(shown, title=title))
    newer = refresher(job.run_dir, shown.sampled and serves)
    views = GuardedView(view, *filter(None, [exporter]), *newer)
    if exporter is not None:
        views.note(f"memprof: metrics on {exporter.url}")
    record = job.info.host_memory
    for short in shortfalls(record.asks, record.limits) if record is not None else ():
        verb = "may be" if short.at_most else "is"
        sizes = f"{format_size(short.limit.free_bytes)} left, {format_size(short.asked_bytes)}"
        by = ", ".join(dict.fromkeys(ask.argument or ask.owner for ask in short.asks))
        views.note(f"memprof: {short.limit.name} {verb} too low: {sizes} asked for by {by}")
    printed = False
    importing = threading.Thread(target=import_report, daemon=True)

    def report_at_readiness(info: RunInfo) -> list[RankBudget]:
        nonlocal printed
        printed = True
        importing.join()  # two threads that import the same modules may end in a deadlock
        report = print_report(ctx, job.run_dir)
        return [] if report is None else rank_budgets(report)

    outcome = EngineRun(job, views, report_at_readiness, importing.start).run()
    importing.join()
    print_report(ctx, job.run_dir, print_it=not printed)
    with contextlib.suppress(OSError):
        _say_how_it_ended(outcome, job, request)
    raise typer.Exit(outcome.verdict.exit_code)


def print_report(ctx: typer.Context, run_dir: Path, print_it: bool = True) -> Report | None:
    """Make, write and print the report. An error here is printed and changes nothing about the
    run.

    Returns:
        The report; None where it could not be made.
    """
    from vllm_memprof.cli import print_error

    report = None
    try:
        from vllm_memprof.report.files import write_reports as keep
        from vllm_memprof.sources import build_run

        report = build_run(run_dir)
        try:
            keep(report, run_dir)
        except MemprofError as error:
            print_error(error)  # on a full disk it is printed all the same
        if print_it:
            write_reports(ctx, [report], [str(from_here(run_dir))])
    except OSError:
        pass  # the terminal or the pipe is gone; the report is in the run folder
    except Exception as error:
        told = f"the report could not be made: {type(error).__name__}: {error}"
        own = MemprofError(told, hint=f"memprof report {run_dir}")
        print_error(error if isinstance(error, MemprofError) else own)
    return report


def report_engines(ctx: typer.Context, runtime: SimRuntime, record: Path, code: int) -> None:
    """Print the report of each engine that a program started on a simulated device.

    Args:
        ctx: the command.
        runtime: of the program.
        record: folder with the events of all its processes.
        code: its exit status.
    """
    from vllm_memprof.launch.engines_seen import write_runs
    from vllm_memprof.record.schema import RunInfo

    info = RunInfo(
        "",
        "offline",
        "unknown",
        typed_command(),
        device=runtime.profile.name,
        device_profile=runtime.profile.name,
        simulated=True,
        env=select_env({**os.environ, **runtime.env}),
        notes=list(runtime.notes),
    )
    folders = write_runs(record, info, code)
    for folder in folders:
        print_report(ctx, folder)
        say(f"recorded in {from_here(folder)}")
    if not folders:
        say("the program started no engine")


def _say_how_it_ended(outcome: RunOutcome, job: Job, request: LaunchRequest) -> None:
    from rich.console import Console
    from rich.text import Text

    failed, lines = outcome.verdict.status != "ok", list[Text]()
    unseen = request.mode != "serve" or request.quiet
    if failed and unseen and outcome.log_tail and not outcome.info.interrupted:
        lines.append(Text("last lines of engine.log:", style="dim"))
        lines += [Text.from_ansi(f"  {line}") for line in outcome.log_tail]
    where = f"run recorded in {from_here(job.run_dir)}: report.md, report.json, engine.log"
    style = "bold red" if failed else "bold"
    for said in filter(None, [outcome.verdict.reason, *outcome.info.notes, where]):
        lines.append(Text.assemble(("memprof: ", style), said))
        style = "bold"
    Console(stderr=True, highlight=False, soft_wrap=True).print(*lines, sep="\n")
