"""A search: plans of one option's values until the best one that meets every condition is found."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_memprof.engines import engine_row
from vllm_memprof.options import setting
from vllm_memprof.plans.bisection import TOO_MUCH, BisectionResult, bisect, each, from_the_least
from vllm_memprof.plans.first_failure import beyond
from vllm_memprof.plans.knobs import BISECT, EACH, UNTIL_ONE, FitKnob, SearchRange
from vllm_memprof.plans.request import Plan, folder_names
from vllm_memprof.plans.rows import KV, READY, FirstFailure, Fit, Try
from vllm_memprof.plans.runner import PlanRunner
from vllm_memprof.plans.wants import Miss, Want, misses
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
_SEARCHES = {BISECT: bisect, UNTIL_ONE: from_the_least, EACH: each}


class _Refused(Exception):
    """The first plan was refused for a reason that no value changes."""


@dataclass
class FitJob:
    """A search as requested."""

    plan: Plan  # without the knob
    knob: FitKnob
    space: SearchRange
    wants: list[Want]
    command: list[str]  # as typed, secrets redacted

    @property
    def until(self) -> str:
        return self.plan.own.get("until", KV)


def run_fit(job: FitJob, runner: PlanRunner) -> Fit:
    """Search; every plan is made in a folder of its own, or taken from the store.

    Raises:
        Interrupted: by a signal; what was made until then is kept in the store.
    """
    started_s = time.monotonic()
    knob, option = job.knob, job.knob.option.removeprefix("--")
    tries, missing = dict[str, Try](), dict[str, list[Miss]]()  # by value, in their order

    def probe(value: str) -> int:
        number = len(tries)
        plan = replace(job.plan.vary(option, value), values={knob.name: value})
        row = runner.make_one(number, plan, f"{number + 1:02d}{folder_names([plan])[0][2:]}")
        missing[value] = misses(row, job.wants)
        texts = [miss.text for miss in missing[value]]
        tries[value] = Try(value, row, not texts, texts)
        if number == 0 and _is_refused(missing[value]):
            raise _Refused
        return knob.verdict(missing[value])

    try:
        found = _SEARCHES[knob.search](job.space.values, probe)
    except _Refused:
        found = BisectionResult(None, {}, ordered=True)
    limit, flag = _beyond(job, found, tries, missing, runner), None
    if found.answer is not None:
        negatable = engine_row(job.plan.engine).arguments.negatable
        flag = shlex.join(setting(job.plan.engine_args, option, found.answer, negatable))
    return Fit(
        model=job.plan.model,
        command=job.command,
        knob=knob.name,
        option=knob.option,
        goal=knob.goal,
        wanted=[REACHED[job.until], *(want.text for want in job.wants)],
        low=job.space.low,
        high=job.space.high,
        step=job.space.step,
        tries=[*tries.values()],
        answer=found.answer,
        ordered=found.ordered,
        seconds=round(time.monotonic() - started_s, 1),
        notes=[
            *_how_searched(job, found, missing),
            *_uneven(job, tries, missing, limit),
            *_what_passing_means(job, tries.get(found.answer or "")),
        ],
        flag=flag,
        until=job.until,
        beyond=limit,
    )


def _is_refused(missing: Sequence[Miss]) -> bool:
    return any(miss.kind == "refused" for miss in missing)


def _beyond(
    job: FitJob,
    found: BisectionResult,
    tries: Mapping[str, Try],
    missing: Mapping[str, list[Miss]],
    runner: PlanRunner,
) -> FirstFailure | None:
    """Return why the search ends where it does: the value after the answer, or without an answer
    the most modest one that was too much; None where the answer is the last value."""
    values = job.space.values
    if found.answer is None:
        too_much = (value for value in values if found.tried.get(value) == TOO_MUCH)
        value = next(too_much, [*tries][-1])
    else:  # where the first value that passes is the best, the more ambitious stand before it
        place = values.index(found.answer) + (1 if job.knob.search == BISECT else -1)
        value = values[place] if 0 <= place < len(values) else ""
    if value not in tries or tries[value].holds:
        return None
    best = tries.get(found.answer or "")
    answer = None if best is None else runner.report(best.plan)
    return beyond(value, runner.report(tries[value].plan), missing[value], answer)


def _how_searched(
    job: FitJob, found: BisectionResult, missing: Mapping[str, list[Miss]]
) -> list[str]:
    if found.answer is None and _is_refused(next(iter(missing.values()))):
        notes: list[str] = [text("the first plan was refused, for a reason that no value changes")]
    elif found.answer is None and job.knob.search == BISECT:
        notes = [text("no value tried passes"), ASSUMED]
    elif found.answer is None:
        notes = [text("no value passes")]
    elif job.knob.search == EACH:
        notes = [text("every value was tried")]
    elif job.knob.search == UNTIL_ONE:
        notes = [text("every smaller number that the heads allow was tried")]
    elif found.answer == job.space.values[-1]:
        end = text(
            "{value} is the end of the range: --between LOW:HIGH looks beyond it",
            value=found.answer,
        )
        notes = [end]
    else:
        notes = [ASSUMED]
    return notes if found.ordered else [*notes, UNORDERED]


def _uneven(
    job: FitJob,
    tries: Mapping[str, Try],
    missing: Mapping[str, list[Miss]],
    limit: FirstFailure | None,
) -> list[str]:
    """Return a note where the next value lacks less than a figure is seen to vary against the
    order: between values that were not tried the verdict may then change more than once."""
    if limit is None or limit.short_bytes is None or job.knob.search != BISECT:
        return []
    if limit.kind != "oom" and all(miss.kind != "headroom" for miss in missing[limit.value]):
        return []  # not short of headroom
    tried = (tries[value].plan.headroom_bytes for value in job.space.values if value in tries)
    sizes = [size for size in tried if size is not None]
    rise = max((b - a for i, a in enumerate(sizes) for b in sizes[i + 1 :]), default=0)
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


def _what_passing_means(job: FitJob, best: Try | None) -> list[str]:
    if job.until != READY:
        return [AFTER_THE_PLAN]
    if best is None:
        return []
    row, notes = best.plan, list[str]()
    if not row.survived:
        tried = text(
            "the answer starts; whether it survives was not tried, its largest batches were not "
            "run: {why}",
            why=row.not_run or text("not recorded"),
        )
        notes.append(tried)
    elif (row.step_tokens or 0) < (row.step_limit or 0):
        step = text(
            "the answer's largest step had {tokens:,} tokens of {limit:,}: more have no room in "
            "the KV cache, or in max-num-seqs requests of max-model-len",
            tokens=row.step_tokens,
            limit=row.step_limit,
        )
        notes.append(step)
    if (row.headroom_bytes or 0) < 0:
        headroom = text(
            "the answer survived as the allocator released blocks and workspace that nothing used: "
            "headroom {headroom:gib4} GiB; --headroom 0 asks for room for all of them",
            headroom=row.headroom_bytes,
        )
        notes.append(headroom)
    return notes
