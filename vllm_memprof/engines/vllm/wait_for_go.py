"""Stops a plan at a moment until it is told to go on, with all memory that it holds then.

``memprof share`` starts instances beside each other: each waits here, so that the next one meets a
neighbour whose memory stands still. Runs in the engine's process; inert without the variable.
Standard library only.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from vllm_memprof.record.schema import ENV_HOLD, HELD_SUFFIX, HOLD_SUFFIX

_TICK_S = 0.05


def hold(moment: str) -> None:
    """Wait while the file of this moment exists.

    ``<folder>/<moment>.hold`` asks for it; it is renamed to ``<moment>.held``, and the engine goes
    on once that is gone.

    Args:
        moment: of ``record.schema.MOMENTS``.
    """
    folder = os.environ.get(ENV_HOLD)
    if folder is None:
        return
    held = Path(folder, moment + HELD_SUFFIX)
    try:
        Path(folder, moment + HOLD_SUFFIX).rename(held)
    except FileNotFoundError:
        return
    while held.exists():
        time.sleep(_TICK_S)
