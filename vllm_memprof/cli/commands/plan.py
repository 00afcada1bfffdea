"""``memprof plan``: the engine up to its KV plan, and no further."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vllm_memprof.cli import fit as search
from vllm_memprof.cli import run as shared
from vllm_memprof.cli.arguments import ENGINE_ARGS, EngineCommand
from vllm_memprof.cli.show import Lang

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

app = typer.Typer(**shared.APP_SETTINGS)


@app.command(cls=EngineCommand, epilog=shared.EPILOG)
def plan(
    ctx: typer.Context,
    model: shared.Model,
    device: shared.Device = "auto",
    run_dir: shared.RunDir = None,
    format_name: shared.Format = "table",
    lang: Lang = "en",
    quiet: shared.Quiet = False,
    startup_timeout: shared.Timeout = shared.DEFAULT_TIMEOUT_S,
    python: shared.Python = None,
    stack: shared.Stack = None,
    ranks: Ranks = "auto",
    rank: Rank = None,
    fit: search.FitKnob = None,
    want: search.Wants = None,
    headroom: search.Headroom = None,
    between: search.Between = None,
    step: search.Step = None,
    no_cache: search.NoCache = False,
) -> None:
    """Size the KV cache, show the budget, stop.

    Brings the engine up to the point where it knows how much KV cache it gets, and no further.

    With --fit KNOB: the best value of one option, from plans of some of its values, each in a folder of its own. A
    plan holds what is wanted if every --want is met and --headroom is left beside the KV cache and the most that all
    else held. Plans on a simulated device that were made before are taken from the cache. Exit status 0: found.
    1: no value tried holds. 2: a wrong argument. 4: found, but values do not hold in order, so a better one may exist.
    """
    given = {
        "--want": want,
        "--headroom": headroom,
        "--between": between,
        "--step": step,
        "--no-cache": no_cache,
    }
    if fit is not None:
        own = {"device": device, "stack": stack, "python": python, "ranks": ranks, "rank": rank}
        asked = search.plan_of(model, ctx.meta[ENGINE_ARGS], own, startup_timeout)
        raise typer.Exit(
            search.fit(
                asked,
                fit,
                want or [],
                headroom,
                between,
                step,
                run_dir,
                format_name,
                lang,
                quiet,
                not no_cache,
            )
        )
    search.refuse_without_fit(given)
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
    raise typer.Exit(shared.run(request, format_name, lang))
