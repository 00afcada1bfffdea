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
from vllm_memprof.errors import MemprofError, RunRecordError, UsageError
from vllm_memprof.options import devices_of, normal_form
from vllm_memprof.plans.calibrated_rows import HardwareSource
from vllm_memprof.plans.corrections import figures_of, holds_context
from vllm_memprof.plans.device_facts import best_rank, facts_of, profile_of_soc
from vllm_memprof.plans.request import Plan
from vllm_memprof.plans.store import model_config
from vllm_memprof.sim.calibrate import Calibration, calibrate
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.profiles import DeviceProfile, list_profiles
from vllm_memprof.sim.runtime import stack_state
from vllm_memprof.sim.stacks import default_prefix, list_stacks, load_stack
from vllm_memprof.text import text

#: Figures of `corrections.figures_of` that say something of memory outside torch.
_USABLE = ("context", "non_torch", "used_by_device", "rest", "cleared", "graph")
#: Totals of two devices of one type lie nearer than this, bytes: a log prints 0.01 GiB.
_SAME_TOTAL = 16 << 20


@dataclass(frozen=True)
class Hardware:
    """A run or log on hardware."""

    name: str  # as the user named it
    report: Report
    rank: RankReport  # whose figures correct
    arguments: list[str] | None  # of the engine; None: not known
    #: Variables that its figures depend on; None: a log, which prints none of them.
    env: dict[str, str] | None
    counted: Calibration | None  # what the runtime's counters tell
    notes: list[str] = field(default_factory=list)

    @property
    def devices(self) -> int | None:
        return None if self.arguments is None else devices_of(self.arguments, VLLM.devices)

    @property
    def source(self) -> HardwareSource:
        """Return it as reports name it."""
        run = self.report.run
        return HardwareSource(
            name=self.name,
            kind=run.source,
            model=run.model,
            engine=run.engine,
            engine_version=run.engine_version,
            device=run.device,
            arguments=self.arguments or [],
            devices=self.devices,
            rank=self.rank.label,
            equation=self.rank.budget.equation,
        )


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
    ranks = [rank for rank in report.ranks if _usable(rank)]
    if not ranks:
        raise RunRecordError(
            f"{name} tells no figure of memory outside torch: neither what is free at the start, "
            "nor the non-torch increase, nor a KV cache with its weights, nor captured graphs",
            "memprof explain shows the figures that a log has; VLLM_LOGGING_LEVEL=DEBUG prints "
            "most of them",
        )
    # in releases that leave other ranks' contexts on a device, the rank with most has fewest
    rank = max(ranks, key=lambda each: (len(_usable(each)), granted_bytes(each) or 0))
    notes: list[str] = []
    if arguments is None:
        notes.append(text("{name} does not tell its command", name=name))
    if env is None:
        notes.append(
            text("a log prints no variables: HCCL_BUFFSIZE and others are taken as they are here")
        )
    total = rank.device_total_bytes
    if total is not None and not _is_total_of(profile, total):
        notes.append(
            text(
                "its device has {total:gib} GiB, the profile {own:gib} GiB",
                total=total,
                own=profile.device.total_bytes,
            )
        )
    env = None if env is None else dict(env)
    arguments = None if arguments is None else list(arguments)
    return Hardware(name, report, rank, arguments, env, counted_of(report), notes)


def _usable(rank: RankReport) -> list[str]:
    told = figures_of(rank, requested_bytes=None)
    return [name for name in _USABLE if name in told]


def counted_of(report: Report) -> Calibration | None:
    """Return what the runtime's counters of a run tell; None: it has no readings of them."""
    try:
        return calibrate(facts_of(best_rank(report), report.run.env))
    except RunRecordError:
        return None


