"""A search: plans of one option's values until the best one that meets every condition is found."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_memprof.engines import engine_row
from vllm_memprof.options import setting
from vllm_memprof.plans.bisection import HOLDS, TOO_MUCH, bisect
from vllm_memprof.plans.first_failure import beyond
from vllm_memprof.plans.knobs import BISECT, EACH, SMALLEST, FitKnob, SearchRange
from vllm_memprof.plans.request import Plan, folder_name
from vllm_memprof.plans.rows import KV, READY, FirstFailure, Fit, Try
from vllm_memprof.plans.runner import PlanRunner
from vllm_memprof.plans.wants import Want, misses
from vllm_memprof.text import text

#: Said below every answer of a bisection.
ASSUMED = text("values between those tried are taken to follow their neighbours")
UNORDERED = text(
    "not in order: a value passes beyond one that does not, so a value that was not tried may be "
    "better; memprof sweep tries all of them"
)
AFTER_THE_PLAN = text(
    "the plans stop at the KV plan: whether a value survives serving was not tried (--until ready "
    "tries it); what comes after the plan (captured graphs, pools that are first used in the "
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


@dataclass
class FitJob:
    """A search as requested."""

    plan: Plan  # without the knob
    knob: FitKnob
    space: SearchRange
    wants: list[Want]


def run_fit(job: FitJob, runner: PlanRunner) -> Fit:
    """Search; every plan is made in a folder of its own, or taken from the store.

    Raises:
        Interrupted: by a signal; what was made until then is kept in the store.
    """
    plan, knob, option = job.plan, job.knob, job.knob.option.removeprefix("--")
    bisected = knob.search == BISECT
    values = job.space.values
    if bisected and knob.goal == SMALLEST:
        values = values[::-1]
    tries: dict[str, Try] = {}  # by value, in their order

    def probe(value: str) -> int:
        if value not in tries:
            number = len(tries)
            varied = replace(plan.vary(option, value), values={knob.name: value})
            row = runner.make_one(number, varied, folder_name(number + 1, varied))
            tries[value] = Try(value, row, misses(row, job.wants))
        return knob.verdict(tries[value].missing)

    first, answer, ordered = values[-1 if bisected else 0], None, True
    notes: list[str] = []
    probe(first)
    if any(miss.kind == "refused" for miss in tries[first].missing):
        notes.append(text("the first plan was refused, for a reason that no value changes"))
    elif bisected:
        answer, ordered = bisect(values, probe)
        end = text("{value} is the end of the range: --between LOW:HIGH looks beyond it",
                   value=answer)  # fmt: skip
        notes.append(end if answer == values[-1] else ASSUMED)
    else:
        passing = (value for value in values if probe(value) == HOLDS)
        answer = next(passing, None)
        if knob.search == EACH:
            _ = [*passing]  # the others are tried as well
    if answer is None:
        notes.append(text("no value tried passes"))
    if not ordered:
        notes.append(UNORDERED)
    limit, flag = _beyond(job, values, answer, tries, runner), None
    if answer is not None:
        negatable = engine_row(plan.engine).arguments.negatable
        flag = shlex.join(setting(plan.engine_args, option, answer, negatable))
    if bisected:
        notes += _uneven([tries[value] for value in values if value in tries], limit)
    until = plan.own.get("until", KV)
    found = Fit(
        model=plan.model,
        knob=knob.name,
        option=knob.option,
        goal=knob.goal,
        wanted=[REACHED[until], *(want.text for want in job.wants)],
        low=job.space.values[0],
        high=job.space.values[-1],
        step=job.space.step,
        tries=[*tries.values()],
        answer=answer,
        ordered=ordered,
        flag=flag,
        until=until,
        beyond=limit,
    )
    return replace(found, notes=[*notes, *_what_passing_means(found)])


def _beyond(
    job: FitJob,
    values: Sequence[str],
    answer: str | None,
    tries: Mapping[str, Try],
    runner: PlanRunner,
) -> FirstFailure | None:
    """Return why the search ends where it does: the value after the answer, or without an answer
    the most modest one that was too much; None where the answer is the last value."""
    if answer is None:
        verdicts = ((value, job.knob.verdict(each.missing)) for value, each in tries.items())
        too_much = [value for value, verdict in verdicts if verdict == TOO_MUCH]
        value = min(too_much, key=values.index, default=[*tries][-1])
    else:  # where the first value that passes is the best, the more ambitious stand before it
        place = values.index(answer) + (1 if job.knob.search == BISECT else -1)
        value = values[place] if 0 <= place < len(values) else ""
    if value not in tries or tries[value].holds:
        return None
    best = None if answer is None else runner.report(tries[answer].plan)
    return beyond(tries[value], runner.report(tries[value].plan), best)


def _uneven(tries: Sequence[Try], limit: FirstFailure | None) -> list[str]:
    """Return a note where the next value lacks less than a figure is seen to vary against the
    order: between values that were not tried the verdict may then change more than once."""
    if limit is None or limit.kind not in ("oom", "want") or limit.short_bytes is None:
        return []  # not short of headroom
    sizes = [each.plan.headroom_bytes for each in tries if each.plan.headroom_bytes is not None]
    rise = max((b - a for a, b in itertools.combinations(sizes, 2)), default=0)
    if rise <= 0 or limit.short_bytes > rise:
        return []
    return [
        text(
            "not even: the headroom rises by up to {rise:gib4} GiB from a value tried to one "
            "beyond it, and {value} is {short:gib4} GiB short, so a value that was not tried may "
            "be better; memprof sweep tries all of them",
            rise=rise,
            value=limit.value,
            short=limit.short_bytes,
        )
    ]


def _what_passing_means(found: Fit) -> list[str]:
    if found.until != READY:
        return [AFTER_THE_PLAN]
    if found.best is None:
        return []
    row, notes = found.best.plan, list[str]()
    step, headroom = row.step, row.headroom_bytes or 0
    if step is None or not row.survived:
        tried = text(
            "the answer starts; whether it survives was not tried, its largest batches were not "
            "run: {why}",
            why=(step and step.not_run) or text("not recorded"),
        )
        notes.append(tried)
    elif (step.prefill_tokens or 0) < step.max_num_batched_tokens:
        smaller = text(
            "the answer's largest step had {tokens:,} tokens of {limit:,}: more have no room in "
            "the KV cache, or in max-num-seqs requests of max-model-len",
            tokens=step.prefill_tokens,
            limit=step.max_num_batched_tokens,
        )
        notes.append(smaller)
    if headroom < 0:
        released = text(
            "the answer survived as the allocator released blocks and workspace that nothing used: "
            "headroom {headroom:gib4} GiB; --headroom 0 asks for room for all of them",
            headroom=headroom,
        )
        notes.append(released)
    return notes
