"""``memprof report``: a recorded run, printed or written again in any format."""

from __future__ import annotations

import typer

from vllm_memprof.cli.options import REPORTS, command_app
from vllm_memprof.cli.show import find_run, write_reports
from vllm_memprof.sources import build_runs, chosen, numbered, read_reports


def report(
    ctx: typer.Context,
    runs: list[str] | None = None,
    deployment: str | None = None,
    **shown: object,
) -> None:
    """Print the report of a recorded run, or one report of the runs of a deployment.

    The first screen has the answer: what fits, what failed, where the memory is, what to do.

    A deployment on several hosts has a run folder per host; see docs/deployments.md.

    trace opens in Perfetto (ui.perfetto.dev).
    """
    folders = runs if runs and len(runs) > 1 else [find_run(runs[0] if runs else None)]
    if ctx.params["prove"]:
        from vllm_memprof.cli.plans import write_proved as write
    else:
        write = write_reports
    path, number = numbered(folders[0])
    one = len(folders) == 1 and deployment is None
    reports = chosen(path, number, read_reports(path)) if one else [build_runs(folders, deployment)]
    write(ctx, reports, folders if runs else [])


app = command_app(report, REPORTS)
