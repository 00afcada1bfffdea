"""``memprof fit``: the best value of one option, from real plans."""

from __future__ import annotations

from dataclasses import replace

import typer

from vllm_memprof.cli import plans
from vllm_memprof.cli.options import ANSWER, RANKS, command_app
from vllm_memprof.cli.show import say
from vllm_memprof.files import from_here
from vllm_memprof.plans.documents import fit_document
from vllm_memprof.plans.fit import run_fit
from vllm_memprof.plans.knobs import DEVICES, find_knob, search_request
from vllm_memprof.plans.store import model_config
from vllm_memprof.plans.wants import lengths, parse_wants

#: Exit status: no value tried meets every condition.
NO_ANSWER = 1
#: Exit status: an answer, and values that do not stand in order.
NOT_IN_ORDER = 4


def fit(
    ctx: typer.Context,
    find: str,
    want: list[str] | None = None,
    headroom: str | None = None,
    between: str | None = None,
    step: str | None = None,
    goal: str | None = None,
    **options: object,
) -> None:
    """Search the best value of one option by planning some of its values.

    A plan passes if the engine starts and survives its largest batches (with --until kv: if it
    comes up to its KV plan), every --want is met, and at least --headroom stays free at the peak.

    --until is ready, with --ranks edges kv; --headroom is 0 with --until kv, else what the largest
    batches need.

    Exit status 0: found. 1: no value that was tried passes. 2: a wrong argument. 4: found, but
    values do not pass in order, so a better one may exist.
    """
    until = ctx.params["until"] or ("kv" if ctx.params["ranks"] == "edges" else "ready")
    plan = plans.requested_plan(ctx, until=until)
    knob = find_knob(find, between, goal, plan.engine_args)
    wanted = parse_wants(want or [], headroom, until)
    asked = search_request(between, step)
    plans.check_setup(plan)
    asked = asked._replace(
        config=model_config(plan.model, plan.engine_args),
        unit=plan.vary(knob.option, "1").devices if knob.name == DEVICES else 1,
    )
    space = knob.space(asked)
    plan = replace(plan, lengths=lengths(wanted))
    found, folder = plans.answer(
        ctx,
        f"{plan.model.rstrip('/')}-fit-{knob.name}",
        lambda runner: run_fit(plan, knob, space, wanted, runner),
        fit_document,
    )
    best = found.best
    where = folder if best is None else folder / (best.plan.run or "")
    what = "the plans are" if best is None else "the plan of the answer is"
    say(f"{what} in {from_here(where)}")
    if best is None or not found.ordered:
        raise typer.Exit(NO_ANSWER if best is None else NOT_IN_ORDER)


app = command_app(fit, {**ANSWER, **RANKS, "until": (str, "")})
