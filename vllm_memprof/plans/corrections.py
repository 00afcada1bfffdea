"""What a run on hardware says of owners that a device profile models: corrections of its constants.

In: figures of one rank on hardware and of one rank of a plan of the same command on the simulated
device, both read from reports in the same way (`figures_of`); the profile. Out: corrections, each
with the constants that it changes. Pure: no file, no engine.

Torch's own memory is run, not modelled, and is never corrected. Where hardware tells memory outside
torch as one figure, the difference is carried over as one, per process and device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vllm_memprof.accounting.budget.equations import form_of
from vllm_memprof.accounting.model import DERIVED, MEASURED, RankReport
from vllm_memprof.accounting.readings.quantities import CONTEXT_CEILING_BYTES
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
from vllm_memprof.units import MIB, minus


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


def figures_of(rank: RankReport, requested_bytes: int | None) -> dict[str, ReportedFigure]:
    """Return what a rank's report tells of memory outside torch, by name; absent: it does not.

    Args:
        rank: of a run, a plan or a log.
        requested_bytes: of the budget, where the report does not say it.
    """
    budget = rank.budget
    found: dict[str, ReportedFigure] = {}

    def add(name: str, size: int | None, source: str, *figures: str) -> None:
        if size is not None:
            how = MEASURED if len(figures) == 1 else DERIVED
            found[name] = ReportedFigure(size, rank.rounding(*figures), how, source)

    total, free = "device_total_bytes", "initial_free_bytes"
    used = minus(rank.figure(total), rank.figure(free))
    add("context", used, text("device total less free at the start"), total, free)
    initial = "initial_non_torch_bytes"
    add("context", rank.figure(initial), text("non-torch at the start"), initial)
    cleared = rank.readings["non_torch_cleared"].bytes
    source = text("non-torch before less after the last empty_cache of the profile run")
    add("cleared", cleared, source, "profile_end_non_torch_bytes", "profile_after_non_torch_bytes")
    for row in budget.terms:
        if row.name in ("non_torch", "used_by_device") and row.bytes is not None:
            measure = next(each for each in _AS_ONE if each.name == row.name)
            found[row.name] = ReportedFigure(
                row.bytes, row.half_unit_bytes, MEASURED, measure.source
            )
    kv, weights, graph = "kv_cache_bytes", "weights_bytes", "graph_bytes"
    requested = requested_bytes if budget.requested_bytes is None else budget.requested_bytes
    if budget.override is None:
        rest = minus(minus(requested, rank.figure(weights)), rank.figure(kv))
        add("rest", rest, _AS_ONE[-1].source, kv, weights)
    add("graph", rank.figure(graph), text("captured graphs"), graph)
    parts_of = next((row.parts for row in budget.terms if row.name == "graph"), ())
    runtime = next((part.bytes for part in parts_of if part.name == "runtime"), None)
    add("graph_runtime", runtime, text("of it in the runtime"), graph)
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
    draft = _Draft(profile, hardware, simulated)
    draft.counters()
    done = {row.owner for row in draft.rows}
    if CONTEXT not in done:
        draft.context()
    if KERNELS not in done:
        draft.as_one(from_kv_cache)
    if WORKSPACE not in done:
        draft.cleared()
    if GRAPH not in done:
        draft.graphs()
    return Corrected(draft.rows, draft.calibration())


_Pair = tuple["ReportedFigure | None", "ReportedFigure | None"]


class _Draft:
    """The constants of a profile while they are corrected, and a row for each owner."""

    def __init__(
        self, profile: DeviceProfile, hardware: ComparedRank, simulated: ComparedRank
    ) -> None:
        self.hardware, self.simulated = hardware, simulated
        self.values = {key: int(value) for key, value in vars(profile.memory).items()}
        self.rules = {rule.pattern: rule.base_bytes for rule in profile.workspace}
        self.rows: list[ProfileCorrection] = []

    def told(self, name: str) -> _Pair:
        """Return a figure as both sides tell it."""
        return self.hardware.told.get(name), self.simulated.told.get(name)

    def row(
        self,
        owner: str,
        pair: _Pair,
        applied: int = 0,
        constants: Iterable[Constant] = (),
        scales_with: Text | None = None,
        reason: Text | None = None,
    ) -> None:
        """Add the row of an owner."""
        held, modelled = pair
        changed = [each for each in constants if each.before != each.after]
        self.rows.append(
            ProfileCorrection(
                owner=owner,
                hardware_bytes=None if held is None else held.bytes,
                half_unit_bytes=0 if held is None else held.half_unit_bytes,
                hardware_how=None if held is None else held.how,
                source=None if held is None else held.source,
                simulated_bytes=None if modelled is None else modelled.bytes,
                applied_bytes=applied,
                constants=changed,
                scales_with=scales_with if changed else None,
                reason=reason,
            )
        )

    def difference(
        self, owner: str, pair: _Pair, why: Text | None = None, taken: int = 0
    ) -> tuple[int, ReportedFigure, ReportedFigure] | None:
        """Return hardware less simulated less ``taken``, with both.

        None where it is not corrected, with a row that says why: ``why``, where both sides tell it
        and differ.
        """
        held, modelled = pair
        if held is None:
            why = text("the hardware run does not tell it")
        elif modelled is None:
            why = why or text("the plan of the hardware's command does not tell it")
        else:
            size = held.bytes - modelled.bytes - taken
            if size == 0:
                why = text("equal")
            elif abs(size) <= held.half_unit_bytes:
                why = text("within the last printed digit of the log")
            elif why is None:
                return size, held, modelled
        self.row(owner, pair, reason=why)
        return None

    def move(self, key: str, size: int) -> tuple[Constant, int]:
        """Change a constant by ``size``, not below 0; return it and what could not be taken."""
        before = self.values[key]
        after = max(0, before + size)
        self.values[key] = after
        return Constant(key, before, after), size - (after - before)

    def scale_graphs(self, factor: float) -> list[Constant]:
        """Change what the runtime holds of captured graphs: its three constants by one factor."""
        sizes = {key: self.values[key] for key in _GRAPH_CONSTANTS}
        return [self.move(key, round(size * factor) - size)[0] for key, size in sizes.items()]

    def calibration(self) -> Calibration:
        """Return the changed constants with what changed them."""
        result = Calibration()
        for row in self.rows:
            for each in row.constants:
                said = f"corrected from {each.before:_} by {row.owner} of hardware ({row.source})"
                place = result.workspace if row.owner == WORKSPACE else result.settings
                place.append(Setting(each.key, each.after, said))
        limit = self.values["context_bytes"]
        if self.values["context_runtime_bytes"] > limit:  # it is a part of the context
            result.settings.append(Setting("context_runtime_bytes", limit, "at most the context"))
        return result

    def context(self) -> None:
        """Correct what a process holds before it does anything."""
        held, modelled = self.told("context")
        pair = held, modelled or ReportedFigure(self.values["context_bytes"])
        why = None
        if held is not None and not 0 <= held.bytes <= CONTEXT_CEILING_BYTES:
            why = text("more than a context: other processes were on the device")
        found = self.difference(CONTEXT, pair, why)
        if found is None:
            return
        size, held, _ = found
        constant, left = self.move("context_bytes", size)
        note = None
        if held.how != MEASURED or held.half_unit_bytes:
            note = text("another process on the device at the start would be in it")
        self.row(CONTEXT, pair, size - left, [constant], _PER_PROCESS, note)

    def as_one(self, from_kv_cache: bool) -> None:
        """Correct all that was added outside torch, as one figure.

        More than simulated is added per process and device, at its first operator. Less is taken
        there, then from communicators; never below nothing.
        """
        told = [each for each in _AS_ONE if each.name in self.hardware.told]
        measure = next((each for each in told if each.name in self.simulated.told), None)
        if measure is None:
            self.difference(NON_TORCH, (self.hardware.told[told[0].name] if told else None, None))
            return
        pair, equation = self.told(measure.name), self.hardware.equation
        if measure.of_equation and equation != self.simulated.equation:
            reason = text(
                "the releases have different equations, {hardware} and {simulated}",
                hardware=equation,
                simulated=self.simulated.equation,
            )
            self.row(NON_TORCH, pair, reason=reason)
            return
        with_context = measure.of_equation and holds_context(equation)
        in_context = sum(row.applied_bytes for row in self.rows if row.owner == CONTEXT)
        why = None
        if measure.name == "rest" and not from_kv_cache:
            why = text(
                "shown, not corrected: torch's peak is in it, and no figure says how much; a log "
                "with the non-torch increase corrects"
            )
        found = self.difference(NON_TORCH, pair, why, in_context if with_context else 0)
        if found is None:
            return
        size, opened = found[0], self.simulated.communicators
        kernels, left = self.move("kernels_bytes", size)
        constants, scales = [kernels], _PER_PROCESS
        if left and opened:
            base, rest = self.move("hccl_base_bytes", left // opened)
            constants.append(base)
            left = rest * opened + left % opened
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
        self.row(NON_TORCH, pair, size - left, constants, scales, join("; ", notes))

    def cleared(self) -> None:
        """Correct the workspace that the last empty_cache of the profile run gave back."""
        pair = self.told("cleared")
        simulated = 0 if pair[1] is None else pair[1].bytes
        near = (key for key, size in self.rules.items() if abs(size - simulated) <= _PAGES)
        pattern, why = next(near, ""), None
        if pair[1] is not None and simulated <= 0:
            why = text("the plan gives none back there: not known whose it is")
        elif pair[1] is not None and not pattern:
            why = text("no single operator has this workspace: not known whose it is")
        found = self.difference(WORKSPACE, pair, why)
        if found is None:
            return
        before = self.rules[pattern]
        constant = Constant(pattern, before, max(0, before + found[0]))
        note = text("taken as of {operator} alone", operator=pattern)
        applied = constant.after - before
        self.row(WORKSPACE, pair, applied, [constant], text("operator stream"), note)

    def graphs(self) -> None:
        """Correct what the runtime holds of captured graphs."""
        pair, runtime, why = self.told("graph"), self.simulated.told.get("graph_runtime"), None
        hardware, simulated = self.hardware, self.simulated
        if pair[1] is None:
            why = text("the plan stops before graphs are captured: --until ready compares them")
        elif hardware.minor is None or hardware.minor != simulated.minor:
            why = text(
                "another release captures other graphs: {hardware} and {simulated}",
                hardware=hardware.release or text("not known"),
                simulated=simulated.release or text("not known"),
            )
        elif runtime is None or runtime.bytes <= 0:
            why = text("the simulated graphs hold nothing in the runtime")
        found = self.difference(GRAPH, pair, why)
        if found is None or runtime is None:
            return
        size = max(found[0], -runtime.bytes)
        constants = self.scale_graphs(1 + size / runtime.bytes)
        note = text("torch's part of the graphs is taken to be as simulated")
        self.row(GRAPH, pair, size, constants, text("captured graphs and their tasks"), note)

    def counters(self) -> None:
        """Correct owner by owner, where the runtime's counters were read on both sides."""
        held, modelled = self.hardware.counted, self.simulated.counted
        if held is None or modelled is None:
            return
        told, ours = (
            {setting.key: _of_setting(setting) for setting in side.settings}
            for side in (held, modelled)
        )
        if "kernels_bytes" not in told:  # no counters by module
            return
        for key, (owner, scales) in _COUNTED.items():
            if key not in told and key not in ours:
                continue
            pair = told.get(key), ours.get(key)
            found = self.difference(owner, pair)
            if found is None:
                continue
            size, left, right = found
            if owner == GRAPH:  # both sides tell a graph's three parts as one
                constants = self.scale_graphs(left.bytes / right.bytes if right.bytes else 0.0)
            else:
                constant, missing = self.move(key, size)
                constants, size = [constant], size - missing
            self.row(owner, pair, size, constants, scales)
        rules = {setting.key: _of_setting(setting) for setting in modelled.workspace}
        for setting in held.workspace:
            pair = _of_setting(setting), rules.get(setting.key)
            found = self.difference(WORKSPACE, pair)
            if found is not None:
                before = found[2].bytes
                constant = Constant(setting.key, before, max(0, before + found[0]))
                applied = constant.after - before
                self.row(WORKSPACE, pair, applied, [constant], text("operator stream"))


def _of_setting(setting: Setting) -> ReportedFigure:
    how = next((each for each in (MEASURED, DERIVED) if setting.source.startswith(each)), DERIVED)
    return ReportedFigure(setting.value, 0, how, f"{setting.key}: {setting.source}")
