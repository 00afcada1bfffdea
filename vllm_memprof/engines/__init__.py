"""The engines: one row each, from a folder that has all that is about the engine.

Everything else asks a row. A row is data and imports nothing of the engine: hooks, actions and
drivers are named in it and imported where they run.
"""

from __future__ import annotations

from pathlib import Path

from vllm_memprof.engines.base import EngineRow, read_row
from vllm_memprof.errors import require_known

__all__ = ["ENGINES", "VLLM", "engine_row", "row_of_run"]

_FOLDERS = ("vllm", "sglang", "sglang_diffusion")
ENGINES = {row.name: row for row in (read_row(Path(__file__).with_name(at)) for at in _FOLDERS)}
VLLM = ENGINES["vllm"]


def engine_row(name: str) -> EngineRow:
    """Return the row of an engine.

    Raises:
        UsageError: there is none of that name.
    """
    require_known("--engine", name, ENGINES)
    return ENGINES[name]


def row_of_run(engine: str | None) -> EngineRow:
    """Return the row of a run's engine, as reports name it; vLLM's where none is known."""
    named = (row for row in ENGINES.values() if engine in dict(row.known_as).values())
    return next(named, VLLM)
