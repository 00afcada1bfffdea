"""A plan with and without corrections from a run on hardware: up to three plans, one result.

First the hardware run's own command is planned on the simulated device; what differs outside torch
corrects constants of the device profile (``corrections``). Then the plan as asked is made with the
profile as it is, and with the corrected one, which is an ordinary profile in the folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.errors import MemprofError, RunRecordError
from vllm_memprof.files import write_atomically
from vllm_memprof.plans.calibrated_rows import Calibrated
from vllm_memprof.plans.corrections import ComparedRank, Corrected, correct, figures_of
from vllm_memprof.plans.device_facts import DECIDING
from vllm_memprof.plans.hardware import Hardware, counted_of, is_same, own_plan, unlike
from vllm_memprof.plans.plan_folder import write_row
from vllm_memprof.plans.pool import Pool, Task
from vllm_memprof.plans.process import run_plan
from vllm_memprof.plans.request import Plan
from vllm_memprof.plans.rows import PlanRow
from vllm_memprof.plans.store import Store, key_of
from vllm_memprof.plans.sweep import PLANS_DIR, SweepProgress
from vllm_memprof.record.loader import load_run
from vllm_memprof.sim.calibrate import render
from vllm_memprof.sim.profiles import DeviceProfile, find_profile, load_profile
from vllm_memprof.text import text

PROFILE_FILE = "calibrated.toml"
#: Names of the plans: value of ``plan`` in their rows.
OWN, WITHOUT, WITH = "own", "without", "with"


@dataclass
class CalibratedJob:
    """A plan with corrections, as requested."""

    plan: Plan  # on a simulated device
    hardware: Hardware
    profile: DeviceProfile  # of the plan
    folder: Path
    command: list[str]  # as typed, secrets redacted
    store: Store | None = None


def run_calibrated(job: CalibratedJob, pool: Pool, progress: SweepProgress) -> Calibrated:
    """Make the plans and the corrected profile.

    Raises:
        RunRecordError: the hardware run tells nothing that can be compared.
        Interrupted: by a signal; plans that are made are kept in the store.
    """
    started_s = time.monotonic()
    own = own_plan(job.hardware, job.plan)
    notes = [*job.hardware.notes, *own.notes, *unlike(job.hardware, own.plan, job.plan)]
    row, simulated = None, ComparedRank({})
    if own.plan is not None:
        environ = None if job.hardware.env is None else _environ(job.hardware.env)
        row = _make(job, own.plan, OWN, 0, pool, progress, environ)
        simulated = _side(job.folder / (row.run or ""), job.hardware.rank) if row.ok else simulated
        if not simulated.told:
            reason = row.reason or row.status
            notes.append(text("its command cannot be planned: {reason}", reason=reason))
    corrected = correct(_hardware_side(job.hardware, row), simulated, job.profile)
    if all(each.difference_bytes is None for each in corrected.rows):
        raise RunRecordError(
            f"nothing of {job.hardware.name} can be compared: "
            + "; ".join([*(f"{each.owner}: {each.reason}" for each in corrected.rows), *notes]),
            "memprof explain shows what a log tells; a log with its command can be planned",
        )
    path = job.folder / PROFILE_FILE
    write_profile(job, corrected, path)
    without = _make(job, job.plan, WITHOUT, 1, pool, progress)
    changed = replace(job.plan, own={**job.plan.own, "device": f"sim:{path}"})
    with_it = _make(job, changed, WITH, 2, pool, progress)
    same = is_same(own.plan, job.plan)
    if same:
        notes.append(
            text(
                "this is the plan of the very run that corrects it: that both agree is by "
                "construction, and no evidence"
            )
        )
    if not corrected.any:
        notes.append(text("nothing was corrected: both answers are one"))
    else:
        notes.append(
            text("corrections are estimates for any other command than that of the hardware run")
        )
    return Calibrated(
        model=job.plan.model,
        command=job.command,
        source=job.hardware.source,
        stack=None if own.plan is None else own.stack,
        own=row,
        corrections=corrected.rows,
        profile=PROFILE_FILE,
        same_command=same,
        without=without,
        corrected=with_it,
        seconds=round(time.monotonic() - started_s, 1),
        notes=notes,
    )


def write_profile(job: CalibratedJob, corrected: Corrected, path: Path) -> None:
    """Write the corrected profile; a changed constant names the figure that changed it."""
    base = find_profile(job.plan.own.get("device", "auto").partition(":")[2] or "910b")
    source = job.hardware.source
    run = f"{source.name}: {source.model}, {source.engine} {source.engine_version or ''}".strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    name = f"{job.profile.name}-calibrated"
    content = render(
        corrected.calibration, job.profile.name, base.read_text(encoding="utf-8"), name, run,
        "memprof plan --calibrate",
    )  # fmt: skip
    write_atomically(path, content)
    load_profile(str(path))  # what was written can be read


def _environ(env: Mapping[str, str]) -> dict[str, str]:
    """Return this process's variables with those of the hardware run in the place of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DECIDING)}
    return kept | {name: value for name, value in env.items() if name.startswith(DECIDING)}


def _make(
    job: CalibratedJob,
    plan: Plan,
    name: str,
    number: int,
    pool: Pool,
    progress: SweepProgress,
    environ: Mapping[str, str] | None = None,
) -> PlanRow:
    """Make one plan, or take it from the store."""
    plan = replace(plan, values={"plan": name})
    task = Task(number, plan, job.folder / PLANS_DIR / f"{number + 1}-{name}")
    key = key_of(plan, environ)
    row = None if job.store is None else job.store.take(key, plan, task.run_dir)
    how = "cached"
    if row is None:
        how = "made"
        task.run_dir.parent.mkdir(parents=True, exist_ok=True)
        if environ is None:
            ((_, row),) = pool([task], progress)
        else:
            row = run_plan(plan, task.run_dir, environ)
        write_row(task.run_dir, key, row)
        if job.store is not None:
            job.store.keep(key, row, task.run_dir)
    row = replace(row, run=str(task.run_dir.relative_to(job.folder)))
    progress.finished(number, row, how)
    return row


def _side(run_dir: Path, like: RankReport) -> ComparedRank:
    """Return the simulated side: the rank of the hardware's number, else the first planned."""
    try:
        report = build_report(load_run(run_dir))
    except MemprofError:
        return ComparedRank({})
    if not report.ranks:
        return ComparedRank({})
    rank = next((each for each in report.ranks if each.rank == like.rank), report.ranks[0])
    return _side_of(report, rank)


def _side_of(report: Report, rank: RankReport) -> ComparedRank:
    return ComparedRank(
        figures_of(rank, report.run.simulated, None),
        rank.budget.equation,
        counted_of(report),
        sum(span.phase == "communicator" and span.error is None for span in rank.phases),
        report.run.engine_version,
    )


def _hardware_side(hardware: Hardware, own: PlanRow | None) -> ComparedRank:
    """Return the hardware's side; a request that a log does not print is that of the same plan."""
    requested = None if own is None else own.requested_bytes
    return ComparedRank(
        figures_of(hardware.rank, simulated=False, requested_bytes=requested),
        hardware.rank.budget.equation,
        hardware.counted,
        release=hardware.report.run.engine_version,
    )
