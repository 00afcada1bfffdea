"""A plan with and without corrections from a run on hardware: up to three plans, one result.

First the hardware run's own command is planned on the simulated device; what differs outside torch
corrects constants of the device profile (``corrections``). Then the plan as asked is made with the
profile as it is, and with the corrected one, which is an ordinary profile in the folder.

Bytes are integers, None is unknown. The keys of its JSON are read by programs
(``memprof.calibrated/2``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from vllm_memprof.errors import RunRecordError
from vllm_memprof.files import write_atomically
from vllm_memprof.plans.corrections import ComparedRank, Corrections, ProfileCorrection
from vllm_memprof.plans.device_facts import DECIDING
from vllm_memprof.plans.hardware import (
    Hardware,
    HardwareSource,
    compared,
    is_same,
    own_plan,
    unlike,
)
from vllm_memprof.plans.request import Plan
from vllm_memprof.plans.rows import Answer, PlanRow
from vllm_memprof.plans.runner import PLANS_DIR, PlanRunner
from vllm_memprof.record.codec import computed
from vllm_memprof.sim.calibrate import render
from vllm_memprof.sim.profiles import DeviceProfile, find_profile, load_profile
from vllm_memprof.text import text
from vllm_memprof.units import minus


@dataclass(frozen=True)
class Calibrated(Answer):
    """A plan as the profile has its device, and with corrections from a run on hardware."""

    model: str
    source: HardwareSource
    stack: str | None  # that the hardware's own command was planned on; None: it was not
    own: PlanRow | None  # that plan
    corrections: list[ProfileCorrection]
    profile: str  # the corrected profile, relative to the folder
    #: The plan is that of the hardware run itself: agreement is by construction.
    same_command: bool
    without: PlanRow
    corrected: PlanRow
    SCHEMA: ClassVar[str] = "memprof.calibrated/2"

    @property
    @computed
    def kv_cache_change_bytes(self) -> int | None:
        """What the corrections make of the KV cache."""
        return minus(self.corrected.kv_cache_bytes, self.without.kv_cache_bytes)

    @property
    @computed
    def headroom_change_bytes(self) -> int | None:
        """What the corrections make of the headroom at the serving peak."""
        return minus(self.corrected.headroom_bytes, self.without.headroom_bytes)


@dataclass
class CalibratedJob:
    """A plan with corrections, as requested."""

    plan: Plan  # on a simulated device
    hardware: Hardware
    profile: DeviceProfile  # of the plan


def run_calibrated(job: CalibratedJob, runner: PlanRunner) -> Calibrated:
    """Make the plans and the corrected profile.

    Raises:
        RunRecordError: the hardware run tells nothing that can be compared.
        Interrupted: by a signal; plans that are made are kept in the store.
    """
    hardware, asked, base = job.hardware, job.plan, job.profile
    own, told = own_plan(hardware, asked)
    notes = [*hardware.notes, *told, *unlike(hardware, own, asked)]
    row, simulated = None, ComparedRank({})
    (runner.folder / PLANS_DIR).mkdir(parents=True, exist_ok=True)

    def made(
        place: int, name: str, plan: Plan, environ: Mapping[str, str] | None = None
    ) -> PlanRow:
        plan = replace(plan, values={"plan": name})
        return runner.make_one(place, plan, f"{place}-{name}", environ)

    if own is not None:
        environ = None
        if hardware.env is not None:  # with its variables in the place of this process's own
            environ = {
                name: value
                for variables, its_own in ((os.environ, False), (hardware.env, True))
                for name, value in variables.items()
                if name.startswith(DECIDING) is its_own
            }
        row = made(1, "own", own, environ)
        report = runner.report(row) if row.ok else None
        if report is not None and report.ranks:  # the same rank, else the first planned
            like = (each for each in report.ranks if each.rank == hardware.rank.rank)
            simulated = compared(report, next(like, report.ranks[0]))
        else:
            reason = row.reason or row.status
            notes.append(text("its command cannot be planned: {reason}", reason=reason))
    found = Corrections(compared(hardware.report, hardware.rank), simulated, base)
    if all(each.difference_bytes is None for each in found.rows):
        reasons = [f"{each.owner}: {each.reason}" for each in found.rows]
        raise RunRecordError(
            f"nothing of {hardware.source.name} can be compared: {'; '.join([*reasons, *notes])}",
            "memprof explain shows what a log tells; a log with its command can be planned",
        )
    path, source = runner.folder / "calibrated.toml", hardware.source
    content = render(
        found.calibration(),
        base.name,
        find_profile(asked.device.profile or base.name).read_text(encoding="utf-8"),
        f"{base.name}-calibrated",
        f"{source.name}: {source.model}, {source.engine} {source.engine_version or ''}".strip(),
        "memprof calibrate",
    )
    write_atomically(path, content)
    load_profile(str(path))  # what was written can be read
    without = made(2, "without", asked)
    changed = replace(asked, own={**asked.own, "device": f"sim:{path}"})
    same = is_same(own, asked)
    if same:
        notes.append(
            text(
                "this is the plan of the very run that corrects it: that both agree is by "
                "construction, and no evidence"
            )
        )
    if any(each.constants for each in found.rows):
        notes.append(
            text("corrections are estimates for any other command than that of the hardware run")
        )
    else:
        notes.append(text("nothing was corrected: both answers are one"))
    return Calibrated(
        model=asked.model,
        source=source,
        stack=None if own is None else own.own["stack"],
        own=row,
        corrections=found.rows,
        profile=path.name,
        same_command=same,
        without=without,
        corrected=made(3, "with", changed),
        notes=notes,
    )
