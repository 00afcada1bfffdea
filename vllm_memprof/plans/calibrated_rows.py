"""The result of a plan with a calibrated device, which reporters start from.

Bytes are integers, None is unknown. The keys of its JSON are read by programs
(``memprof.calibrated/2``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from vllm_memprof.plans.rows import PlanRow
from vllm_memprof.record.codec import computed, one_of
from vllm_memprof.record.spans import ESTIMATED, How
from vllm_memprof.units import minus

CALIBRATED_SCHEMA = "memprof.calibrated/2"
#: Owners that a correction is of; NON_TORCH: all that was added outside torch since the process
#: began, where nothing tells its owners apart.
CONTEXT, NON_TORCH, WORKSPACE, COMMUNICATORS, KERNELS, ATB, GRAPH = OWNERS = (
    "context",
    "non_torch",
    "npu_workspace",
    "communicators",
    "kernels",
    "atb",
    "graph",
)


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
    hardware_bytes: int | None
    half_unit_bytes: int  # of hardware_bytes: half of what a log prints; 0 from hooks
    hardware_how: How | None  # of hardware_bytes
    source: str | None  # of hardware_bytes: the figure, and who read it
    simulated_bytes: int | None  # for the same command
    applied_bytes: int  # of the difference; 0: not corrected
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
        if self.hardware_bytes is None or self.simulated_bytes is None:
            return None
        return self.hardware_bytes - self.simulated_bytes


@dataclass(frozen=True)
class HardwareSource:
    """The run or log that corrects, as far as it says."""

    name: str  # run folder, report or log, with the number of its start
    kind: Annotated[str, one_of("hooks", "log")]
    model: str
    engine: str | None
    engine_version: str | None
    device: str | None
    arguments: list[str]  # of the engine; secrets redacted
    devices: int | None  # by its arguments; None: they are not known
    rank: str | None  # whose figures were taken
    equation: str | None


@dataclass(frozen=True)
class Calibrated:
    """A plan as the profile has its device, and with corrections from a run on hardware."""

    model: str
    command: list[str]  # as typed, secrets redacted
    source: HardwareSource
    stack: str | None  # that the hardware's own command was planned on; None: it was not
    own: PlanRow | None  # that plan
    corrections: list[ProfileCorrection]
    profile: str  # the corrected profile, relative to the folder
    #: The plan is that of the hardware run itself: agreement is by construction.
    same_command: bool
    without: PlanRow
    corrected: PlanRow
    seconds: float | None = None
    notes: list[str] = field(default_factory=list)
    SCHEMA: ClassVar[str] = CALIBRATED_SCHEMA

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
