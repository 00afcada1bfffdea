"""The hook table: the rows below every engine, those of each, and the rows in force for one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from vllm_memprof.capture import communicators, empty_cache
from vllm_memprof.capture.actions import fold_peak
from vllm_memprof.capture.hook import Hook
from vllm_memprof.capture.hooks.rows import read_rows
from vllm_memprof.capture.versions import in_range
from vllm_memprof.engines import ENGINES

_ENTER = {
    "leaf.empty_cache": empty_cache.enter,
    "leaf.reset_peak": fold_peak,
    "pg.collective": communicators.enter,
}
_LEAVE = {
    "leaf.empty_cache": empty_cache.leave,
    "pg.collective": communicators.leave,
}
HOOKS: tuple[Hook, ...] = (
    *read_rows(Path(__file__).parent, _ENTER, _LEAVE),
    *(hook for row in ENGINES.values() for hook in import_module(row.hooks).HOOKS),
)


def rows_in_force(
    backend: str, version: str | None, sampling: bool = False, engine: str = "vllm"
) -> tuple[Hook, ...]:
    """Return the rows in force.

    Args:
        backend: of the process; "": rows of every backend.
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
