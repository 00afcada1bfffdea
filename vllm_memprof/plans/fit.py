"""A search: plans of one option's values until the best one that meets every condition is found."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_memprof.plans.bisection import Found, bisect, from_the_least
from vllm_memprof.plans.knobs import FitKnob, Space
from vllm_memprof.plans.plan_folder import write_row
from vllm_memprof.plans.pool import Pool, Task
from vllm_memprof.plans.request import Plan, folder_names
from vllm_memprof.plans.rows import Fit, PlanRow, Try
from vllm_memprof.plans.store import Store, key_of
from vllm_memprof.plans.sweep import PLANS_DIR, Progress
from vllm_memprof.plans.wants import Want, misses

#: Said below every answer of a bisection.
ASSUMED = "values between those tried are taken to follow their neighbours"
UNORDERED = (
    "not in order: a value passes beyond one that does not, so a value that was not tried may be "
    "better; memprof sweep tries all of them"
)
AFTER_THE_PLAN = (
    "headroom: what is spare at the serving peak; what comes after the plan (captured graphs, "
    "pools that are first used in the warm-up) is not in it: ask for it with --headroom"
)


@dataclass
class FitJob:
    """A search as requested."""

    plan: Plan  # without the knob
    knob: FitKnob
    space: Space
    wants: list[Want]
    folder: Path
    command: list[str]  # as typed, secrets redacted
    store: Store | None = None


def run_fit(job: FitJob, pool: Pool, progress: Progress) -> Fit:
    """Search; every plan is made in a folder of its own, or taken from the store.

    Raises:
        Interrupted: by a signal; what was made until then is kept in the store.
    """
    started_s = time.monotonic()
    tries: list[Try] = []

    def probe(value: str) -> int:
        row = _row(job, value, len(tries), pool, progress)
        missing = misses(row, job.wants)
        tries.append(Try(value, row, not missing, [miss.text for miss in missing]))
        return job.knob.verdict(missing)

    found = (from_the_least if job.knob.each else bisect)(job.space.values, probe)
    return Fit(
        model=job.plan.model,
        command=job.command,
        knob=job.knob.name,
        option=job.knob.option,
        goal=job.knob.goal,
        wanted=[want.text for want in job.wants],
        low=job.space.low,
        high=job.space.high,
        step=job.space.step,
        tries=tries,
        answer=found.answer,
        ordered=found.ordered,
        seconds=round(time.monotonic() - started_s, 1),
        notes=_notes(job, found),
    )


def _row(job: FitJob, value: str, number: int, pool: Pool, progress: Progress) -> PlanRow:
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


def _notes(job: FitJob, found: Found) -> list[str]:
    notes = []
    if found.answer is None:
        none = "no value tried passes every --want"
        notes.append(none if job.knob.each else f"{none}; {ASSUMED}")
    elif found.answer == job.space.values[-1] and job.knob.goal == "largest":
        notes.append(f"{found.answer} is the end of the range: --between LOW:HIGH looks beyond it")
    elif job.knob.each:
        notes.append("every smaller number that the heads allow was tried")
    else:
        after = job.space.values[job.space.values.index(found.answer) + 1]
        failed = f"the next value, {after}, does not pass; " if after in found.tried else ""
        notes.append(failed + ASSUMED)
    if not found.ordered:
        notes.append(UNORDERED)
    return [*notes, AFTER_THE_PLAN]
