"""``memprof calibrate``: a plan with and without what hardware says of modelled memory."""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_memprof.cli import plans
from vllm_memprof.cli.options import ANSWER, RANKS, command_app
from vllm_memprof.cli.show import say
from vllm_memprof.errors import UsageError
from vllm_memprof.files import from_here
from vllm_memprof.plans.calibrated import Hardware, hardware_of, run_calibrated
from vllm_memprof.plans.device_facts import arguments_of
from vllm_memprof.plans.documents import calibrated_document
from vllm_memprof.record.schema import ENGINE_LOG, REPORT_JSON, RUN_FILE
from vllm_memprof.sim.profiles import DeviceProfile, load_profile
from vllm_memprof.sources import read_report

#: Exit status: one of the two plans did not come up.
NOT_UP = 1


def calibrate(ctx: typer.Context, run: str, **options: object) -> None:
    """Correct a simulated device by a real run, and plan MODEL with and without it.

    Plans the command of the run or log, of the same family of models, on the simulated device, and
    compares memory outside torch owner by owner. The corrected profile, calibrated.toml, is for
    further plans: --device sim:FILE.

    Exit status 0: both plans came up. 1: one did not. 2: a wrong argument. 3: a run or log that
    cannot correct.
    """
    plan = plans.requested_plan(ctx)
    if plan.device.profile is None:
        raise UsageError(
            "memprof calibrate corrects what a simulated device models; a plan on hardware "
            "measures it",
            hint="--device sim:910b",
        )
    profile = load_profile(plan.device.profile)
    hardware = read_hardware(run, profile)
    plans.check_setup(plan)
    found, folder = plans.answer(
        ctx,
        f"{plan.model.rstrip('/')}-calibrated",
        lambda runner: run_calibrated(plan, hardware, profile, runner),
        calibrated_document,
    )
    say(
        f"{found.profile} and the plans are in {from_here(folder)}; "
        f"further plans: --device sim:{from_here(folder / found.profile)}"
    )
    if not (found.without.ok and found.corrected.ok):
        raise typer.Exit(NOT_UP)


def read_hardware(name: str, profile: DeviceProfile) -> Hardware:
    """Read a run folder, its report.json or its engine.log, or a log from elsewhere.

    Raises:
        RunRecordError: it cannot be read, holds several starts, or cannot correct the profile.
    """
    path = Path(name)
    if path.name in (RUN_FILE, REPORT_JSON, ENGINE_LOG) and (path.parent / RUN_FILE).is_file():
        path = path.parent
    report = read_report(str(path))
    env = report.run.env if report.run.source == "hooks" else None
    return hardware_of(name, report, arguments_of(report), env, profile)


app = command_app(calibrate, {**ANSWER, **RANKS})
