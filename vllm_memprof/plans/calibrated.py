"""A plan with and without corrections from a run on hardware: up to three plans, one result.

First the hardware run's own command is planned on the simulated device; what differs outside torch
corrects constants of the device profile (``corrections``). Then the plan as asked is made with the
profile as it is, and with the corrected one, which is an ordinary profile in the folder.

Bytes are integers, None is unknown. The keys of its JSON are read by programs
(``memprof.calibrated/2``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from vllm_memprof.accounting.budget.decomposition import granted_bytes
from vllm_memprof.accounting.budget.equations import select
from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.engines import VLLM
from vllm_memprof.errors import MemprofError, RunRecordError
from vllm_memprof.files import write_atomically
from vllm_memprof.options import devices_of, normal_form
from vllm_memprof.plans.corrections import (
    ComparedRank,
    Corrections,
    ProfileCorrection,
    figures_of,
    holds_context,
)
from vllm_memprof.plans.device_facts import facts_of, profile_of_soc, with_variables
from vllm_memprof.plans.model import Answer, Plan, PlanRow
from vllm_memprof.plans.runner import PlanRunner
from vllm_memprof.plans.store import model_config
from vllm_memprof.record.codec import computed
from vllm_memprof.sim.calibrate import calibrate, render
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.profiles import DeviceProfile, find_profile, list_profiles, load_profile
from vllm_memprof.sim.runtime import stack_state
from vllm_memprof.sim.stacks import Stack, default_prefix, list_stacks, load_stack
from vllm_memprof.text import text
from vllm_memprof.units import format_gib, minus

#: Totals of two devices of one type lie nearer than this, bytes: a log prints 0.01 GiB.
_SAME_TOTAL = 16 << 20


@dataclass(frozen=True)
class HardwareSource:
    """The run or log that corrects, as far as it says."""

    name: str  # run folder, report or log, with the number of its start
    model: str
    engine: str | None
    engine_version: str | None
    device: str | None
    devices: int | None  # by its arguments; None: they are not known
    rank: str  # whose figures were taken


@dataclass(frozen=True)
class Hardware:
    """A run or log on hardware."""

    source: HardwareSource
    report: Report
    rank: RankReport  # whose figures correct
    arguments: list[str] | None  # of the engine; None: not known
    #: Variables that its figures depend on; None: a log, which prints none of them.
    env: dict[str, str] | None
    notes: list[str]


def compared(report: Report, rank: RankReport) -> ComparedRank:
    """Return one side of the comparison: a rank of a run on hardware, or of a plan."""
    try:
        counted = calibrate(facts_of(report))
    except RunRecordError:
        counted = None
    return ComparedRank(
        figures_of(rank),
        rank.budget.equation,
        counted,
        sum(span.phase == "communicator" and span.error is None for span in rank.phases),
        minor(report.run.engine_version),
    )


def minor(version: str | None) -> str | None:
    """Return a release as major and minor number."""
    return None if version is None else ".".join(version.split(".")[:2])


def hardware_of(
    name: str,
    report: Report,
    arguments: list[str] | None,
    env: dict[str, str] | None,
    profile: DeviceProfile,
) -> Hardware:
    """Return a run or log as a source of corrections.

    Raises:
        RunRecordError: it ran on a simulated device or another one, or has no figure to correct by.
    """
    run = report.run
    if run.simulated or run.engine != "vllm-ascend":
        what = run.engine or "an engine that it does not name"
        if run.simulated:
            what = "a simulated device, whose memory outside torch is the profile's own"
        hint = "give a run or a log of vllm-ascend on an NPU"
        raise RunRecordError(f"{name} is of {what}: the plan is of vllm-ascend", hint)
    # of another type of device: by its SoC, else by its total
    total = report.device_total_bytes or 0
    soc, where = profile_of_soc(run.device), run.device
    profiles = [*list_profiles(), profile]
    if soc is not None:
        alike = [each for each in profiles if each.name == soc]
    else:
        alike = [each for each in profiles if abs(total - each.device.total_bytes) <= _SAME_TOTAL]
        where = f"a device with {format_gib(total)} GiB"
    if alike and profile.device.soc_name not in {each.device.soc_name for each in alike}:
        raise RunRecordError(
            f"{name} ran on {where}: {alike[0].title}, no {profile.title}",
            f"--device sim:{alike[0].name}",
        )

    def told(rank: RankReport) -> tuple[int, int]:
        return len(figures_of(rank)), granted_bytes(rank) or 0

    # in releases that leave other ranks' contexts on a device, the rank with most has fewest
    rank = max(report.ranks, key=told, default=None)
    if rank is None or not told(rank)[0]:
        raise RunRecordError(
            f"{name} tells no figure of memory outside torch: neither what is free at the start, "
            "nor the non-torch increase, nor graph memory",
            "memprof explain shows the figures that a log has; VLLM_LOGGING_LEVEL=DEBUG prints "
            "most of them",
        )
    notes: list[str] = []
    devices = None if arguments is None else devices_of(arguments, VLLM.devices)
    if arguments is None:
        notes.append(text("{name} does not tell its command", name=name))
    if env is None:
        notes.append(
            text("a log prints no variables: HCCL_BUFFSIZE and others are taken as they are here")
        )
    source = HardwareSource(
        name, run.model, run.engine, run.engine_version, run.device, devices, rank.label
    )
    return Hardware(source, report, rank, arguments, env, notes)


def own_plan(hardware: Hardware, asked: Plan) -> tuple[Plan | None, list[str]]:
    """Return the plan of the hardware run's own command, on the stack that suits its release.

    Returns:
        The plan, None where it cannot be planned; and notes, the reason among them.
    """
    if hardware.arguments is None:
        return None, []
    try:
        return command_of(hardware.report, hardware.rank, hardware.arguments, asked)
    except MemprofError as error:
        return None, [text("its model is not at hand: {reason}", reason=error.message)]


def command_of(
    report: Report, of: RankReport | None, arguments: list[str], asked: Plan
) -> tuple[Plan, list[str]]:
    """Return the plan of a run's own command: of one rank, on the stack that suits its release.

    Args:
        report: of the run.
        of: the rank; None: the first.
        arguments: of its engine.
        asked: the model, if its name ends alike; the engine, the device, where the plan stops.

    Returns:
        The plan, and notes.

    Raises:
        MemprofError: its model is not at hand.
    """
    equation = None if of is None else of.budget.equation
    stack, notes = _stack_of(report.run.engine_version, equation, asked)
    model, parts = asked.model, report.run.model.rstrip("/").split("/")
    if parts[-1] != model.rstrip("/").split("/")[-1]:
        # a log may have the path of its own machine, whose end is the name on a hub
        model = "/".join(parts if len(parts) < 3 else parts[-2:])
        resolve_model(model, arguments)
    kept = ("device", "until", "engine")
    own = {name: value for name, value in asked.own.items() if name in kept}
    own |= {"stack": stack, "ranks": "one"}
    number = 0 if of is None else of.rank
    if number is None:  # a log names no ranks; the one with most KV cache is not the first
        number = 1 if holds_context(equation) and len(report.ranks) > 1 else 0
    if number:
        own["rank"] = str(number)
    return replace(asked, model=model, engine_args=arguments, own=own, values={}), notes


def _stack_of(version: str | None, equation: str | None, asked: Plan) -> tuple[str, list[str]]:
    """Return the stack for a release: the same one, else one with its equation."""
    wanted = load_stack(asked.stack)

    def like(stack: Stack) -> tuple[bool, bool, bool]:
        row, _ = select(stack.engine, stack.engine_version)
        same = minor(stack.engine_version) == minor(version)
        return same, row is not None and row.id == equation, stack.name == wanted.name

    ready = [
        stack
        for stack in list_stacks()
        if stack.engine == wanted.engine
        and stack_state(stack, default_prefix(stack.name)) == "ready"
    ]
    best = max(ready, key=like, default=wanted)
    if like(best)[0]:
        return best.name, []
    note = text(
        "its release is {version}; its command is planned on {stack}",
        version=version or text("not known"),
        stack=best.name,
    )
    return best.name, [note]


def unlike(hardware: Hardware, own: Plan | None, asked: Plan) -> list[str]:
    """Return what makes the hardware run another kind of run than the plan, a sentence each."""
    notes: list[str] = []
    devices = hardware.source.devices
    if devices is not None and devices != asked.devices:
        notes.append(
            text(
                "it ran on {devices} devices, the plan on {planned}: communicators differ in size "
                "and number",
                devices=devices,
                planned=asked.devices,
            )
        )
    kinds = [
        (model_config(plan.model, plan.engine_args) or {}).get("model_type")
        for plan in (own, asked)
        if plan is not None
    ]
    if None not in kinds and len({*kinds}) > 1:
        notes.append(
            text(
                "it is of a different family of models, {own}; the plan is of {asked}: with "
                "published runs such corrections made more plans worse than better "
                "(docs/accuracy.md)",
                own=str(kinds[0]),
                asked=str(kinds[1]),
            )
        )
    return notes


def is_same(own: Plan | None, asked: Plan) -> bool:
    """Return True where the plan is that of the hardware run's own command, on its stack."""

    def told(plan: Plan) -> object:
        stack = load_stack(plan.own.get("stack")).name
        return plan.model, stack, normal_form(plan.engine_args)

    return own is not None and told(own) == told(asked)


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


def run_calibrated(
    asked: Plan, hardware: Hardware, base: DeviceProfile, runner: PlanRunner
) -> Calibrated:
    """Make the plans and the corrected profile.

    Args:
        asked: on a simulated device.
        hardware: the run that corrects.
        base: the profile of the plan.
        runner: makes the plans.

    Raises:
        RunRecordError: the hardware run tells nothing that can be compared.
        Interrupted: by a signal; plans that are made are kept in the store.
    """
    own, told = own_plan(hardware, asked)
    notes = [*hardware.notes, *told, *unlike(hardware, own, asked)]
    row, simulated = None, ComparedRank({})

    def made(
        place: int, name: str, plan: Plan, environ: Mapping[str, str] | None = None
    ) -> PlanRow:
        plan = replace(plan, values={"plan": name})
        return runner.make_one(place, plan, f"{place}-{name}", environ)

    if own is not None:
        environ = None if hardware.env is None else with_variables(hardware.env)
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
        find_profile(asked.device.profile or base.name).read_text("utf-8"),
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
    notes.append(
        text("corrections are estimates for any other command than that of the hardware run")
        if any(each.constants for each in found.rows)
        else text("nothing was corrected: both answers are one")
    )
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
