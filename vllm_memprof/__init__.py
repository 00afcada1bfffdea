"""memprof: where device memory goes when vLLM serves a model.

``load`` and ``load_many`` give the figures of runs as DataFrames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_memprof.version import __version__

if TYPE_CHECKING:
    from vllm_memprof.api import load, load_many

__all__ = ["__version__", "load", "load_many"]


def __getattr__(name: str) -> object:
    """Import the API when it is first used: engine processes import this package too."""
    if name in ("load", "load_many"):
        from vllm_memprof import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
