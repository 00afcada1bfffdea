"""The hook table: the rows of every engine, and the rows in force for one backend and version."""

from __future__ import annotations

from vllm_memprof.capture.hook import Hook
from vllm_memprof.capture.hooks.vllm import HOOKS as VLLM_HOOKS
from vllm_memprof.capture.versions import in_range

HOOKS: tuple[Hook, ...] = (*VLLM_HOOKS,)


def rows_in_force(
    backend: str | None, version: str | None, sampling: bool = False
) -> tuple[Hook, ...]:
    """Return the rows in force.

    Args:
        backend: of the process; None: rows of every backend.
        version: of vLLM; None: all.
        sampling: also rows that are called in every step.
    """
    return tuple(
        hook
        for hook in HOOKS
        if (backend in hook.backends if backend else len(hook.backends) > 1)
        and in_range(version, hook.versions)
        and (sampling or not hook.sampling)
    )
