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

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.errors import RunRecordError
from vllm_memprof.files import write_atomically
from vllm_memprof.plans.calibrated_rows import Calibrated
from vllm_memprof.plans.corrections import ComparedRank, Corrected, correct, figures_of
from vllm_memprof.plans.device_facts import DECIDING
from vllm_memprof.plans.hardware import Hardware, counted_of, is_same, own_plan, unlike
from vllm_memprof.plans.request import Plan
from vllm_memprof.plans.rows import PlanRow
from vllm_memprof.plans.runner import PLANS_DIR, PlanRunner
from vllm_memprof.sim.calibrate import render
from vllm_memprof.sim.profiles import DeviceProfile, find_profile, load_profile
from vllm_memprof.text import text

PROFILE_FILE = "calibrated.toml"
#: Names of the plans: value of ``plan`` in their rows.
NAMES = ("own", "without", "with")


@dataclass
class CalibratedJob:
    """A plan with corrections, as requested."""

    plan: Plan  # on a simulated device
    hardware: Hardware
    profile: DeviceProfile  # of the plan
    command: list[str]  # as typed, secrets redacted


def run_calibrated(job: CalibratedJob, runner: PlanRunner) -> Calibrated:
    """Make the plans and the corrected profile.

    Raises:
        RunRecordError: the hardware run tells nothing that can be compared.
        Interrupted: by a signal; plans that are made are kept in the store.
    """
    started_s = time.monotonic()
    hardware = job.hardware
    own, told = own_plan(hardware, job.plan)
    notes = [*hardware.notes, *told, *unlike(hardware, own, job.plan)]
    row, simulated = None, ComparedRank({})
    (runner.folder / PLANS_DIR).mkdir(parents=True, exist_ok=True)

    def made(plan: Plan, place: int, environ: Mapping[str, str] | None = None) -> PlanRow:
        plan = replace(plan, values={"plan": NAMES[place]})
        return runner.make_one(place, plan, f"{place + 1}-{NAMES[place]}", environ)

    if own is not None:
        environ = None
        if hardware.env is not None:  # with its variables in the place of this process's own
            environ = {name: os.environ[name] for name in os.environ if not _decides(name)}
            environ |= {name: hardware.env[name] for name in hardware.env if _decides(name)}
        row = made(own, 0, environ)
        report = runner.report(row) if row.ok else None
        if report is not None and report.ranks:
            simulated = _simulated_side(report, hardware.rank)
        if not simulated.told:
            reason = row.reason or row.status
            notes.append(text("its command cannot be planned: {reason}", reason=reason))
    # a request that a log does not print is that of the same plan
    requested = None if row is None else row.requested_bytes
    compared = ComparedRank(
        figures_of(hardware.rank, requested_bytes=requested),
        hardware.rank.budget.equation,
        hardware.counted,
        release=hardware.report.run.engine_version,
    )
    corrected = correct(compared, simulated, job.profile)
    if all(each.difference_bytes is None for each in corrected.rows):
        raise RunRecordError(
            f"nothing of {hardware.name} can be compared: "
            + "; ".join([*(f"{each.owner}: {each.reason}" for each in corrected.rows), *notes]),
            "memprof explain shows what a log tells; a log with its command can be planned",
        )
    path = runner.folder / PROFILE_FILE
    write_profile(job, corrected, path)
    without = made(job.plan, 1)
    changed = replace(job.plan, own={**job.plan.own, "device": f"sim:{path}"})
    with_it = made(changed, 2)
    same = is_same(own, job.plan)
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
        source=hardware.source,
        stack=None if own is None else own.own["stack"],
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
    base = find_profile(job.plan.device.profile or job.profile.name)
    source = job.hardware.source
    run = f"{source.name}: {source.model}, {source.engine} {source.engine_version or ''}".strip()
    name = f"{job.profile.name}-calibrated"
    content = render(
        corrected.calibration, job.profile.name, base.read_text(encoding="utf-8"), name, run,
        "memprof calibrate",
    )  # fmt: skip
    write_atomically(path, content)
    load_profile(str(path))  # what was written can be read


def _decides(name: str) -> bool:
    return name.startswith(DECIDING)


def _simulated_side(report: Report, like: RankReport) -> ComparedRank:
    """Return the simulated side: the rank of the hardware's number, else the first planned."""
    rank = next((each for each in report.ranks if each.rank == like.rank), report.ranks[0])
    return ComparedRank(
        figures_of(rank, None),
        rank.budget.equation,
        counted_of(report),
        sum(span.phase == "communicator" and span.error is None for span in rank.phases),
        report.run.engine_version,
    )
