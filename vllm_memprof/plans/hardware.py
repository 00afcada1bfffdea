"""The run or log on hardware that corrects a profile: what it is, and how its command is planned.

In: its report, arguments and variables; the plan as asked. Out: `Hardware`, or the reason why it
cannot correct; and the plan of its own command on the simulated device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_memprof.accounting.budget.decomposition import granted_bytes
from vllm_memprof.accounting.budget.equations import select
from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.engines import VLLM
from vllm_memprof.errors import MemprofError, RunRecordError
from vllm_memprof.options import devices_of, normal_form
from vllm_memprof.plans.corrections import ComparedRank, figures_of, holds_context
from vllm_memprof.plans.device_facts import best_rank, facts_of, profile_of_soc
from vllm_memprof.plans.request import Plan
from vllm_memprof.plans.store import model_config
from vllm_memprof.sim.calibrate import calibrate
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.profiles import DeviceProfile, list_profiles
from vllm_memprof.sim.runtime import stack_state
from vllm_memprof.sim.stacks import Stack, default_prefix, list_stacks, load_stack
from vllm_memprof.text import text
from vllm_memprof.units import format_gib

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
    notes: list[str] = field(default_factory=list)


def compared(report: Report, rank: RankReport) -> ComparedRank:
    """Return one side of the comparison: a rank of a run on hardware, or of a plan."""
    try:
        counted = calibrate(facts_of(best_rank(report), report.run.env))
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
    arguments: Sequence[str] | None,
    env: Mapping[str, str] | None,
    profile: DeviceProfile,
) -> Hardware:
    """Return a run or log as a source of corrections.

    Raises:
        RunRecordError: it ran on a simulated device or another one, or has no figure to correct by.
    """
    run = report.run
    if run.simulated:
        raise RunRecordError(
            f"{name} ran on a simulated device: its memory outside torch is the profile's own, "
            "so that it corrects nothing and agrees with everything",
            "give a run or a log from an NPU",
        )
    if run.engine != "vllm-ascend":
        what = run.engine or "an engine that it does not name"
        raise RunRecordError(
            f"{name} is of {what}: the plan is of vllm-ascend",
            "give a run or a log of vllm-ascend on an NPU",
        )
    _require_type(name, report, profile)

    def told(rank: RankReport) -> tuple[int, int]:
        return len(figures_of(rank)), granted_bytes(rank) or 0

    # in releases that leave other ranks' contexts on a device, the rank with most has fewest
    rank = max(report.ranks, key=told, default=None)
    if rank is None or not told(rank)[0]:
        raise RunRecordError(
            f"{name} tells no figure of memory outside torch: neither what is free at the start, "
            "nor the non-torch increase, nor captured graphs",
            "memprof explain shows the figures that a log has; VLLM_LOGGING_LEVEL=DEBUG prints "
            "most of them",
        )
    notes: list[str] = []
    if arguments is None:
        notes.append(text("{name} does not tell its command", name=name))
    if env is None:
        notes.append(
            text("a log prints no variables: HCCL_BUFFSIZE and others are taken as they are here")
        )
    devices = None if arguments is None else devices_of(arguments, VLLM.devices)
    source = HardwareSource(
        name, run.model, run.engine, run.engine_version, run.device, devices, rank.label
    )
    return Hardware(
        source,
        report,
        rank,
        None if arguments is None else [*arguments],
        None if env is None else {**env},
        notes,
    )


def _require_type(name: str, report: Report, profile: DeviceProfile) -> None:
    """Refuse a run on another type of device, by its SoC, else by its total.

    Raises:
        RunRecordError: with the profile to use.
    """
    total = next((rank.device_total_bytes for rank in report.ranks if rank.device_total_bytes), 0)
    soc, where = profile_of_soc(report.run.device), report.run.device
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


def own_plan(hardware: Hardware, asked: Plan) -> tuple[Plan | None, list[str]]:
    """Return the plan of the hardware run's own command, on the stack that suits its release.

    Returns:
        The plan, None where it cannot be planned; and notes, the reason among them.
    """
    if hardware.arguments is None:
        return None, []
    stack, notes = _stack_of(hardware, asked)
    try:
        model = _model_of(hardware, asked)
    except MemprofError as error:
        why = text("its model is not at hand: {reason}", reason=error.message)
        return None, [*notes, why]
    own = {name: value for name, value in asked.own.items() if name in ("device", "until")}
    own |= {"stack": stack, "ranks": "one"}
    number = hardware.rank.rank
    if number is None:  # a log names no ranks; the one with most KV cache is not the first
        crowded = holds_context(hardware.rank.budget.equation)
        number = 1 if crowded and len(hardware.report.ranks) > 1 else 0
    if number:
        own["rank"] = str(number)
    return replace(asked, model=model, engine_args=hardware.arguments, own=own, values={}), notes


def _stack_of(hardware: Hardware, asked: Plan) -> tuple[str, list[str]]:
    """Return the stack for the hardware's release: the same one, else one with its equation."""
    wanted = load_stack(asked.own.get("stack"))
    version, equation = hardware.source.engine_version, hardware.rank.budget.equation

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


def _model_of(hardware: Hardware, asked: Plan) -> str:
    """Return the name under which the hardware's model is at hand.

    A log may have the path of its own machine: its last two parts are the name on a hub.

    Raises:
        MemprofError: it is not at hand.
    """
    parts = hardware.source.model.rstrip("/").split("/")
    if parts[-1] == asked.model.rstrip("/").split("/")[-1]:
        return asked.model
    name = "/".join(parts if len(parts) < 3 else parts[-2:])
    resolve_model(name, hardware.arguments or [])
    return name


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
                "it is of another family of models, {own}; the plan is of {asked}: with published "
                "runs such corrections made more plans worse than better (docs/accuracy.md)",
                own=str(kinds[0]),
                asked=str(kinds[1]),
            )
        )
    return notes


def is_same(own: Plan | None, asked: Plan) -> bool:
    """Return True where the plan is that of the hardware run's own command, on its stack."""
    if own is None or own.model != asked.model:
        return False
    stacks = [load_stack(plan.own.get("stack")).name for plan in (own, asked)]
    return stacks[0] == stacks[1] and normal_form(own.engine_args) == normal_form(asked.engine_args)
