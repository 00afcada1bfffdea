"""Constructors of rows, by kind: a phase, a marker."""

from __future__ import annotations

from typing import Any

from vllm_memprof.capture.actions import begin_phase, end_phase
from vllm_memprof.capture.hook import Half, Hook

#: Backends of a row that is not for all of them.
NPU, CUDA = ("npu",), ("cuda",)


def phase(
    hook_id: str,
    phase_id: str,
    *targets: str,
    enter: Half | None = begin_phase,
    leave: Half | None = end_phase,
    **fields: Any,
) -> Hook:
    """Return a row whose calls mark a phase; ``fields`` are those of ``Hook``."""
    return Hook(hook_id, phase_id, targets, enter, leave, **fields)


def marker(hook_id: str, *targets: str, **fields: Any) -> Hook:
    """Return a row that marks no phase: it feeds other rows, or says what the process is."""
    return Hook(hook_id, None, targets, **fields)
