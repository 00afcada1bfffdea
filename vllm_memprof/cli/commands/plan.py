"""``memprof plan``: the engine up to its KV plan, and no further."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import typer

from vllm_memprof.cli import calibrate as hardware
from vllm_memprof.cli import fit as search
from vllm_memprof.cli import run as shared
from vllm_memprof.cli import share as division
from vllm_memprof.cli.arguments import ENGINE_ARGS
from vllm_memprof.cli.plans import FORMATS, Asked
from vllm_memprof.cli.show import Lang, check_format, command_app
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
    str | None,
    typer.Option(
        "--until",
        metavar="U",
        help="kv: stop at the KV plan; ready: go on, and run the largest batches.",
        show_default="kv; with --fit ready, with --ranks edges kv",
    ),
]
Rank = Annotated[
    int | None, typer.Option("--rank", metavar="K", help="The rank that --ranks one runs.")
]


def require_plan(engine: str) -> None:
    """Refuse an engine that cannot be planned, before anything is made.

    Raises:
        UsageError: no such engine, or it has no plan.
    """
    from vllm_memprof.engines import engine_row

    row = engine_row(engine)
    if "plan" not in row.modes:
        raise UsageError(
            f"memprof plan does not run {row.title} yet",
            hint=f"memprof offline --engine {row.name} prints the same budget after a start, "
            "memprof explain that of a log",
        )


#: Question to many plans -> the options that it takes beside those of every plan; None: one plan.
_TAKES: dict[str | None, set[str]] = {
    "--fit": {"--want", "--headroom", "--between", "--step", "--goal", "--no-cache", "--rank"},
    "--calibrate": {"--no-cache", "--rank"},
    "--share": {"--want", "--headroom", "--no-cache", "--beside"},
    None: {"--keep-secrets", "--share-device", "--rank"},
}


def require_one_question(given: Collection[str], engine: str) -> str | None:
    """Return the question that is asked of many plans; None: it is one plan.

    Args:
        given: the options that were given.
        engine: of the plans.

    Raises:
        UsageError: two questions, an option that belongs to another one, or an engine without.
    """
    from vllm_memprof.engines import engine_row
    from vllm_memprof.engines.base import refuse

    asked = [name for name in _TAKES if name in given]
    if asked == ["--fit", "--calibrate"]:
        raise UsageError(
            "--fit and --calibrate do not go together",
            hint="--calibrate keeps the corrected profile: --fit with --device "
            "sim:<folder>/calibrated.toml",
        )
    if len(asked) > 1:
        raise UsageError(f"{asked[0]} does not go with {asked[1]}")
    question = asked[0] if asked else None
    for name in given:
        owners = [owner for owner, options in _TAKES.items() if name in options]
        if not owners or question in owners:
            continue
        if question is None:
            hint = "e.g. --fit devices; see memprof plan --help"
            raise UsageError(f"{name} means nothing without {owners[0]}", hint=hint)
        if owners == [None]:
            raise UsageError(f"{name} is for one run: it does not go with {question}")
        raise UsageError(f"{name} does not go with {question}")
    if question is not None:
        refuse(engine_row(engine), question)
    return question


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
    until: Until = None,
    share_device: shared.ShareDevice = False,
    fit: search.FitKnob = None,
    want: search.Wants = None,
    headroom: search.Headroom = None,
    between: search.Between = None,
    step: search.Step = None,
    goal: search.Goal = None,
    no_cache: search.NoCache = False,
    calibrate: hardware.Calibrate = None,
    share: division.ShareFlag = False,
    beside: division.Beside = None,
) -> None:
    """Size the KV cache, show the budget, stop.

    Starts the engine up to the point where the KV cache is sized, and no further. With --until
    ready it goes on: KV cache, warm-up, graph capture, the largest batch of images where the model
    takes some, a prefill of max-num-batched-tokens and a decode of max-num-seqs requests at full
    length. What is held beside the KV cache while it serves is then seen.

    With --fit OPTION, searches the best value of one option by planning some of its values, each
    in a run folder of its own. A plan passes if the engine starts and survives its largest batches
    (with --until kv: if it comes up to its KV plan), every --want is met, and at least --headroom
    stays free at the peak. The first value that does not pass is shown with what it lacks. Plans on
    a simulated device that were made before are taken from the cache.

    With --calibrate RUN_OR_LOG, corrects what a simulated device models outside torch by a run or
    log of the same family of models from an NPU: plans that run's own command, compares owner by
    owner, and gives the answer with and without the corrections. The corrected profile is kept for
    further plans, --fit and sweep.

    Exit status of --fit: 0 found; 1 no value that was tried passes; 2 a wrong argument; 4 found,
    but larger and smaller values do not pass in order, so a better value may exist.

    With --share, divides one simulated device between instances, MODEL_A [arguments] -- MODEL_B
    [arguments]: plans each alone, computes utilizations with which all start and survive, and
    starts all beside each other with them. Each gets what its --want says, and the rest in equal
    parts of bytes. Exit status: 0 found; 1 none; 2 a wrong argument.
    """
    from vllm_memprof.plans.rows import KV, READY

    require_plan(engine)
    given = {
        param.opts[0]
        for param in ctx.command.params
        if getattr(ctx.get_parameter_source(param.name or ""), "name", "") == "COMMANDLINE"
    }
    question = require_one_question(given, engine)
    if question is not None:
        check_format(format_name, lang=lang, formats=FORMATS)
    many = Asked(run_dir, format_name, lang, quiet, not no_cache)
    own: dict[str, object] = {"device": device, "stack": stack, "python": python}
    if question == "--share":
        instances = ctx.meta[division.INSTANCES]
        raise typer.Exit(division.share(many, instances, own, startup_timeout, beside, headroom))
    until = until or (READY if question == "--fit" and ranks != "edges" else KV)
    sample = "1" if until == READY else None
    request = shared.request("plan", ctx, run_dir=run_dir, until=until, sample=sample)
    if question is None:
        raise typer.Exit(shared.run(request, format_name, lang))
    from vllm_memprof.plans.request import Plan

    own |= {"engine": engine, "ranks": ranks, "rank": rank, "until": until}
    asked = Plan.asked(model, ctx.meta[ENGINE_ARGS], own, startup_timeout)
    if fit is not None:
        status = search.fit(many, asked, fit, want or [], headroom, between, step, goal)
    else:
        status = hardware.calibrated(many, asked, calibrate or "")
    raise typer.Exit(status)


app = command_app(plan, cls=division.PlanCommand, epilog=shared.EPILOG)
