"""What a process wrote of the call stacks whose memory stayed: ``allocations`` events enter.

Types only; standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from vllm_memprof.record.codec import one_of
from vllm_memprof.record.schema import Count


@dataclass(frozen=True)
class AliveStack:
    """Memory that one call stack allocated and that was alive at the end; bytes."""

    frames: list[list[object]]  # [file, line, function], innermost first
    blocks: int
    bytes: int
    half_blocks: int  # alive after half of the requests
    half_bytes: int


@dataclass(frozen=True)
class TraceTotals:
    """What was allocated and stayed while a number of requests ran, in one process."""

    memory: Annotated[str, one_of("device", "host")]
    asked: int  # requests, as --trace-allocations says
    requests: int  # that ended while it was traced; fewer where the process ended before
    half_requests: Count  # that had ended at the reading half-way; None: there was none
    other_bytes: int = 0  # of stacks that the record does not list
    untraced_bytes: Count = None  # alive, allocated before tracing began; None of host memory
    snapshot: str | None = None  # in the run folder, for PyTorch's memory viewer
    reason: str | None = None  # why nothing was traced


@dataclass(frozen=True)
class AllocationTrace(TraceTotals):
    """The same, by call stack."""

    stacks: list[AliveStack] = field(default_factory=list)  # those that grew most first
