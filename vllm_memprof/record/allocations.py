"""What a process wrote of the call stacks whose memory stayed: ``allocations`` events enter.

Types only, with the function that reads one event; standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from vllm_memprof.record.codec import Allowed


@dataclass(frozen=True)
class AliveStack:
    """Memory that one call stack allocated and that was alive at the end; bytes."""

    frames: list[list[object]]  # [file, line, function], innermost first
    blocks: int
    bytes: int
    half_blocks: int  # alive after half of the requests
    half_bytes: int


@dataclass(frozen=True)
class AllocationTrace:
    """What was allocated and stayed while a number of requests ran, in one process."""

    memory: Annotated[str, Allowed(("device", "host"))]
    asked: int  # requests, as --trace-allocations says
    requests: int  # that ended while it was traced; fewer where the process ended before
    half_requests: int | None  # that had ended at the reading half-way; None: there was none
    stacks: list[AliveStack] = field(default_factory=list)  # those that grew most first
    other_stacks: int = 0  # stacks that are not listed
    other_bytes: int = 0
    untraced_bytes: int | None = None  # alive, allocated before tracing began
    snapshot: str | None = None  # in the run folder, for PyTorch's memory viewer
    reason: str | None = None  # why nothing was traced


def read_trace(event: Mapping[str, Any]) -> AllocationTrace:
    """Return the trace of an event.

    Raises:
        TypeError, ValueError, KeyError: it is not memprof's.
    """
    known = {name: event[name] for name in AllocationTrace.__dataclass_fields__ if name in event}
    stacks = [
        AliveStack(**{name: stack[name] for name in AliveStack.__dataclass_fields__})
        for stack in known.pop("stacks", [])
    ]
    numbers = [each for stack in stacks for each in (stack.bytes, stack.half_bytes)]
    if not all(type(number) is int for number in (*numbers, known["requests"], known["asked"])):
        raise TypeError("a trace of allocations has a figure that is not an integer")
    return AllocationTrace(**known, stacks=stacks)
