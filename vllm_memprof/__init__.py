"""memprof: where device memory goes when vLLM serves a model.

``load`` and ``load_many`` give figures of runs as DataFrames, ``plan`` and ``sweep`` make runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_memprof.version import __version__

if TYPE_CHECKING:
    from vllm_memprof.api import load, load_many, plan, sweep

__all__ = ["__version__", "load", "load_many", "plan", "sweep"]


def __getattr__(name: str) -> object:
    """Import the API when it is first used: engine processes import this package too."""
    if name in ("load", "load_many", "plan", "sweep"):
        from vllm_memprof import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
