"""Rows of several instances on one device: what ``memprof share`` found (``memprof.share/1``).

Bytes are integers, None is unknown. *Computed* figures come from a plan of each instance alone and
the engine's equation; *observed* ones from starts of all of them beside each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from vllm_memprof.record.codec import computed, one_of
from vllm_memprof.record.schema import MOMENTS

SHARE_SCHEMA = "memprof.share/1"


@dataclass(frozen=True)
class SoloPlan:
    """One instance, from a plan in which it had the device to itself."""

    name: str  # A, B, ... in the order as typed
    model: str
    engine_args: list[str]  # secrets redacted
    wanted: list[str]  # conditions of its own, in words
    status: str  # ok | oom | failed
    reason: str | None = None  # why it is not ok
    run: str | None = None  # its run folder
    #: Given by the user, and kept; None: memprof chooses it.
    fixed_utilization: float | None = None
    #: What the engine's equation subtracts from the request.
    subtracted_bytes: int | None = None
    #: Held beside the KV cache when the engine is ready, and at the serving peak.
    held_ready_bytes: int | None = None
    held_peak_bytes: int | None = None
    context_bytes: int | None = None  # used on the device when the engine first looks
    #: KV cache that it needs: a request of max_model_len, which the engine requires, or its wants.
    need_bytes: int | None = None
    bytes_per_block: int | None = None
    tokens_per_block: float | None = None


@dataclass(frozen=True)
class Flags:
    """What one instance is started with, and what that gives it; computed."""

    name: str
    gpu_memory_utilization: float
    num_gpu_blocks_override: int | None = None
    #: Least KV cache in any order of starting that the answer is for, whole blocks.
    kv_cache_bytes: int | None = None
    tokens: int | None = None

    @property
    @computed
    def flags(self) -> str:
        """As the engine takes them."""
        given = f"--gpu-memory-utilization {self.gpu_memory_utilization:.2f}"
        if self.num_gpu_blocks_override is None:
            return given
        return f"{given} --num-gpu-blocks-override {self.num_gpu_blocks_override}"


@dataclass(frozen=True)
class Started:
    """One instance of a start beside the others; observed."""

    name: str
    status: str  # ok | oom | failed | not started
    reason: str | None = None
    #: Of the blocks that the engine made; where it made none, what its equation gives.
    kv_cache_bytes: int | None = None
    tokens: int | None = None
    missing: list[str] = field(default_factory=list)  # of what it wants, in words
    run: str | None = None

    @property
    def passes(self) -> bool:
        return self.status == "ok" and not self.missing


@dataclass(frozen=True)
class InstanceStart:
    """All instances, started one after the other on one device; observed."""

    order: list[str]
    #: What the earlier ones had done when the next was started: become ready, or served their
    #: largest batches. At the end all have served them, and hold what that took at once.
    neighbours: Annotated[str, one_of(*MOMENTS)]
    results: list[Started]
    least_free_bytes: int | None = None  # of the device, at any reading of any of them

    @property
    @computed
    def passes(self) -> bool:
        return all(result.passes for result in self.results)


@dataclass(frozen=True)
class UtilizationStep:
    """What a step more of utilization does to one instance; computed."""

    name: str
    gpu_memory_utilization: float
    starts: bool  # all of them still start and survive
    why: str


@dataclass(frozen=True)
class SharingPlan:
    """One way to share the device, for one order of starting or for all."""

    name: Annotated[str, one_of("utilization", "blocks")]  # what divides the KV cache
    order: list[str] | None  # None: any
    flags: list[Flags]  # empty: none
    #: Where there are none: why, and how many bytes are missing.
    why_none: str | None = None
    short_bytes: int | None = None
    starts: list[InstanceStart] = field(default_factory=list)
    more: list[UtilizationStep] = field(default_factory=list)

    @property
    @computed
    def holds(self) -> bool:
        """There are flags, and every start with them passed."""
        return bool(self.flags and self.starts) and all(start.passes for start in self.starts)


@dataclass(frozen=True)
class DeviceShare:
    """Several instances on one device: the shares with which all start and survive."""

    command: list[str]
    instances: list[SoloPlan]
    equation: str | None  # of the engine, as ``accounting.budget.equations`` names it
    device_total_bytes: int | None
    beside_bytes: int  # held by somebody else, before the first instance starts
    headroom_bytes: int  # that must stay free
    ways: list[SharingPlan] = field(default_factory=list)
    why_none: str | None = None  # where nothing could be computed
    seconds: float | None = None
    notes: list[str] = field(default_factory=list)
    simulated: bool = False
    SCHEMA: ClassVar[str] = SHARE_SCHEMA

    @property
    @computed
    def found(self) -> bool:
        return any(way.holds for way in self.ways)
