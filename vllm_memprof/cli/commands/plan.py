"""``memprof plan``: the engine up to its KV plan, and no further."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_memprof.cli import fit as search
from vllm_memprof.cli import run as shared
from vllm_memprof.cli import share as division
from vllm_memprof.cli.arguments import ENGINE_ARGS
from vllm_memprof.cli.show import Lang
from vllm_memprof.errors import UsageError

Ranks = Annotated[
    str,
    typer.Option(
        "--ranks",
        metavar="R",
        help="Ranks to run: one, all, edges (first, last, differing); auto: all if they fit.",
    ),
]
Until = Annotated[
    str,
    typer.Option(
        "--until",
        metavar="U",
        help="kv: stop at the KV plan; ready: go on, and run the largest batches.",
    ),
]
Rank = Annotated[
    int | None, typer.Option("--rank", metavar="K", help="The rank that --ranks one runs.")
]

app = typer.Typer(**shared.APP_SETTINGS)


def require_plan(engine: str) -> None:
    """Refuse an engine that cannot be planned, before anything is made.

    Raises:
        UsageError: no such engine, or it has no plan.
    """
    from vllm_memprof.launch.engines import engine_row

    row = engine_row(engine)
    if "plan" not in row.modes:
        raise UsageError(
            f"memprof plan does not run {row.title} yet",
            hint=f"memprof offline --engine {row.name} prints the same budget after a start, "
            "memprof explain that of a log",
        )


@app.command(cls=division.PlanCommand, epilog=shared.EPILOG)
def plan(
    ctx: typer.Context,
    model: shared.Model,
    engine: shared.Engine = "vllm",
    device: shared.Device = "auto",
    run_dir: shared.RunDir = None,
    format_name: shared.Format = "table",
    lang: Lang = "en",
    quiet: shared.Quiet = False,
    keep_secrets: shared.KeepSecrets = False,
    startup_timeout: shared.Timeout = shared.DEFAULT_TIMEOUT_S,
    python: shared.Python = None,
    stack: shared.Stack = None,
    ranks: Ranks = "auto",
    rank: Rank = None,
    until: Until = "kv",
    share_device: shared.ShareDevice = False,
    fit: search.FitKnob = None,
    want: search.Wants = None,
    headroom: search.Headroom = None,
    between: search.Between = None,
    step: search.Step = None,
    no_cache: search.NoCache = False,
    share: division.ShareFlag = False,
    beside: division.Beside = None,
) -> None:
    """Size the KV cache, show the budget, stop.

    Starts the engine up to the point where the KV cache is sized, and no further. With --until
    ready it goes on: KV cache, warm-up, graph capture, a prefill of max-num-batched-tokens and a
    decode of max-num-seqs requests at full length. What is held beside the KV cache while it serves
    is then seen.

    With --fit OPTION, searches the best value of one option by planning some of its values, each
    in a run folder of its own. A plan passes if every --want is met and at least --headroom stays
    free at the peak. Plans on a simulated device that were made before are taken from the cache.

    Exit status of --fit: 0 found; 1 no value that was tried passes; 2 a wrong argument; 4 found,
    but larger and smaller values do not pass in order, so a better value may exist.

    With --share, divides one simulated device between instances, MODEL_A [arguments] -- MODEL_B
    [arguments]: plans each alone, computes utilizations with which all start and survive, and
    starts all beside each other with them. Each gets what its --want says, and the rest in equal
    parts of bytes. Exit status: 0 found; 1 none; 2 a wrong argument.
    """
    require_plan(engine)
    given = {
        "--want": want,
        "--headroom": headroom,
        "--between": between,
        "--step": step,
        "--no-cache": no_cache,
    }
    if share:
        from vllm_memprof.launch.engines import engine_row, refuse

        refuse(engine_row(engine), "--share")
        refused = {
            "--fit": fit, "--keep-secrets": keep_secrets, "--share-device": share_device,
            "--rank": rank is not None, "--between": between, "--step": step,
        }  # fmt: skip
        for name in (name for name, value in refused.items() if value):
            raise UsageError(f"{name} does not go with --share")
        status = division.share(
            ctx.meta[division.INSTANCES], {"device": device, "stack": stack, "python": python},
            startup_timeout, beside, headroom, run_dir, format_name, lang, quiet, not no_cache,
        )  # fmt: skip
        raise typer.Exit(status)
    if beside is not None:
        raise UsageError("--beside means nothing without --share")
    if fit is not None:
        from vllm_memprof.launch.engines import engine_row, refuse
        from vllm_memprof.plans.request import Plan

        refuse(engine_row(engine), "--fit")
        if keep_secrets:
            raise UsageError("--keep-secrets is for one run: it does not go with --fit")
        if share_device:
            raise UsageError("--share-device is for one run: it does not go with --fit")
        own = {
            "device": device, "stack": stack, "python": python, "ranks": ranks, "rank": rank,
            "until": until,
        }  # fmt: skip
        asked = Plan.asked(model, ctx.meta[ENGINE_ARGS], own, startup_timeout)
        status = search.fit(
            asked, fit, want or [], headroom, between, step,
            run_dir, format_name, lang, quiet, not no_cache,
        )  # fmt: skip
        raise typer.Exit(status)
    for name, value in given.items():
        if value:
            hint = "e.g. --fit devices; see memprof plan --help"
            raise UsageError(f"{name} means nothing without --fit", hint=hint)
    request = shared.request(
        "plan", ctx, model, device, run_dir, startup_timeout, python, stack, quiet, keep_secrets,
        ranks=ranks, rank=rank, share_device=share_device, engine=engine, until=until,
        sample="1" if until == "ready" else None,
    )  # fmt: skip
    raise typer.Exit(shared.run(request, format_name, lang))
