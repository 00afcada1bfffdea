"""What a run on hardware says of owners that a device profile models: corrections of its constants.

In: figures of one rank on hardware and of one rank of a plan of the same command on the simulated
device, both read from reports in the same way (`figures_of`); the profile. Out: corrections, each
with the constants that it changes. Pure: no file, no engine.

Torch's own memory is run, not modelled, and is never corrected. Where hardware tells memory outside
torch as one figure, the difference is carried over as one, per process and device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec.structs import asdict

from vllm_memprof.accounting.budget.equations import form_of
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.readings.quantities import CONTEXT_CEILING_BYTES
from vllm_memprof.plans.model import TABLES
from vllm_memprof.record.codec import computed, from_json, one_of
from vllm_memprof.record.spans import DERIVED, ESTIMATED, MEASURED, How
from vllm_memprof.sim.calibrate import Calibration, Setting
from vllm_memprof.sim.profiles import DeviceProfile
from vllm_memprof.text import Text, join, text, titled
from vllm_memprof.units import MIB, minus


@dataclass(frozen=True)
class Owner:
    """An owner of memory that a device profile models."""

    title: str
    constants: list[str]  # of the profile, which take a difference one after the other
    scales_with: str  # what the constants are counted by in another plan
    note: str = ""  # the assumption, where no counter tells it


OWNERS = {name: from_json(Owner, row) for name, row in TABLES["owners"].items()}
CONTEXT, NON_TORCH, WORKSPACE, GRAPH = "context", "non_torch", "npu_workspace", "graph"
#: The first constant of an owner -> the owner, as ``sim.calibrate`` reads them.
_COUNTED = {key: name for name, row in OWNERS.items() for key in row.constants[:1]}


@dataclass(frozen=True)
class ReportedFigure:
    """A figure as one run tells it."""

    bytes: int
    half_unit_bytes: int = 0  # half of the last printed digit; 0 from hooks
    how: How = MEASURED
    source: str = ""  # which figure it is, and who read it


@dataclass(frozen=True)
class Constant:
    """A modelled constant of the device profile, before and after the correction; bytes."""

    key: str  # of the profile; of operator workspace the glob
    before: int
    after: int


@dataclass(frozen=True)
class ProfileCorrection:
    """One owner of memory that the profile models, as hardware and the simulated device have it."""

    owner: Annotated[str, one_of(*OWNERS)]
    hardware: ReportedFigure | None
    simulated: ReportedFigure | None  # for the same command
    applied_bytes: int = 0  # of the difference; 0: not corrected
    constants: list[Constant] = field(default_factory=list)
    scales_with: str | None = None  # what the constants are counted by in another plan
    #: Why it is not corrected, not wholly, or on which assumption.
    reason: str | None = None
    #: Of applied_bytes in another plan than the hardware's own: never better than this.
    carried_how: How = ESTIMATED

    @property
    @computed
    def difference_bytes(self) -> int | None:
        """Hardware less simulated."""
        if self.hardware is None or self.simulated is None:
            return None
        return self.hardware.bytes - self.simulated.bytes


#: Figures of all memory outside torch, the most direct first. The second holds the context too,
#: where the equation subtracts it.
_AS_ONE = {
    "non_torch": text("non-torch increase of the profile run"),
    "used_by_device": text("used on the device less allocated, after the profile run"),
}
#: Two readings of one owner may lie so far apart for the pages that they are rounded to.
_PAGES = 4 * MIB


def figures_of(rank: RankReport) -> dict[str, ReportedFigure]:
    """Return what a rank's report tells of memory outside torch, by name; absent: it does not.

    Args:
        rank: of a run, a plan or a log.
    """
    terms = {row.name: row for row in rank.budget.terms if row.bytes is not None}
    parts = {part.name: part.bytes for row in terms.values() for part in row.parts}
    total, free, start = "device_total_bytes", "initial_free_bytes", "initial_non_torch_bytes"
    ends = "profile_end_non_torch_bytes", "profile_after_non_torch_bytes"
    rows = (
        (
            "context",
            minus(rank.figure(total), rank.figure(free)),
            text("device total less free at the start"),
            (total, free),
        ),
        ("context", rank.figure(start), text("non-torch at the start"), (start,)),
        (
            "cleared",
            rank.readings["non_torch_cleared"].bytes,
            text("non-torch before less after the last empty_cache of the profile run"),
            ends,
        ),
        ("graph", rank.figure("graph_bytes"), text("graph memory"), ("graph_bytes",)),
        ("graph_runtime", parts.get("runtime"), text("of it in the runtime"), ("graph_bytes",)),
    )
    found = {
        name: ReportedFigure(
            size, rank.rounding(*names), DERIVED if len(names) > 1 else MEASURED, source
        )
        for name, size, source, names in rows
        if size is not None
    }
    for name in _AS_ONE.keys() & terms.keys():
        row = terms[name]
        found[name] = ReportedFigure(row.bytes or 0, row.half_unit_bytes, source=_AS_ONE[name])
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
    release: str | None = None  # of the engine: major and minor number


_Pair = tuple[ReportedFigure | None, ReportedFigure | None]


class Corrections:
    """Both sides compared owner by owner: a row for each, and the profile's constants.

    Args:
        hardware: the run that corrects.
        simulated: the plan of its command.
        profile: of that plan.
    """

    def __init__(
        self, hardware: ComparedRank, simulated: ComparedRank, profile: DeviceProfile
    ) -> None:
        self.hardware, self.simulated = hardware, simulated
        self.values: dict[str, int] = asdict(profile.memory)
        for each in simulated.counted.settings if simulated.counted else ():
            if each.key == "kernels_bytes":  # with the binaries of the plan's operators
                self.values[each.key] = each.value
        self.rules = {pattern: rule.base for pattern, rule in profile.workspace.items()}
        self.rows: list[ProfileCorrection] = []
        self._counters()
        done = {row.owner for row in self.rows}
        if CONTEXT not in done:  # what a process holds before it does anything
            left, right = self.told(CONTEXT)
            why = None
            if left is not None and not 0 <= left.bytes <= CONTEXT_CEILING_BYTES:
                why = text("more than a context: other processes were on the device")
            right = right or ReportedFigure(self.values["context_bytes"])
            self.compare(CONTEXT, (left, right), why)
        if "kernels" not in done:
            self._as_one()
        if WORKSPACE not in done:  # what the last empty_cache of the profile run gave back
            pair, why = self.told("cleared"), None
            size = 0 if pair[1] is None else pair[1].bytes
            near = [key for key, held in self.rules.items() if abs(held - size) <= _PAGES][:1]
            if pair[1] is not None and (size <= 0 or not near):
                why = text("no single operator has this workspace: not known whose it is")
            self.values |= self.rules
            self.compare(WORKSPACE, pair, why, constants=near)
        if GRAPH not in done:  # what the runtime holds of captured graphs
            pair, runtime, why = self.told(GRAPH), simulated.told.get("graph_runtime"), None
            releases = hardware.release, simulated.release
            if pair[1] is None:
                why = text("the plan stops before graphs are captured: --until ready compares them")
            elif releases[0] is None or releases[0] != releases[1]:
                why = text(
                    "a different release captures other graphs: {hardware} and {simulated}",
                    hardware=releases[0] or "-",
                    simulated=releases[1] or "-",
                )
            elif runtime is None or runtime.bytes <= 0:
                why = text("the simulated graphs use nothing in the runtime")
            self.compare(GRAPH, pair, why, scaled=runtime.bytes if runtime else 0)

    def calibration(self) -> Calibration:
        """Return the changed constants with what changed them, for ``sim.calibrate.render``."""
        result = Calibration()
        for row in self.rows:
            source = "" if row.hardware is None else row.hardware.source
            place = result.workspace if row.owner == WORKSPACE else result.settings
            for each in row.constants:
                said = f"corrected from {each.before:_} by {row.owner} of hardware ({source})"
                place.append(Setting(each.key, each.after, said))
                if each.key == "kernels_bytes":  # all of them
                    place.append(Setting("operator_binary_bytes", 0, said))
        limit = self.values["context_bytes"]
        if self.values["context_runtime_bytes"] > limit:  # it is a part of the context
            result.settings.append(Setting("context_runtime_bytes", limit, "at most the context"))
        return result

    def told(self, name: str) -> _Pair:
        """Return a figure as both sides tell it."""
        return self.hardware.told.get(name), self.simulated.told.get(name)

    def compare(
        self,
        owner: str,
        pair: _Pair,
        why: Text | None = None,
        notes: Sequence[str] | None = (),
        constants: Sequence[str] = (),
        taken: int = 0,
        scaled: int = 0,
    ) -> None:
        """Add the row of an owner; carry its difference over to constants, not below 0.

        Args:
            owner: of the row.
            pair: its figure on both sides.
            why: it is not corrected where both sides tell it and differ; None: it is.
            notes: on which assumptions it is, beside the owner's own; None: counters tell it.
            constants: that take the difference, one after the other; none: those of the owner.
            taken: of the difference, by another owner.
            scaled: bytes that the constants make together, all of which are changed by one factor.
        """
        hardware, simulated = pair
        changed, left = list[Constant](), 0
        if hardware is None:
            why = text("the hardware run does not tell it")
        elif simulated is None:
            why = why or text("the plan of the hardware's command does not tell it")
        else:
            left = hardware.bytes - simulated.bytes - taken
            if left == 0:
                why = text("equal")
            elif abs(left) <= hardware.half_unit_bytes:
                why = text("within the last printed digit of the log")
        if why is not None:
            self.rows.append(ProfileCorrection(owner, *pair, reason=why))
            return
        size = left = max(left, -scaled) if scaled else left
        for key in constants or OWNERS[owner].constants:
            opened = self.simulated.communicators
            count = opened if (owner, key) == (NON_TORCH, "hccl_base_bytes") else 1
            before = self.values[key]
            after = before + round(before * size / scaled) if scaled else before
            if count and not scaled:
                after = max(0, before + left // count)
                left -= (after - before) * count
            self.values[key] = after
            if after != before:
                changed.append(Constant(key, before, after))
        less = text("{size:mib} MiB less than the profile can give up", size=-left)
        assumed = [] if notes is None else [titled(OWNERS[owner].note), *notes]
        reason = join("; ", [*assumed, left != 0 and not scaled and less])
        owners = (OWNERS[_COUNTED.get(each.key, owner)] for each in changed)
        scales = join(", ", dict.fromkeys(titled(each.scales_with) for each in owners))
        applied = size if scaled else size - left
        self.rows.append(
            ProfileCorrection(owner, *pair, applied, changed, scales or None, reason or None)
        )

    def _as_one(self) -> None:
        """Correct all that was added outside torch, as one figure.

        More than simulated is added per process and device, at its first operator. Less is taken
        there, then from communicators; never below nothing.
        """
        left, right, why, taken = self.hardware, self.simulated, None, 0
        name = max(_AS_ONE, key=lambda name: (name in left.told, name in right.told))
        pair, notes = self.told(name), list[str]()
        if name == "used_by_device":
            if pair[1] is not None and left.equation != right.equation:
                why = text(
                    "the releases have different equations, {hardware} and {simulated}",
                    hardware=left.equation,
                    simulated=right.equation,
                )
            notes.append(
                text("blocks that torch reserves and does not use are taken to be as simulated")
            )
            if holds_context(left.equation):
                taken = sum(row.applied_bytes for row in self.rows if row.owner == CONTEXT)
                notes += [] if taken else [text("the context is in it")]
        self.compare(NON_TORCH, pair, why, notes, taken=taken)

    def _counters(self) -> None:
        """Correct owner by owner, where the runtime's counters were read on both sides."""
        held, modelled = self.hardware.counted, self.simulated.counted
        if held is None or modelled is None:
            return
        left, right = (
            {
                each.key: ReportedFigure(
                    each.value,
                    how=MEASURED if each.source.startswith(MEASURED) else DERIVED,
                    source=f"{each.key}: {each.source}",
                )
                for each in (*side.settings, *side.workspace)
            }
            for side in (held, modelled)
        )
        if "kernels_bytes" not in left:  # no counters by module
            return
        for key, owner in (*_COUNTED.items(), *((each.key, WORKSPACE) for each in held.workspace)):
            pair = left.get(key), right.get(key)
            if pair == (None, None):
                continue
            simulated = 0 if pair[1] is None else pair[1].bytes
            if owner == WORKSPACE:
                self.values[key] = simulated
            # both tell the three parts of a graph as one
            constants, scaled = ((), simulated) if owner == GRAPH else ((key,), 0)
            self.compare(owner, pair, notes=None, constants=constants, scaled=scaled)
