"""What a run on hardware says of owners that a device profile models: corrections of its constants.

In: figures of one rank on hardware and of one rank of a plan of the same command on the simulated
device, both read from reports in the same way (`figures_of`); the profile. Out: corrections, each
with the constants that it changes. Pure: no file, no engine.

Torch's own memory is run, not modelled, and is never corrected. Where hardware tells memory outside
torch as one figure, the difference is carried over as one, per process and device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_memprof.accounting.equations import form_of
from vllm_memprof.accounting.model import DERIVED, MEASURED, RankReport
from vllm_memprof.accounting.quantities import CONTEXT_CEILING_BYTES, held_quantities
from vllm_memprof.plans.calibrated_rows import (
    ATB,
    COMMUNICATORS,
    CONTEXT,
    GRAPH,
    KERNELS,
    NON_TORCH,
    WORKSPACE,
    Constant,
    ProfileCorrection,
)
from vllm_memprof.record.spans import How
from vllm_memprof.sim.calibrate import Calibration, Setting
from vllm_memprof.sim.profiles import DeviceProfile
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import MIB


@dataclass(frozen=True)
class ReportedFigure:
    """A figure as one run tells it."""

    bytes: int
    half_unit_bytes: int = 0  # half of the last printed digit; 0 from hooks
    how: How = MEASURED
    source: str = ""  # which figure it is


class Measure(NamedTuple):
    """One figure that holds all memory outside torch, as some equation has it."""

    name: str
    source: Text
    of_equation: bool  # it holds the context where the equation subtracts it, else never
    assumes: Text | None = None


#: Figures of memory outside torch, the most direct first.
_AS_ONE = (
    Measure("non_torch", text("non-torch increase of the profile run"), False),
    Measure(
        "used_by_device",
        text("used on the device less allocated, after the profile run"),
        True,
        text("blocks that torch reserves and does not use are taken to be as simulated"),
    ),
    Measure(
        "rest",
        text("request less weights and KV cache"),
        True,
        text("torch's own peak is taken to be as simulated"),
    ),
)
_GRAPH_CONSTANTS = ("graph_capture_bytes", "graph_argument_bytes", "graph_queue_bytes")
_PER_PROCESS = text("process and device")
_PER_COMMUNICATOR = text("communicator")
#: Constant of the profile -> owner, and what it is counted by. As ``sim.calibrate`` reads them.
_COUNTED: dict[str, tuple[str, Text]] = {
    "context_bytes": (CONTEXT, _PER_PROCESS),
    "kernels_bytes": (KERNELS, _PER_PROCESS),
    "hccl_base_bytes": (COMMUNICATORS, _PER_COMMUNICATOR),
    "atb_pool_bytes": (ATB, _PER_PROCESS),
    "graph_capture_bytes": (GRAPH, text("captured graph")),
}
#: Two readings of one owner may lie so far apart for the pages that they are rounded to.
_PAGES = 4 * MIB


def figures_of(
    rank: RankReport, simulated: bool, requested_bytes: int | None
) -> dict[str, ReportedFigure]:
    """Return what a rank's report tells of memory outside torch, by name; absent: it does not.

    Args:
        rank: of a run, a plan or a log.
        simulated: a simulated device's profile set what lies outside torch.
        requested_bytes: of the budget, where the report does not say it.
    """
    figures, halves, budget = rank.figures, rank.half_units, rank.budget
    found: dict[str, ReportedFigure] = {}

    def add(name: str, value: int | float | None, source: str, parts: Iterable[str]) -> None:
        if value is not None:
            half = sum(halves.get(part, 0) for part in parts)
            how = MEASURED if len(list(parts)) == 1 else DERIVED
            found[name] = ReportedFigure(int(value), half, how, source)

    initial = "initial_non_torch_bytes"
    if figures.get(initial) is not None:
        add("context", figures[initial], text("non-torch at the start"), [initial])
    else:
        parts = ["device_total_bytes", "initial_free_bytes"]
        total, free = (figures.get(part) for part in parts)
        add(
            "context",
            (None if total is None or free is None else int(total) - int(free)),
            text("device total less free at the start"),
            parts,
        )
    held = held_quantities(rank, simulated)
    cleared = ["profile_end_non_torch_bytes", "profile_after_non_torch_bytes"]
    source = text("non-torch before less after the last empty_cache of the profile run")
    add("cleared", held["non_torch_cleared"], source, cleared)
    for row in budget.terms:
        if row.name in ("non_torch", "used_by_device") and row.bytes is not None:
            measure = next(each for each in _AS_ONE if each.name == row.name)
            found[row.name] = ReportedFigure(
                row.bytes, row.half_unit_bytes, MEASURED, measure.source
            )
    kv, weights = budget.engine_kv_cache_bytes, figures.get("weights_bytes")
    requested = requested_bytes if budget.requested_bytes is None else budget.requested_bytes
    if None not in (kv, weights, requested) and budget.override is None:
        sizes = ["kv_cache_bytes", "weights_bytes"]
        rest = int(requested or 0) - int(weights or 0) - int(kv or 0)
        add("rest", rest, _AS_ONE[-1].source, sizes)
    add("graph", figures.get("graph_bytes"), text("captured graphs"), ["graph_bytes"])
    parts_of = next((row.parts for row in budget.terms if row.name == "graph"), ())
    add("graph_runtime", next((part.bytes for part in parts_of if part.name == "runtime"), None),
        text("of it in the runtime"), ["graph_bytes"])  # fmt: skip
    return found


def holds_context(equation: str | None) -> bool:
    """Return whether an equation subtracts what a process holds before it does anything."""
    row = form_of(equation)
    parts = () if row is None else row.terms
    return any("initial_non_torch" in (term.name, *term.parts) for term in parts)


@dataclass(frozen=True)
class ComparedRank:
    """One side of the comparison: a rank on hardware, or the plan of its command."""

    told: Mapping[str, ReportedFigure]
    equation: str | None = None
    #: What ``sim.calibrate`` reads from it; None: no counters, as of a log.
    counted: Calibration | None = None
    communicators: int = 0  # that had a collective
    release: str | None = None  # of the engine

    @property
    def minor(self) -> list[str] | None:
        """Return the release as major and minor number; None where it is not known."""
        return None if self.release is None else self.release.split(".")[:2]


@dataclass(frozen=True)
class Corrected:
    """All that was compared, and the profile's constants as they become."""

    rows: list[ProfileCorrection]
    calibration: Calibration  # for ``sim.calibrate.render``

    @property
    def any(self) -> bool:
        return bool(self.calibration.settings or self.calibration.workspace)


