"""A search: plans of one option's values until the best one that meets every condition is found."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import Report
from vllm_memprof.engines import engine_row
from vllm_memprof.errors import MemprofError
from vllm_memprof.options import setting
from vllm_memprof.plans.bisection import TOO_MUCH, BisectionResult, bisect, each, from_the_least
from vllm_memprof.plans.first_failure import TriedPlan, beyond
from vllm_memprof.plans.knobs import BISECT, EACH, UNTIL_ONE, FitKnob, SearchRange
from vllm_memprof.plans.plan_folder import write_row
from vllm_memprof.plans.pool import Pool, Task
from vllm_memprof.plans.request import Plan, folder_names
from vllm_memprof.plans.rows import KV, READY, FirstFailure, Fit, PlanRow, Try
from vllm_memprof.plans.store import Store, key_of
from vllm_memprof.plans.sweep import PLANS_DIR, SweepProgress
from vllm_memprof.plans.wants import Miss, Want, misses
from vllm_memprof.record.loader import load_run
from vllm_memprof.record.schema import RUN_FILE
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
    folder: Path
    command: list[str]  # as typed, secrets redacted
    store: Store | None = None

    @property
    def until(self) -> str:
        return self.plan.own.get("until", KV)


@dataclass
class _Tries:
    """What was tried, in its order."""

    rows: list[Try] = field(default_factory=list)
    missing: dict[str, list[Miss]] = field(default_factory=dict)  # by value
    verdicts: dict[str, int] = field(default_factory=dict)


def run_fit(job: FitJob, pool: Pool, progress: SweepProgress) -> Fit:
    """Search; every plan is made in a folder of its own, or taken from the store.

    Raises:
        Interrupted: by a signal; what was made until then is kept in the store.
    """
    started_s = time.monotonic()
    tries = _Tries()

    def probe(value: str) -> int:
        row = _row(job, value, len(tries.rows), pool, progress)
        missing = misses(row, job.wants)
        tries.rows.append(Try(value, row, not missing, [miss.text for miss in missing]))
        tries.missing[value] = missing
        tries.verdicts[value] = job.knob.verdict(missing)
        if len(tries.rows) == 1 and job.knob.search == BISECT and _is_refused(missing):
            raise _Refused
        return tries.verdicts[value]

    try:
        found = _SEARCHES[job.knob.search](job.space.values, probe)
    except _Refused:
        found = BisectionResult(None, dict(tries.verdicts), ordered=True)
    limit = _beyond(job, found, tries)
    flag = None
    if found.answer is not None:
        name = job.knob.option.removeprefix("--")
        flag = shlex.join(
            setting(
                job.plan.engine_args,
                name,
                found.answer,
                engine_row(job.plan.engine).arguments.negatable,
            )
        )
    return Fit(
        model=job.plan.model,
        command=job.command,
        knob=job.knob.name,
        option=job.knob.option,
        goal=job.knob.goal,
        wanted=[REACHED[job.until], *(want.text for want in job.wants)],
        low=job.space.low,
        high=job.space.high,
        step=job.space.step,
        tries=tries.rows,
        answer=found.answer,
        ordered=found.ordered,
        seconds=round(time.monotonic() - started_s, 1),
        notes=_notes(job, found, tries, limit),
        flag=flag,
        until=job.until,
        beyond=limit,
    )


def _is_refused(missing: Sequence[Miss]) -> bool:
    return any(miss.kind == "refused" for miss in missing)


def _beyond(job: FitJob, found: BisectionResult, tries: _Tries) -> FirstFailure | None:
    """Return why the search ends where it does: the value after the answer, or without an answer
    the most modest one that was too much; None where the answer is the last value."""
    by_value = {row.value: row for row in tries.rows}
    value = None
    if found.answer is not None:
        value = _neighbour(job, found)
    elif by_value:
        too_much = [v for v in job.space.values if found.tried.get(v) == TOO_MUCH]
        value = next(iter(too_much), tries.rows[-1].value)
    if value is None or value not in by_value or by_value[value].holds:
        return None
    failed, best = by_value[value], by_value.get(found.answer or "")
    return beyond(
        TriedPlan(value, _report(job, failed.row), tries.missing[value]),
        None if best is None else TriedPlan(best.value, _report(job, best.row), []),
    )


def _neighbour(job: FitJob, found: BisectionResult) -> str | None:
    """Return the value next to the answer that is more ambitious; None: there is none.

    Where the first value that passes is the best, the more ambitious ones stand before it.
    """
    values = job.space.values
    place = values.index(found.answer or "") + (1 if job.knob.search == BISECT else -1)
    return values[place] if 0 <= place < len(values) else None


def _report(job: FitJob, row: PlanRow) -> Report | None:
    if row.run is None or not (job.folder / row.run / RUN_FILE).exists():
        return None
    try:
        return build_report(load_run(job.folder / row.run))
    except MemprofError:
        return None


def _row(job: FitJob, value: str, number: int, pool: Pool, progress: SweepProgress) -> PlanRow:
    plan = job.plan.vary(job.knob.option.removeprefix("--"), value)
    plan = replace(plan, values={job.knob.name: value})
    name = f"{number + 1:02d}{folder_names([plan])[0][2:]}"
    task = Task(number, plan, job.folder / PLANS_DIR / name)
    key = key_of(plan)
    row = None if job.store is None else job.store.take(key, plan, task.run_dir)
    how = "cached"
    if row is None:
        how = "made"
        ((_, row),) = pool([task], progress)
        row = replace(row, run=str(task.run_dir.relative_to(job.folder)))
        write_row(task.run_dir, key, row)
        if job.store is not None:
            job.store.keep(key, row, task.run_dir)
    row = replace(row, run=str(task.run_dir.relative_to(job.folder)))
    progress.finished(number, row, how)
    return row


def _notes(
    job: FitJob, found: BisectionResult, tries: _Tries, limit: FirstFailure | None
) -> list[str]:
    notes: list[str] = []
    if found.answer is None:
        if tries.rows and _is_refused(tries.missing[tries.rows[0].value]):
            notes.append(text("the first plan was refused, for a reason that no value changes"))
        elif job.knob.search == BISECT:
            notes += [text("no value tried passes"), ASSUMED]
        else:
            notes.append(text("no value passes"))
    elif job.knob.search == EACH:
        notes.append(text("every value was tried"))
    elif job.knob.search == UNTIL_ONE:
        notes.append(text("every smaller number that the heads allow was tried"))
    elif found.answer == job.space.values[-1]:
        end = text(
            "{value} is the end of the range: --between LOW:HIGH looks beyond it",
            value=found.answer,
        )
        notes.append(end)
    else:
        notes.append(ASSUMED)
    if not found.ordered:
        notes.append(UNORDERED)
    uneven = _uneven(job, tries, limit)
    if uneven is not None:
        notes.append(uneven)
    return [*notes, *_what_passing_means(job, found, tries)]


def _uneven(job: FitJob, tries: _Tries, limit: FirstFailure | None) -> str | None:
    """Return a note where the next value lacks less than a figure is seen to vary against the
    order: between values that were not tried the verdict may then change more than once."""
    if limit is None or limit.short_bytes is None or job.knob.search != BISECT:
        return None
    missing = tries.missing[limit.value]
    if limit.kind != "oom" and all(miss.kind != "headroom" for miss in missing):
        return None  # not short of what is spare
    known = {row.value: row.row.spare_bytes for row in tries.rows}
    sizes = [size for value in job.space.values if (size := known.get(value)) is not None]
    rise = max((b - a for i, a in enumerate(sizes) for b in sizes[i + 1 :]), default=0)
    if rise <= 0 or limit.short_bytes > rise:
        return None
    return text(
        "not even: what is spare rises by up to {rise:gib4} GiB from a value tried to one beyond "
        "it, and {value} is {short:gib4} GiB short, so a value that was not tried may be better; "
        "memprof sweep tries all of them",
        rise=rise,
        value=limit.value,
        short=limit.short_bytes,
    )


def _what_passing_means(job: FitJob, found: BisectionResult, tries: _Tries) -> list[str]:
    if job.until != READY:
        return [AFTER_THE_PLAN]
    best = next((row.row for row in tries.rows if row.value == found.answer), None)
    notes: list[str] = []
    if best is not None and not best.survived:
        reason = best.not_run or text("not recorded")
        notes.append(
            text(
                "the answer starts; whether it survives was not tried, its largest batches were "
                "not run: {why}",
                why=reason,
            )
        )
    elif best is not None and (best.step_tokens or 0) < (best.step_limit or 0):
        notes.append(
            text(
                "the answer's largest step had {tokens:,} tokens of {limit:,}: more have no room "
                "in the KV cache, or in max-num-seqs requests of max-model-len",
                tokens=best.step_tokens,
                limit=best.step_limit,
            )
        )
    spare = None if best is None else best.spare_bytes
    if spare is not None and spare < 0:
        note = text(
            "the answer survived as the allocator released blocks and workspace that nothing used: "
            "spare {spare:gib4} GiB; --headroom 0 asks for room for all of them",
            spare=spare,
        )
        notes.append(note)
    return notes
