"""Shared by serve, offline and plan: run the engine, print the report, keep it."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_memprof.cli import complete
from vllm_memprof.cli.arguments import ENGINE_ARGS
from vllm_memprof.cli.live import rank_budgets, refresher
from vllm_memprof.cli.show import Lang, can_repaint, check_format, render, shown, write_out
from vllm_memprof.errors import MemprofError
from vllm_memprof.files import from_here
from vllm_memprof.sources import build_run
from vllm_memprof.text import text

if TYPE_CHECKING:
    from vllm_memprof.accounting.model import Report
    from vllm_memprof.launch.metrics import Exporter
    from vllm_memprof.launch.request import LaunchRequest
    from vllm_memprof.launch.run import Job, RunOutcome
    from vllm_memprof.launch.status import RankBudget
    from vllm_memprof.record.schema import RunInfo


DEFAULT_TIMEOUT_S = 600.0

# The options of memprof on every command that starts an engine, declared once.
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model folder or hub name, as for the engine.",
        autocompletion=complete.models,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine", metavar="E", help="Engine to run: vllm, sglang; offline also sglang-diffusion."
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="D",
        help="auto, npu, cuda, cpu, or sim[:PROFILE] (simulated Ascend).",
        autocompletion=complete.devices,
    ),
]
RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        metavar="DIR",
        help="Where to record the run.",
        show_default="reports/<time>-<model>",
    ),
]
Format = Annotated[
    str, typer.Option("--format", metavar="F", help="What is printed: table, markdown or json.")
]
Quiet = Annotated[
    bool,
    typer.Option("-q", "--quiet", help="Plain lines instead of the live view; no engine output."),
]
KeepSecrets = Annotated[
    bool,
    typer.Option(
        "--keep-secrets", help="Leave keys, tokens and passwords in engine.log as printed."
    ),
]
Timeout = Annotated[
    float,
    typer.Option("--startup-timeout", metavar="S", help="Seconds until the engine must be ready."),
]
Python = Annotated[
    str | None,
    typer.Option(
        "--python",
        metavar="PATH",
        help="Interpreter of the engine.",
        show_default="the one with vLLM",
    ),
]
Stack = Annotated[
    str | None,
    typer.Option(
        "--stack",
        metavar="NAME",
        help="Simulated stack; see `memprof sim list`.",
        autocompletion=complete.stacks,
    ),
]
ShareDevice = Annotated[
    bool,
    typer.Option(
        "--share-device",
        help="Share the simulated devices with all who do so (MEMPROF_SIM_STATE), not alone.",
    ),
]

Deployment = Annotated[
    str | None,
    typer.Option(
        "--deployment",
        metavar="NAME[/GROUP]",
        help="Deployment on several hosts that this is a part of; GROUP: prefill, decode.",
        show_default="from the engine's arguments",
    ),
]

Sample = Annotated[
    str | None,
    typer.Option(
        "--sample",
        metavar="N",
        help="Read memory every N engine steps, or every N seconds: 16, 5s; or off.",
    ),
]

TraceAllocations = Annotated[
    int | None,
    typer.Option(
        "--trace-allocations",
        metavar="N",
        help="Over N requests, find the lines of code whose memory stays. Slows the engine down.",
    ),
]

#: Options of every command that makes plans, with their defaults.
PLANS = {
    "engine": (Engine, "vllm"),
    "device": (Device, "auto"),
    "stack": (Stack, None),
    "python": (Python, None),
    "startup_timeout": (Timeout, DEFAULT_TIMEOUT_S),
    "lang": (Lang, "en"),
    "quiet": (Quiet, False),
}
#: The same of a command with one answer, in a folder of its own.
ANSWER = {**PLANS, "run_dir": (RunDir, None), "format_name": (Format, "table")}

EPILOG = (
    "Every other argument goes to the engine unchanged and in order; `--` ends memprof's own. "
    "-q VALUE is vLLM's --quantization."
)


def request(mode: str, ctx: typer.Context, **own: Any) -> LaunchRequest:
    """Return what was asked of a command that starts an engine.

    Args:
        mode: serve, offline or plan.
        ctx: its options, those with the name of a field of LaunchRequest, and the engine's
            arguments.
        own: fields of another name or value.

    Raises:
        UsageError: the device is none that memprof knows.
    """
    from vllm_memprof.launch.request import LaunchRequest, parse_device

    names = LaunchRequest.__dataclass_fields__
    given = {name: value for name, value in ctx.params.items() if name in names}
    given |= {
        "mode": mode,
        "engine_args": ctx.meta[ENGINE_ARGS],
        "device": parse_device(given["device"]),
        "startup_timeout_s": ctx.params["startup_timeout"],
        "typed": ["memprof", *sys.argv[1:]],
    }
    return LaunchRequest(**{**given, **own})


def run(
    request: LaunchRequest,
    format_name: str,
    lang: str,
    screen: bool = False,
    exporter: Exporter | None = None,
) -> int:
    """Run the engine and print the report.

    Progress is a live view on a terminal; plain lines in pipes, in logs and with ``--quiet``.

    Args:
        request: what was asked for.
        format_name, lang: of the report.
        screen: the live view takes the whole screen.
        exporter: of metrics; closed at the end.

    Returns:
        The exit status: the engine's own, or 1 when it had none to give.

    Raises:
        MemprofError: the engine could not be started.
    """
    from vllm_memprof.launch.live import GuardedView, LiveView, PlainView, Shown
    from vllm_memprof.launch.prepare import prepare_job
    from vllm_memprof.launch.run import run_engine
    from vllm_memprof.report.language import language

    with contextlib.ExitStack() as stack:
        if exporter is not None:
            stack.callback(exporter.close)
        check_format(format_name, printed=True, lang=lang)
        job = prepare_job(request)
        shown = Shown(
            f"memprof {request.mode} {request.model}",
            time.monotonic_ns(),
            output=request.mode == "serve" and not request.quiet,
            sampled=request.sample is not None,
            modelled=request.device.simulated,
            foot=text("Ctrl-C: end the server"),
            leave=text("q: back to the line, the server goes on"),
            requests=request.mode == "offline" and not request.quiet,
            say=language(lang),
        )
        view: LiveView | PlainView
        if can_repaint() and not request.quiet:
            view = LiveView(shown, screen)
        else:
            title = text("{run}: recording to {folder}", run=shown.title, folder=job.run_dir)
            view = PlainView(replace(shown, title=title))
        shows = [view, *([] if exporter is None else [exporter])]
        newer = refresher(job.run_dir, shows, shown.sampled and request.mode == "serve")
        views = GuardedView(*shows, *newer)
        if exporter is not None:
            views.note(f"memprof: metrics on {exporter.url}")
        printed = False

        def report_at_readiness(info: RunInfo) -> list[RankBudget]:
            nonlocal printed
            if request.mode != "serve":
                return []
            report = _report(job.run_dir, format_name, lang, print_it=True)
            printed = True
            return [] if report is None else rank_budgets(report)

        outcome = run_engine(job, views, report_at_readiness)
        _report(job.run_dir, format_name, lang, print_it=not printed)
        with contextlib.suppress(OSError):
            _say_how_it_ended(outcome, job, request)
    return outcome.verdict.exit_code


def _report(run_dir: Path, format_name: str, lang: str, print_it: bool) -> Report | None:
    """Make, write and print the report. An error here is printed and changes nothing about the
    run.

    Returns:
        The report; None where it could not be made.
    """
    from vllm_memprof.cli import print_error

    report = None
    try:
        from vllm_memprof.report.files import write_reports

        report = build_run(run_dir)
        try:
            write_reports(report, run_dir)
        except MemprofError as error:
            print_error(error)  # on a full disk it is printed all the same
        if print_it:
            screen = shown([report], str(from_here(run_dir)))
            write_out(render(report, format_name, lang=lang, found=screen), None)
    except MemprofError as error:
        print_error(error)
    except OSError:
        pass  # the terminal or the pipe is gone; the report is in the run folder
    except Exception as error:
        text = f"the report could not be made: {type(error).__name__}: {error}"
        print_error(MemprofError(text, hint=f"memprof report {run_dir}"))
    return report


def _say_how_it_ended(outcome: RunOutcome, job: Job, request: LaunchRequest) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    failed = outcome.verdict.status != "ok"
    if failed and (request.mode != "serve" or request.quiet) and outcome.log_tail:
        console.print(Text("last lines of engine.log:", style="dim"))
        for line in outcome.log_tail:
            console.print(Text.from_ansi(f"  {line}"), soft_wrap=True)
    if outcome.verdict.reason:
        style = "bold red" if failed else "bold"
        console.print(Text.assemble(("memprof: ", style), outcome.verdict.reason), soft_wrap=True)
    for note in outcome.info.notes:
        console.print(Text(f"memprof: {note}"), soft_wrap=True)
    console.print(
        Text.assemble(
            ("memprof: ", "bold"),
            f"run recorded in {from_here(job.run_dir)}: report.md, report.json, engine.log",
        ),
        soft_wrap=True,
    )
