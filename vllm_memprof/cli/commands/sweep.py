"""``memprof sweep``: all combinations of some options' values, each a plan of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_memprof.cli import plans as shared
from vllm_memprof.cli import run
from vllm_memprof.cli.arguments import EngineCommand
from vllm_memprof.cli.plans import check_setup
from vllm_memprof.cli.show import command_app, write_result
from vllm_memprof.errors import UsageError
from vllm_memprof.files import from_here

if TYPE_CHECKING:
    from vllm_memprof.plans.pool import Progress
    from vllm_memprof.plans.request import Task
    from vllm_memprof.plans.rows import PlanRow

FORMATS = (*shared.FORMATS, "csv")
#: Exit status: every plan has its row, and none of them started.
NONE_STARTED = 1


class SweepCommand(EngineCommand):
    """``--ray`` may stand alone or bring an address: ``--ray=ADDRESS``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(
            ctx, ["--ray=auto" if a == "--ray" and i < end else a for i, a in enumerate(args)]
        )


def sweep(
    ctx: typer.Context,
    model: run.Model,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="OPTION=V,V",
            help="An option and its values; repeatable: all combinations.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", metavar="N", help="Plans at a time.", show_default="by cores and free memory"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Folder of the sweep.",
            show_default="reports/sweep-<model>-<digest>",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="[=ADDRESS]",
            help="Make the plans on a Ray cluster: auto, local, or its address.",
            show_default="auto",
        ),
    ] = None,
    format_name: Annotated[
        str,
        typer.Option(
            "--format", metavar="F", help="What is printed: table, markdown, json or csv."
        ),
    ] = "table",
    ranks: shared.Ranks = "auto",
    until: shared.Until = "kv",
    no_cache: shared.NoCache = False,
    **shared_options: object,
) -> None:
    """Plan every combination of some options' values, and show the plans side by side.

    OPTION is an option of the engine, or device or stack of memprof; true and false switch an
    option that takes no value. DIR gets sweep.csv (a row per plan), sweep.json, sweep.html (the
    trade-off curves; needs the html extra) and the run folder of each plan, which report, diff and
    check read. After an interruption the same command continues. Plans on a simulated device that
    were made before are taken from the cache. A plan that fails is a row with the reason.

    Exit status 0: every plan has a row, and at least one started. 1: none started. 2: a wrong
    argument. 130: Ctrl-C.
    """
    from vllm_memprof.api import make_sweep
    from vllm_memprof.plans.documents import render_sweep_csv, sweep_document
    from vllm_memprof.plans.on_ray import require_ray, run_on_ray
    from vllm_memprof.plans.pool import default_jobs, run_here
    from vllm_memprof.plans.runner import PlanRunner
    from vllm_memprof.plans.store import Store
    from vllm_memprof.plans.sweep import SweepJob, default_folder, parse_over
    from vllm_memprof.redact import redact_command

    if jobs is not None and jobs < 1:
        raise UsageError("--jobs must be at least 1")
    plan = shared.requested_plan(ctx, FORMATS)
    knobs = parse_over(over or [])
    folder = (default_folder(plan, knobs) if output is None else output.expanduser()).absolute()
    job = SweepJob(plan, knobs, redact_command(["memprof", *sys.argv[1:]]))
    if ray is None:
        check_setup(job.plans[0])
    elif not all(each.shares_nothing for each in job.plans):
        hint = "--device sim:910b, or leave --ray out: real devices take one plan at a time"
        raise UsageError("--ray makes plans on simulated devices", hint=hint)
    else:
        require_ray()

    def pool(tasks: Sequence[Task], watcher: Progress) -> Iterator[tuple[Task, PlanRow]]:
        if ray is not None:  # started only if a plan has to be made
            return run_on_ray(tasks, watcher, ray, jobs)
        return run_here(tasks, watcher, jobs or default_jobs([task.plan for task in tasks]))

    store = None if no_cache else Store()
    lang, quiet = ctx.params["lang"], ctx.params["quiet"]
    with shared.progress(len(job.plans), quiet, "; the same command continues") as shown:
        found, written = make_sweep(job, PlanRunner(folder, shown, store, pool), lang)
    if format_name == "csv":
        sys.stdout.write(render_sweep_csv(found))
    else:
        write_result(found, sweep_document, format_name, lang=lang)
    print(
        f"memprof: {', '.join(written)} and the plans are in {from_here(folder)}", file=sys.stderr
    )
    if not any(row.ok for row in found.rows):
        raise typer.Exit(NONE_STARTED)


app = command_app(sweep, run.PLANS, cls=SweepCommand, epilog=run.EPILOG)
