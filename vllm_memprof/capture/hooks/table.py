"""The hook table: the rows of every engine, and the rows in force for one of them."""

from __future__ import annotations

from importlib import import_module

from vllm_memprof.capture.hook import Hook
from vllm_memprof.capture.versions import in_range
from vllm_memprof.engines import ENGINES

#: Rows that several engines share stand here once.
HOOKS: tuple[Hook, ...] = tuple(
    dict.fromkeys(hook for row in ENGINES.values() for hook in import_module(row.hooks).HOOKS)
)


def rows_in_force(
    backend: str | None, version: str | None, sampling: bool = False, engine: str = "vllm"
) -> tuple[Hook, ...]:
    """Return the rows in force.

    Args:
        backend: of the process; None: rows of every backend.
        version: of the engine; None: all.
        sampling: also rows that are called in every step.
        engine: whose rows; those of every engine are among them.
    """
    return tuple(
        hook
        for hook in HOOKS
        if hook.engine in (None, engine)
        and (backend in hook.backends if backend else len(hook.backends) > 1)
        and in_range(version, hook.versions)
        and (sampling or not hook.sampling)
    )
