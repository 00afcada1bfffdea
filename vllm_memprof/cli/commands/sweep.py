"""``memprof sweep``: all combinations of some options' values, each a plan of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from vllm_memprof.api import make_sweep
from vllm_memprof.cli import plans
from vllm_memprof.cli.arguments import EngineCommand
from vllm_memprof.cli.options import ENGINES, command_app, of_request
from vllm_memprof.cli.show import say, typed_command, write_result
from vllm_memprof.errors import UsageError
from vllm_memprof.files import from_here
from vllm_memprof.plans.documents import render_sweep_csv, sweep_document
from vllm_memprof.plans.model import PlanRow, Task
from vllm_memprof.plans.on_ray import require_ray, run_on_ray
from vllm_memprof.plans.runner import PlanRunner, Watcher, default_jobs, run_here
from vllm_memprof.plans.store import Store
from vllm_memprof.plans.sweep import SweepJob, default_folder, parse_over

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
    over: list[str] | None = None,
    jobs: int | None = None,
    folder: Path | None = None,
    ray: str | None = None,
    no_cache: bool = False,
    **options: object,
) -> None:
    """Plan every combination of some options' values, and show the plans side by side.

    OPTION is an option of the engine, or device or stack of memprof; true and false switch an
    option that takes no value. DIR gets sweep.csv, sweep.json, sweep.html (the trade-off curves;
    needs the html extra) and the run folder of each plan. After an interruption the same command
    continues.

    Exit status 0: at least one plan started. 1: none started. 2: a wrong argument. 130: Ctrl-C.
    """
    plan = plans.requested_plan(ctx)
    knobs = parse_over(over or [])
    place = (default_folder(plan, knobs) if folder is None else folder.expanduser()).absolute()
    job = SweepJob(plan, knobs, typed_command())
    if ray is None:
        plans.check_setup(job.plans[0])
    elif not all(each.shares_nothing for each in job.plans):
        hint = "--device sim:910b, or leave --ray out: real devices take one plan at a time"
        raise UsageError("--ray makes plans on simulated devices", hint=hint)
    else:
        require_ray()

    def pool(tasks: Sequence[Task], watcher: Watcher) -> Iterator[tuple[Task, PlanRow]]:
        if ray is not None:  # started only if a plan has to be made
            return run_on_ray(tasks, watcher, ray, jobs)
        return run_here(tasks, watcher, jobs or default_jobs([task.plan for task in tasks]))

    asked = ctx.params
    kept = "; the same command continues"
    with plans.progress(len(job.plans), asked["quiet"], kept) as shown:
        runner = PlanRunner(place, shown, None if no_cache else Store(), pool)
        found, written = make_sweep(job, runner, asked["lang"])
    if asked["format_name"] == "csv":
        sys.stdout.write(render_sweep_csv(found))
    else:
        write_result(ctx, found, sweep_document)
    say(f"{', '.join(written)} and the plans are in {from_here(place)}")
    if not any(row.ok for row in found.rows):
        raise typer.Exit(NONE_STARTED)


app = command_app(sweep, {**of_request("ranks", "until"), **ENGINES}, SweepCommand)
