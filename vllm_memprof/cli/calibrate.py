"""``memprof plan --calibrate``: a plan with and without what hardware says of modelled memory."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_memprof.cli.plans import Asked, check_setup
from vllm_memprof.errors import RunRecordError, UsageError
from vllm_memprof.files import from_here

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_memprof.plans.hardware import Hardware
    from vllm_memprof.plans.request import Plan
    from vllm_memprof.record.loader import Run
    from vllm_memprof.sim.profiles import DeviceProfile

Calibrate = Annotated[
    str | None,
    typer.Option(
        "--calibrate",
        metavar="RUN_OR_LOG",
        help="A run or log from an NPU that corrects what the simulated device models; LOG#2 is "
        "its second start.",
    ),
]
#: Of a calibrated plan, in its folder.
RESULT_FILE = "calibrated.json"
#: Exit status: one of the two plans did not come up.
NOT_UP = 1


def calibrated(asked: Asked, plan: Plan, name: str) -> int:
    """Plan with and without corrections, print the result, and return the exit status.

    Raises:
        MemprofError: a wrong argument, or a run or log that cannot correct.
    """
    from vllm_memprof.launch.request import parse_device
    from vllm_memprof.plans.calibrated import CalibratedJob, run_calibrated
    from vllm_memprof.sim.profiles import load_profile

    device = parse_device(plan.own.get("device", "auto"))
    if device.profile is None:
        raise UsageError(
            "--calibrate corrects what a simulated device models; a plan on hardware measures it",
            hint="--device sim:910b",
        )
    if plan.engine != "vllm":
        raise UsageError(
            f"--calibrate has no {plan.engine} yet: its logs print free memory at other moments"
        )
    profile = load_profile(device.profile)
    hardware = read_hardware(name, profile)
    check_setup(plan)
    found, folder = asked.answer(
        f"{plan.model.rstrip('/')}-calibrated",
        RESULT_FILE,
        lambda command, runner: run_calibrated(
            CalibratedJob(plan, hardware, profile, command), runner
        ),
    )
    print(
        f"memprof: {RESULT_FILE}, {found.profile} and the plans are in {from_here(folder)}; "
        f"further plans: --device sim:{from_here(folder / found.profile)}",
        file=sys.stderr,
    )
    return 0 if found.without.ok and found.corrected.ok else NOT_UP


def read_hardware(name: str, profile: DeviceProfile) -> Hardware:
    """Read a run folder, its report.json or its engine.log, or a log from elsewhere.

    Raises:
        RunRecordError: it cannot be read, holds several starts, or cannot correct the profile.
    """
    from vllm_memprof.accounting.build import build_report
    from vllm_memprof.logs.to_record import read_log
    from vllm_memprof.options import value_of, with_option
    from vllm_memprof.plans.device_facts import engine_args_of
    from vllm_memprof.plans.hardware import hardware_of
    from vllm_memprof.record.loader import load_info
    from vllm_memprof.record.schema import ENGINE_LOG, REPORT_JSON, RUN_FILE
    from vllm_memprof.sources import build_run, chosen, is_report, numbered, read_report

    path, number = numbered(name)
    folder, given = Path(path), None
    if folder.name in (RUN_FILE, REPORT_JSON, ENGINE_LOG):  # it may lie in a run folder
        folder = folder.parent
    if (folder / RUN_FILE).is_file():
        info = load_info(folder)
        with suppress(RunRecordError):
            given = engine_args_of(info)
        return hardware_of(name, build_run(folder), given, info.env, profile)
    if is_report(path):
        report = read_report(name)
        return hardware_of(name, report, None, report.run.env, profile)
    runs = read_log(path)
    if number is None and len(runs) > 1:
        hint = f"name one of them: {path}#1 to {path}#{len(runs)}"
        raise RunRecordError(f"{path} holds {len(runs)} starts", hint=hint)
    (run,) = chosen(path, number, runs)
    report, given = build_report(run), _arguments(run)
    used = next((rank.budget.gpu_memory_utilization for rank in report.ranks), None)
    option = "--gpu-memory-utilization"
    if given is not None and used is not None and value_of(given, option) != f"{used:g}":
        given = with_option(given, option, f"{used:g}")
    return hardware_of(name, report, given, None, profile)


def _arguments(run: Run) -> list[str] | None:
    """Return the engine's arguments of a start in a log; None where it does not tell them.

    The command as typed counts; else the line "non-default args".
    """
    words: Sequence[str] = run.info.command
    if list(words[:2]) == ["vllm", "serve"]:
        return list(words[3:] if len(words) > 2 and not words[2].startswith("-") else words[2:])
    said = [word for word in run.info.engine_command if word != "--enforce-eager"]
    return list(run.info.engine_command) if said else None
