"""Failed allocations: how an engine names them, and the parts of a step they are asked for in.

Shared by capture, which reads an exception, ``logs``, which reads its traceback, and accounting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_memprof.files import read_own
from vllm_memprof.record.schema import Count, Snapshot

#: Words of an exception that says that device memory was not to be had: torch, torch_npu (its
#: caching and its workspace allocator), the CANN runtime (EL0004), and the simulated device in its
#: place. torch_npu appends the runtime's words to an error of its own ("The Inner error is reported
#: as above") where an operator of ATB has failed.
_MESSAGE = re.compile(
    r"out of memory|NPUWorkspaceAllocator tried to allocate|"
    r"Failed to allocate resource\[DeviceMemory\]|"
    r"\[memprof simulated device\] device \d+ has \d+ of \d+ bytes free, \d+ requested",
    re.IGNORECASE,
)
#: What was asked for: as torch prints it, and as the runtime does.
_TRIED = re.compile(r"ried to allocate (?P<size>\d+(?:\.\d+)?) (?P<unit>GiB|MiB|KiB|bytes)")
_RESOURCE = re.compile(
    r"resource\[DeviceMemory\] with info \[size:(?P<bytes>\d+)\]|"
    r"\[memprof simulated device\] device \d+ has .* bytes free, (?P<simulated>\d+) requested"
)
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "bytes": 1}

#: Function of an engine -> the part of a step that it is. The innermost counts.
STAGE_OF: dict[str, str] = read_own(__file__, "stages.json")


@dataclass(frozen=True)
class Pool:
    """Segments of the caching allocator of one pool and stream, added up; bytes."""

    private: bool  # of captured graphs; nobody else may use it
    small: bool  # for blocks of up to 1 MiB
    stream: str
    expandable: bool
    total_bytes: int
    allocated_bytes: int
    pending_bytes: int  # freed by the process, still waited for by a stream
    free_bytes: int
    free_blocks: int  # a count
    largest_free_bytes: int
    fitting_bytes: Count  # in free blocks as large as what was asked for


@dataclass(frozen=True)
class Item:
    """A multimodal item, as the engine has it. Unknown is None."""

    modality: str | None = None  # image | video | audio ...
    tokens: Count = None  # of the language model that it stands for
    size: list[int] | None = None  # width, height: pixels after the engine's resizing
    frames: Count = None  # of a video
    encoded: bool | None = None  # of a step that failed: the encoder got it there


@dataclass(frozen=True)
class StepRequest:
    """A request of the step that failed; never its prompt."""

    id: str
    scheduled_tokens: Count = None
    prompt_tokens: Count = None
    items: list[Item] = field(default_factory=list)


#: Moment of a reading that was taken while the engine profiled.
PROFILE = "profile"


@dataclass(frozen=True)
class StepReading:
    """What a part of a step took, as a log notes it; bytes."""

    moment: str  # PROFILE, or the name of a request, e.g. image1
    stage: str  # of STAGE_OF
    bytes: int  # more than was allocated before it
    allocated_bytes: Count = None  # in all, then


@dataclass(frozen=True)
class Failure:
    """What was read of a failed allocation after the engine's exception."""

    message: str
    oom: Count = None  # id of the phase event that the allocator's observer wrote
    site: str | None = None  # file:line, outside torch
    chain: list[str] = field(default_factory=list)  # module:function, innermost first
    requests: list[StepRequest] | None = None  # None: not in a step, or not known
    allocator_settings: str | None = None  # of its variable, in the process that failed
    snapshot: Snapshot | None = None
    pools: list[Pool] | None = None


def is_out_of_memory(name: str, message: str) -> bool:
    """Return True for an exception that says that an allocation of device memory failed."""
    return name == "OutOfMemoryError" or _MESSAGE.search(message) is not None


def asked_for(message: str) -> dict[str, Any]:
    """Return what the message of a failed allocation says: the bytes, and who asked.

    Returns:
        ``requested_bytes`` (None where it does not say), ``requested_half_unit_bytes`` of what is
        printed in GiB, MiB or KiB, ``npu_workspace`` and ``outside_torch``.
    """
    workspace = "NPUWorkspaceAllocator" in message
    exact, rounded = _RESOURCE.search(message), _TRIED.search(message)
    simulated = exact is not None and exact["simulated"] is not None and rounded is None
    outside = simulated or "resource[DeviceMemory]" in message
    found: dict[str, Any] = {"requested_bytes": None, "requested_half_unit_bytes": 0}
    if exact is not None and (simulated or exact["bytes"]):
        found["requested_bytes"] = int(exact["bytes"] or exact["simulated"])
    elif rounded is not None:
        unit = _UNITS[rounded["unit"]]
        digits = len(rounded["size"].partition(".")[2])
        found["requested_bytes"] = round(float(rounded["size"]) * unit)
        found["requested_half_unit_bytes"] = round(unit * 0.5 * 10**-digits) if unit > 1 else 0
    return {**found, "npu_workspace": workspace, "outside_torch": outside}


def stage_of(functions: Iterable[str], multimodal: bool = False) -> str | None:
    """Return the part of a step that the innermost function of a call chain belongs to.

    Args:
        functions: innermost first, by name, ``Class.method`` or ``module:Class.method``.
        multimodal: the step has multimodal items, whose embeddings are merged where tokens are
            embedded.
    """
    for function in functions:
        stage = STAGE_OF.get(function.rpartition(":")[2].rpartition(".")[2])
        if stage is not None:
            return "mm_merge" if stage == "embedding" and multimodal else stage
    return None
