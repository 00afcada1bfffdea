"""``memprof plan``: the engine up to its KV plan, and no further."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vllm_memprof.cli import run as shared
from vllm_memprof.cli.arguments import ENGINE_ARGS, EngineCommand

Ranks = Annotated[
    str,
    typer.Option(
        "--ranks", metavar="R", help="Ranks to run: one, all, edges (first, last, differing); auto: all if they fit."
    ),
]
Rank = Annotated[int | None, typer.Option("--rank", metavar="K", help="The rank that --ranks one runs.")]

app = typer.Typer(**shared.APP_SETTINGS)


@app.command(cls=EngineCommand, epilog=shared.EPILOG)
def plan(
    ctx: typer.Context,
    model: shared.Model,
    device: shared.Device = "auto",
    run_dir: shared.RunDir = None,
    format_name: shared.Format = "table",
    quiet: shared.Quiet = False,
    startup_timeout: shared.Timeout = shared.DEFAULT_TIMEOUT_S,
    python: shared.Python = None,
    stack: shared.Stack = None,
    ranks: Ranks = "auto",
    rank: Rank = None,
) -> None:
    """Size the KV cache, show the budget, stop.

    Brings the engine up to the point where it knows how much KV cache it gets, and no further.
    """
    from vllm_memprof.launch.request import LaunchRequest, parse_device

    request = LaunchRequest(
        mode="plan",
        model=model,
        engine_args=ctx.meta[ENGINE_ARGS],
        device=parse_device(device),
        run_dir=run_dir,
        startup_timeout_s=startup_timeout,
        python=python,
        stack=stack,
        ranks=ranks,
        rank=rank,
        quiet=quiet,
        typed=["memprof", *sys.argv[1:]],
    )
    raise typer.Exit(shared.run(request, format_name))