def _require_type(name: str, report: Report, profile: DeviceProfile) -> None:
    """Refuse a run on another type of device, by its SoC, else by its total.

    Raises:
        RunRecordError: with the profile to use.
    """
    bases = {each.device.soc_name: each for each in list_profiles()}
    own = bases.get(profile.device.soc_name)
    soc = profile_of_soc(report.run.device)
    if soc is not None and own is not None and soc != own.name:
        raise RunRecordError(
            f"{name} ran on {report.run.device}, which is no {own.name}", f"--device sim:{soc}"
        )
    total = next((rank.device_total_bytes for rank in report.ranks if rank.device_total_bytes), 0)
    if soc is not None or own is None or not total:
        return
    alike = [each for each in bases.values() if _is_total_of(each, total)]
    if alike and own not in alike and not _is_total_of(profile, total):
        raise RunRecordError(
            f"{name} is of a device with {total / 2**30:.2f} GiB: {alike[0].title}, no {own.title}",
            f"--device sim:{alike[0].name}",
        )


def _is_total_of(profile: DeviceProfile, total: int) -> bool:
    return abs(total - profile.device.total_bytes) <= _SAME_TOTAL


def own_plan(hardware: Hardware, asked: Plan) -> tuple[Plan | None, list[str]]:
    """Return the plan of the hardware run's own command, on the stack that suits its release.

    Returns:
        The plan, None where it cannot be planned; and notes, the reason among them.
    """
    stack, notes = _stack_of(hardware, asked)
    if hardware.arguments is None:
        return None, notes
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
    plan = replace(asked, model=model, engine_args=hardware.arguments, own=own, values={})
    return plan, notes


def _stack_of(hardware: Hardware, asked: Plan) -> tuple[str, list[str]]:
    """Return the stack for the hardware's release: the same one, else one with its equation."""
    wanted = load_stack(asked.own.get("stack"))
    version, equation = hardware.report.run.engine_version, hardware.rank.budget.equation
    ready = [
        stack
        for stack in [wanted, *(each for each in list_stacks() if each.name != wanted.name)]
        if stack.engine == wanted.engine
        and stack_state(stack, default_prefix(stack.name)) == "ready"
    ]
    release = (version or "").split(".")[:2]
    for stack in ready:
        if version and stack.engine_version.split(".")[:2] == release:
            return stack.name, []
    known = version or text("not known")
    for stack in ready:
        row, _ = select(stack.engine, stack.engine_version)
        if equation is not None and row is not None and row.id == equation:
            note = text(
                "its release is {version}; its command is planned on {stack}, whose equation is "
                "the same",
                version=known,
                stack=stack.name,
            )
            return stack.name, [note]
    note = text(
        "its release is {version}; its command is planned on {stack}",
        version=known,
        stack=wanted.name,
    )
    return wanted.name, [note]


def _model_of(hardware: Hardware, asked: Plan) -> str:
    """Return the name under which the hardware's model is at hand.

    A log may have the path of its own machine: its last two parts are the name on a hub.

    Raises:
        MemprofError: it is not at hand.
    """
    name = hardware.report.run.model.rstrip("/")
    parts = [part for part in name.split("/") if part]
    if parts[-1:] == [part for part in asked.model.rstrip("/").split("/") if part][-1:]:
        return asked.model
    names = [name] if not name.startswith("/") else []
    names += ["/".join(parts[-2:])] if len(parts) > 2 or name.startswith("/") else []
    failed: MemprofError = UsageError(f"no model {name}")
    for each in names:
        try:
            resolve_model(each, hardware.arguments or [])
        except MemprofError as error:
            failed = error
            continue
        return each
    raise failed


def unlike(hardware: Hardware, own: Plan | None, asked: Plan) -> list[str]:
    """Return what makes the hardware run another kind of run than the plan, a sentence each."""
    notes: list[str] = []
    if hardware.devices is not None and hardware.devices != asked.devices:
        notes.append(
            text(
                "it ran on {devices} devices, the plan on {planned}: communicators differ in size "
                "and number",
                devices=hardware.devices,
                planned=asked.devices,
            )
        )
    if own is None:
        return notes
    kinds = [
        (model_config(plan.model, plan.engine_args) or {}).get("model_type")
        for plan in (own, asked)
    ]
    if None not in kinds and kinds[0] != kinds[1]:
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
