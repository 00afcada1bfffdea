"""``memprof plan --fit``: the best value of one option, from real plans."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_memprof.cli.plans import Asked, check_setup
from vllm_memprof.files import from_here

if TYPE_CHECKING:
    from vllm_memprof.plans.request import Plan

# The options of a search, declared beside the command that has them.
FitKnob = Annotated[
    str | None,
    typer.Option(
        "--fit",
        metavar="OPTION",
        help="Search the best value of an option: the fewest devices, the largest "
        "max-num-batched-tokens, max-num-seqs, max-model-len, gpu-memory-utilization, "
        "limit-mm-per-prompt.image or max-cudagraph-capture-size, the kv-cache-dtype with most "
        "bytes; any other numeric one with --between.",
    ),
]
Wants = Annotated[
    list[str] | None,
    typer.Option(
        "--want",
        metavar="W",
        help="A condition of --fit: tokens=500000, concurrency=8@32768, concurrency=8, "
        "kv-cache=40GiB; repeatable.",
    ),
]
Headroom = Annotated[
    str | None,
    typer.Option(
        "--headroom",
        metavar="SIZE",
        help="Device memory that must stay free at the peak.",
        show_default="with --until kv 0, else what the largest batches need",
    ),
]
Between = Annotated[
    str | None,
    typer.Option(
        "--between",
        metavar="LOW:HIGH",
        help="Range that --fit searches.",
        show_default="by OPTION and the model",
    ),
]
Step = Annotated[
    str | None,
    typer.Option(
        "--step", metavar="N", help="Step between two values of --fit.", show_default="by OPTION"
    ),
]
Goal = Annotated[
    str | None,
    typer.Option(
        "--goal", metavar="G", help="largest or smallest value of --fit.", show_default="by OPTION"
    ),
]
NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Do not read or write the cache of plans."),
]

#: Exit status: no value tried meets every condition.
NO_ANSWER = 1
#: Exit status: an answer, and values that do not stand in order.
NOT_IN_ORDER = 4


def fit(
    asked: Asked,
    plan: Plan,
    knob_name: str,
    wants: list[str],
    headroom: str | None,
    between: str | None,
    step: str | None,
    goal: str | None,
) -> int:
    """Search, print the result, and return the exit status.

    Raises:
        MemprofError: a wrong argument, or a search that cannot be begun.
    """
    from vllm_memprof.plans.fit import FitJob, run_fit
    from vllm_memprof.plans.knobs import (
        SearchRequest,
        find_knob,
        parse_range,
        parse_step,
        refuse_needless,
    )
    from vllm_memprof.plans.store import model_config
    from vllm_memprof.plans.wants import lengths, parse_wants

    knob = find_knob(knob_name, between, goal)
    refuse_needless(knob, plan.engine_args)
    wanted = parse_wants(wants, headroom, plan.own.get("until"))
    low_high, each = parse_range(between), parse_step(step)
    check_setup(plan)
    space = knob.values(SearchRequest(model_config(plan.model, plan.engine_args), *low_high, each))
    plan = replace(plan, lengths=lengths(wanted))
    found, folder = asked.answer(
        f"{plan.model.rstrip('/')}-fit-{knob.name}",
        "fit.json",
        lambda command, runner: run_fit(FitJob(plan, knob, space, wanted, command), runner),
    )
    best = found.best
    where = folder if best is None else folder / (best.row.run or "")
    what = "the plans are" if best is None else "the plan of the answer is"
    print(f"memprof: {what} in {from_here(where)}", file=sys.stderr)
    if best is None:
        return NO_ANSWER
    return 0 if found.ordered else NOT_IN_ORDER
