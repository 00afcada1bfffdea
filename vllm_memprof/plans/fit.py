"""A search: plans of one option's values until the best one that meets every condition is found."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace

from vllm_memprof.options import setting
from vllm_memprof.plans.first_failure import beyond
from vllm_memprof.plans.knobs import (
    BISECT,
    EACH,
    HOLDS,
    SMALLEST,
    TOO_MUCH,
    FitKnob,
    SearchRange,
    bisect,
)
from vllm_memprof.plans.model import KV, READY, Fit, Plan, Try, folder_name
from vllm_memprof.plans.runner import PlanRunner
from vllm_memprof.plans.wants import Want, misses
from vllm_memprof.text import text
from vllm_memprof.units import only_known

#: Said below every answer of a bisection.
ASSUMED = text("values between those tried are taken to follow their neighbours")
UNORDERED = text(
    "not in order: a value passes beyond one that does not, so a value that was not tried may be "
    "better; memprof sweep tries all of them"
)
AFTER_THE_PLAN = text(
    "the plans stop at the KV plan: whether a value survives serving was not tried (--until ready "
    "tries it); what comes after the plan (graph memory, pools that are first used in the "
    "warm-up) is not in the headroom: ask for it with --headroom"
)
#: What every plan has to reach, by where it stops.
REACHED = {
    KV: text("the engine comes up to its KV plan"),
    READY: text(
        "the engine starts and survives its largest batches: a prefill of max-num-batched-tokens, "
        "a decode of max-num-seqs requests"
    ),
}


def run_fit(
    plan: Plan, knob: FitKnob, space: SearchRange, wants: list[Want], runner: PlanRunner
) -> Fit:
    """Search; every plan is made in a folder of its own, or taken from the store.

    Args:
        plan: without the knob.
        knob: whose best value is searched.
        space: its values.
        wants: what every plan has to meet.
        runner: makes the plans.

    Raises:
        Interrupted: by a signal; what was made until then is kept in the store.
    """
    option, bisected = knob.option.removeprefix("--"), knob.search == BISECT
    values = space.values[:: -1 if bisected and knob.goal == SMALLEST else 1]
    tries: dict[str, Try] = {}  # by value, in their order

    def probe(value: str) -> int:
        if value not in tries:
            number = len(tries)
            varied = replace(
                plan.vary(option, space.given.get(value, value)), values={knob.name: value}
            )
            row = runner.make_one(number, varied, folder_name(number + 1, varied))
            tries[value] = Try(value, row, misses(row, wants))
        return knob.verdict(tries[value].missing)

    first, answer, ordered, flag = values[-1 if bisected else 0], None, True, None
    probe(first)
    refused = any(miss.kind == "refused" for miss in tries[first].missing)
    if bisected and not refused:
        answer, ordered = bisect(values, probe)
    elif not refused:
        passing = (value for value in values if probe(value) == HOLDS)
        answer = next(passing, None)
        if knob.search == EACH:
            _ = [*passing]  # the others are tried as well
    if answer is None:  # the most modest value that was too much
        too_much = (each for each in values if each in tries and probe(each) == TOO_MUCH)
        after = next(too_much, [*tries][-1])
    else:  # the next more ambitious one; where the first that passes is the best, the one before
        place = values.index(answer) + (1 if bisected else -1)
        after = values[place] if 0 <= place < len(values) else answer
        flag = shlex.join(setting(plan.engine_args, option, space.given.get(answer, answer)))
    failed, best, limit = tries.get(after), tries.get(answer or ""), None
    report = None if best is None else runner.report(best.plan)
    if failed is not None and not failed.holds:
        limit = beyond(failed, runner.report(failed.plan), report)
    # Where the next value lacks less headroom than a figure is seen to vary against the order, the
    # verdict may change more than once between values that were not tried.
    sizes = only_known(tries[value].plan.headroom_bytes for value in values if value in tries)
    rise = max((b - a for a, b in itertools.combinations(sizes, 2)), default=0)
    until = plan.own.get("until", KV)
    notes = [
        refused and text("the first plan was refused, for a reason that no value changes"),
        answer is None and text("no value tried passes"),
        bisected and not refused and answer != values[-1] and ASSUMED,
        bisected
        and answer == values[-1]
        and text("{value} is the end of the range: --between LOW:HIGH looks beyond it",
                 value=answer),
        not ordered and UNORDERED,
        bisected
        and limit is not None
        and limit.kind in ("oom", "want")  # short of headroom
        and 0 < (limit.short_bytes or 0) <= rise
        and text(
            "not even: the headroom rises by up to {rise:gib4} GiB from a value tried to one "
            "beyond it, and {value} is {short_bytes:gib4} GiB short, so a value that was not tried "
            "may be better; memprof sweep tries all of them",
            limit,
            rise=rise,
        ),
        report is not None
        and report.replicas > 1
        and text("KV tokens and concurrency are those of each of {replicas} replicas", report),
        *_what_passing_means(until, best),
    ]  # fmt: skip
    return Fit(
        model=plan.model,
        knob=knob.name,
        option=knob.option,
        goal=knob.goal,
        wanted=[REACHED[until], *(want.text for want in wants)],
        low=space.values[0],
        high=space.values[-1],
        step=space.step,
        tries=[*tries.values()],
        answer=answer,
        ordered=ordered,
        flag=flag,
        until=until,
        beyond=limit,
        notes=[note for note in notes if isinstance(note, str)],
    )


def _what_passing_means(until: str, best: Try | None) -> list[str | bool]:
    if until != READY or best is None:
        return [until != READY and AFTER_THE_PLAN]
    row, step = best.plan, best.plan.step
    why = text("not recorded") if step is None else step.not_run
    return [
        not row.survived
        and text(
            "the answer starts; whether it survives was not tried, its largest batches were not "
            "run: {why}",
            why=why,
        ),
        step is not None
        and 0 < (step.prefill_tokens or 0) < step.max_num_batched_tokens
        and text(
            "the answer's largest step had {prefill_tokens:,} tokens of {max_num_batched_tokens:,}:"
            " more have no room in the KV cache, or in max-num-seqs requests of max-model-len",
            step,
        ),
        (row.headroom_bytes or 0) < 0
        and text(
            "the answer survived as the allocator released blocks and workspace that nothing used: "
            "headroom {headroom_bytes:gib4} GiB; --headroom 0 asks for room for all of them",
            row,
        ),
    ]