def correct(
    hardware: ComparedRank,
    simulated: ComparedRank,
    profile: DeviceProfile,
    from_kv_cache: bool = False,
) -> Corrected:
    """Compare both sides owner by owner; return the corrections of the profile's constants.

    Args:
        hardware: the run that corrects.
        simulated: the plan of its command.
        profile: of that plan.
        from_kv_cache: correct also by what the request leaves beside weights and KV cache. With
            published runs that made as many plans worse as better (docs/accuracy.md).
    """
    draft = _Draft(profile)
    rows = _counted_rows(hardware, simulated, draft)
    done = {row.owner for row in rows}
    if CONTEXT not in done:
        rows.append(_context(hardware, simulated, draft))
    if KERNELS not in done:
        rows.append(_as_one(hardware, simulated, draft, rows, from_kv_cache))
    if WORKSPACE not in done:
        rows.append(_workspace(hardware, simulated, draft))
    if GRAPH not in done:
        rows.append(_graph(hardware, simulated, draft))
    return Corrected(rows, draft.calibration(rows))


class _Draft:
    """The constants of a profile while they are corrected."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile
        self.values = {key: int(value) for key, value in vars(profile.memory).items()}
        self.rules = {rule.pattern: rule.base_bytes for rule in profile.workspace}

    def move(self, key: str, size: int) -> tuple[Constant, int]:
        """Change a constant by ``size``, not below 0; return it and what could not be taken."""
        before = self.values[key]
        after = max(0, before + size)
        self.values[key] = after
        return Constant(key, before, after), size - (after - before)

    def rule(self, pattern: str, after: int) -> Constant:
        """Set the workspace of the operators that a pattern stands for."""
        before = self.rules.get(pattern, 0)
        self.rules[pattern] = after
        return Constant(pattern, before, after)

    def calibration(self, rows: Iterable[ProfileCorrection]) -> Calibration:
        """Return the changed constants with what changed them."""
        result = Calibration()
        for row in rows:
            for each in row.constants:
                said = f"corrected from {each.before:_} by {row.owner} of hardware ({row.source})"
                setting = Setting(each.key, each.after, said)
                place = result.workspace if row.owner == WORKSPACE else result.settings
                place.append(setting)
        limit = self.values["context_bytes"]
        if self.values["context_runtime_bytes"] > limit:  # it is a part of the context
            result.settings.append(Setting("context_runtime_bytes", limit, "at most the context"))
        return result


def _row(
    owner: str,
    hardware: ReportedFigure | None,
    simulated: ReportedFigure | None,
    applied: int = 0,
    constants: Iterable[Constant] = (),
    scales_with: Text | None = None,
    reason: Text | None = None,
) -> ProfileCorrection:
    changed = [each for each in constants if each.before != each.after]
    return ProfileCorrection(
        owner=owner,
        hardware_bytes=None if hardware is None else hardware.bytes,
        half_unit_bytes=0 if hardware is None else hardware.half_unit_bytes,
        hardware_how=None if hardware is None else hardware.how,
        source=None if hardware is None else hardware.source,
        simulated_bytes=None if simulated is None else simulated.bytes,
        applied_bytes=applied,
        constants=changed,
        scales_with=scales_with if changed else None,
        reason=reason,
    )


def _silent(
    owner: str, hardware: ReportedFigure | None, simulated: ReportedFigure | None
) -> ProfileCorrection:
    """Return the row of an owner that one of the sides does not tell."""
    if hardware is None:
        reason = text("the hardware run does not tell it")
    else:
        reason = text("the plan of the hardware's command does not tell it")
    return _row(owner, hardware, simulated, reason=reason)


def _within_rounding(hardware: ReportedFigure, difference: int) -> Text | None:
    if abs(difference) > hardware.half_unit_bytes:
        return None
    if difference == 0:
        return text("equal")
    return text("within the last printed digit of the log")


def _context(hardware: ComparedRank, simulated: ComparedRank, draft: _Draft) -> ProfileCorrection:
    """Correct what a process holds before it does anything."""
    held = hardware.told.get("context")
    modelled = ReportedFigure(draft.values["context_bytes"], source="context_bytes")
    modelled = simulated.told.get("context", modelled)
    if held is None:
        return _silent(CONTEXT, None, modelled)
    difference = held.bytes - modelled.bytes
    reason = _within_rounding(held, difference)
    if reason is None and not 0 <= held.bytes <= CONTEXT_CEILING_BYTES:
        reason = text("more than a context: other processes were on the device")
    if reason is not None:
        return _row(CONTEXT, held, modelled, reason=reason)
    constant, left = draft.move("context_bytes", difference)
    note = text("another process on the device at the start would be in it")
    return _row(
        CONTEXT, held, modelled, difference - left, [constant], _PER_PROCESS,
        None if held.how == MEASURED and not held.half_unit_bytes else note,
    )  # fmt: skip


def _as_one(
    hardware: ComparedRank,
    simulated: ComparedRank,
    draft: _Draft,
    others: Iterable[ProfileCorrection],
    from_kv_cache: bool,
) -> ProfileCorrection:
    """Correct all that was added outside torch, as one figure.

    More than simulated is added per process and device, at its first operator. Less is taken there,
    then from communicators; never below nothing.
    """
    both = [each for each in _AS_ONE if each.name in hardware.told]
    measure = next((each for each in both if each.name in simulated.told), None)
    reason: Text | None
    if measure is None:
        first = hardware.told[both[0].name] if both else None
        return _silent(NON_TORCH, first, None)
    held, modelled = hardware.told[measure.name], simulated.told[measure.name]
    with_context = measure.of_equation and holds_context(hardware.equation)
    unlike = hardware.equation != simulated.equation
    if measure.of_equation and unlike:
        reason = text(
            "the releases have different equations, {hardware} and {simulated}",
            hardware=hardware.equation,
            simulated=simulated.equation,
        )
        return _row(NON_TORCH, held, modelled, reason=reason)
    in_context = sum(row.applied_bytes for row in others if row.owner == CONTEXT)
    difference = held.bytes - modelled.bytes - (in_context if with_context else 0)
    reason = _within_rounding(held, difference)
    if reason is None and measure.name == "rest" and not from_kv_cache:
        reason = text(
            "shown, not corrected: torch's peak is in it, and no figure says how much; a log with "
            "the non-torch increase corrects"
        )
    if reason is not None:
        return _row(NON_TORCH, held, modelled, reason=reason)
    kernels, left = draft.move("kernels_bytes", difference)
    constants = [kernels]
    scales: Text = _PER_PROCESS
    if left and simulated.communicators:
        each = left // simulated.communicators
        base, rest = draft.move("hccl_base_bytes", each)
        constants.append(base)
        left = rest * simulated.communicators + left % simulated.communicators
        changed = kernels.before != kernels.after
        scales = join(", ", [_PER_PROCESS, _PER_COMMUNICATOR]) if changed else _PER_COMMUNICATOR
    notes = [measure.assumes] if measure.assumes is not None else []
    notes.append(
        text("not told apart: kernels and what the runtime loads, communicators, ATB's pool")
    )
    if with_context and not in_context:
        notes.append(text("the context is in it"))
    if left:
        notes.append(text("{size:mib} MiB less than the profile can give up", size=-left))
    return _row(
        NON_TORCH, held, modelled, difference - left, constants, scales, join("; ", notes)
    )  # fmt: skip


def _workspace(hardware: ComparedRank, simulated: ComparedRank, draft: _Draft) -> ProfileCorrection:
    """Correct the workspace that the last empty_cache of the profile run gave back."""
    held, modelled = hardware.told.get("cleared"), simulated.told.get("cleared")
    if held is None or modelled is None:
        return _silent(WORKSPACE, held, modelled)
    difference = held.bytes - modelled.bytes
    reason = _within_rounding(held, difference)
    pattern = next(
        (key for key, size in draft.rules.items() if abs(size - modelled.bytes) <= _PAGES), None
    )
    if reason is None and modelled.bytes <= 0:
        reason = text("the plan gives none back there: not known whose it is")
    elif reason is None and pattern is None:
        reason = text("no single operator has this workspace: not known whose it is")
    if reason is not None or pattern is None:
        return _row(WORKSPACE, held, modelled, reason=reason)
    constant = draft.rule(pattern, max(0, draft.rules[pattern] + difference))
    return _row(
        WORKSPACE, held, modelled, constant.after - constant.before, [constant],
        text("operator stream"), text("taken as of {operator} alone", operator=pattern),
    )  # fmt: skip


def _graph(hardware: ComparedRank, simulated: ComparedRank, draft: _Draft) -> ProfileCorrection:
    """Correct what the runtime holds of captured graphs: its three constants by one factor."""
    held, modelled = hardware.told.get("graph"), simulated.told.get("graph")
    if held is None or modelled is None:
        row = _silent(GRAPH, held, modelled)
        if held is not None:
            hint = text("the plan stops before graphs are captured: --until ready compares them")
            row = replace(row, reason=hint)
        return row
    difference = held.bytes - modelled.bytes
    reason = _within_rounding(held, difference)
    if reason is None and (hardware.minor is None or hardware.minor != simulated.minor):
        reason = text(
            "another release captures other graphs: {hardware} and {simulated}",
            hardware=hardware.release or text("not known"),
            simulated=simulated.release or text("not known"),
        )
    runtime = simulated.told.get("graph_runtime")
    if reason is None and (runtime is None or runtime.bytes <= 0):
        reason = text("the simulated graphs hold nothing in the runtime")
    if reason is not None or runtime is None:
        return _row(GRAPH, held, modelled, reason=reason)
    factor = max(0.0, 1 + difference / runtime.bytes)
    constants = [
        draft.move(key, round(draft.values[key] * factor) - draft.values[key])[0]
        for key in _GRAPH_CONSTANTS
    ]
    return _row(
        GRAPH, held, modelled, max(difference, -runtime.bytes), constants,
        text("captured graphs and their tasks"),
        text("torch's part of the graphs is taken to be as simulated"),
    )  # fmt: skip


def _counted_rows(
    hardware: ComparedRank, simulated: ComparedRank, draft: _Draft
) -> list[ProfileCorrection]:
    """Return corrections owner by owner, where the runtime's counters were read on both sides."""
    if hardware.counted is None or simulated.counted is None:
        return []
    told = {setting.key: setting for setting in hardware.counted.settings}
    if "kernels_bytes" not in told:  # no counters by module
        return []
    modelled = {setting.key: setting for setting in simulated.counted.settings}
    rows = []
    for key, (owner, scales) in _COUNTED.items():
        held, ours = told.get(key), modelled.get(key)
        if held is None and ours is None:
            continue
        left, right = _of_setting(held), _of_setting(ours)
        if left is None or right is None:
            rows.append(_silent(owner, left, right))
            continue
        size = left.bytes - right.bytes
        if size == 0:
            rows.append(_row(owner, left, right, reason=text("equal")))
            continue
        constants, applied = [], 0
        if owner == GRAPH:
            # both sides tell a graph's three parts as one: all go up or down together
            factor = left.bytes / right.bytes if right.bytes else 0.0
            for name in _GRAPH_CONSTANTS:
                before = draft.values[name]
                constants.append(draft.move(name, round(before * factor) - before)[0])
            applied = size
        else:
            constant, missing = draft.move(key, size)
            constants, applied = [constant], size - missing
        rows.append(_row(owner, left, right, applied, constants, scales))
    return rows + _counted_workspace(hardware.counted, simulated.counted, draft)


def _counted_workspace(
    hardware: Calibration, simulated: Calibration, draft: _Draft
) -> list[ProfileCorrection]:
    ours = {setting.key: setting for setting in simulated.workspace}
    rows = []
    for setting in hardware.workspace:
        left, right = _of_setting(setting), _of_setting(ours.get(setting.key))
        if left is None or right is None:
            rows.append(_silent(WORKSPACE, left, right))
        elif left.bytes == right.bytes:
            rows.append(_row(WORKSPACE, left, right, reason=text("equal")))
        else:
            before = right.bytes
            draft.rules[setting.key] = before
            constant = draft.rule(setting.key, max(0, before + left.bytes - right.bytes))
            scale = text("operator stream")
            applied = constant.after - before
            rows.append(_row(WORKSPACE, left, right, applied, [constant], scale))
    return rows


def _of_setting(setting: Setting | None) -> ReportedFigure | None:
    if setting is None:
        return None
    how = next((each for each in (MEASURED, DERIVED) if setting.source.startswith(each)), DERIVED)
    return ReportedFigure(setting.value, 0, how, f"{setting.key}: {setting.source}")
