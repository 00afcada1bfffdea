"""Lines of code whose memory stayed, from the call stacks that processes traced."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated

from vllm_memprof.accounting.serving_growth import PROCESS_ROLES
from vllm_memprof.record.allocations import AliveStack
from vllm_memprof.record.codec import Allowed
from vllm_memprof.record.loader import Run

#: Path fragments of frames that allocate for their caller.
_LIBRARIES = ("/torch/", "/torch_npu/", "/vllm_memprof/capture/", "/functools.py", "/contextlib.py")


@dataclass(frozen=True)
class AllocationSite:
    """A line of code, and what it allocated that was alive after the requests. Bytes."""

    site: str  # file:line, the innermost outside torch
    function: str  # empty where the stack has none
    path: str  # of the file
    bytes: int
    blocks: int
    grown_bytes: int | None  # since half of the requests; None: there was no such reading
    callers: list[str] = field(default_factory=list)  # of its largest stack, innermost first


@dataclass(frozen=True)
class TracedProcess:
    """A process whose allocations were traced over some requests."""

    memory: Annotated[str, Allowed(("device", "host"))]
    roles: list[str]
    label: str | None
    host: str | None
    pid: int | None
    asked: int  # requests, as --trace-allocations says
    requests: int  # that ended while it was traced
    half_requests: int | None
    sites: list[AllocationSite]  # those that grew most first
    other_bytes: int  # of stacks that the record does not list
    untraced_bytes: int | None  # alive, allocated before tracing began; None of host memory
    snapshot: str | None  # in the run folder, for PyTorch's memory viewer
    reason: str | None  # why nothing was traced


def traced(run: Run) -> list[TracedProcess]:
    """Return the traced processes of a run; empty without --trace-allocations."""
    found = []
    for process in run.processes:
        who = process.identity
        roles = sorted(who.roles & set(PROCESS_ROLES), key=PROCESS_ROLES.index)
        for trace in process.allocations:
            compared = trace.half_requests is not None
            found.append(
                TracedProcess(
                    trace.memory,
                    roles,
                    who.label,
                    who.host,
                    who.pid,
                    trace.asked,
                    trace.requests,
                    trace.half_requests,
                    _sites(trace.stacks, compared),
                    trace.other_bytes,
                    trace.untraced_bytes,
                    trace.snapshot,
                    trace.reason,
                )
            )
    return found


def _sites(stacks: Iterable[AliveStack], compared: bool) -> list[AllocationSite]:
    """Return one row per line of code, its stacks together."""
    found: dict[tuple[str, str], AllocationSite] = {}
    for stack in sorted(stacks, key=lambda each: -each.bytes):
        frames = [
            (str(path), (line if isinstance(line, int) else 0), str(name))
            for path, line, name in stack.frames
        ]
        if not frames:
            continue
        own = [f for f in frames if not any(part in f[0] for part in _LIBRARIES)] or frames
        path, line, function = own[0]
        site = f"{os.path.basename(path)}:{line}"
        grown = stack.bytes - stack.half_bytes if compared else None
        known = found.get((path, site))
        if known is None:
            callers = [f"{os.path.basename(path)}:{line}" for path, line, _ in own[1:]]
            found[path, site] = AllocationSite(
                site, function, path, stack.bytes, stack.blocks, grown, callers
            )
        else:
            found[path, site] = replace(
                known,
                bytes=known.bytes + stack.bytes,
                blocks=known.blocks + stack.blocks,
                grown_bytes=None if grown is None else (known.grown_bytes or 0) + grown,
            )
    return sorted(found.values(), key=lambda each: (-(each.grown_bytes or 0), -each.bytes))
