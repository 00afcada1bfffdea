"""The errors of published runs of one kind, as a plan's report prints them.

``data/spread.json`` is made by ``scripts.accuracy`` from predictions alone. A kind is a profile of
the simulated device and a KV-cache equation. Fewer than five runs support no spread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from vllm_memprof.accuracy.errors import LEAST_RUNS, Error, statistics_of

DATA = Path(__file__).parent / "data" / "spread.json"
#: Figure of which reports print the spread.
FIGURE = "kv_cache"


@dataclass(frozen=True)
class ErrorSpread:
    """Signed relative errors of predictions, of 1."""

    equation: str
    profile: str  # of the simulated device, its name
    runs: int
    low: float
    median: float
    high: float


@cache
def list_spreads() -> tuple[ErrorSpread, ...]:
    """Return the spreads that the table supports."""
    return tuple(ErrorSpread(**row) for row in json.loads(DATA.read_text(encoding="utf-8")))


def spread_of(equation: str | None, profile: str | None) -> ErrorSpread | None:
    """Return the spread of the KV cache for plans of a kind; None where too few runs are of it.

    Args:
        equation: that the engine's release has.
        profile: name of the simulated device's profile; one made from it has none.
    """
    kinds = {(each.equation, each.profile): each for each in list_spreads()}
    return kinds.get((equation or "", profile or ""))


def spreads_text(errors: Sequence[Error], profiles: Mapping[str, str]) -> str:
    """Return the content of ``data/spread.json``.

    Args:
        errors: of the whole table.
        profiles: device of a row -> name of its profile.
    """
    kv = [error for error in errors if error.figure == FIGURE and error.counts]
    kinds = sorted({(error.planned.equation or "", error.run.device) for error in kv})
    rows = []
    for equation, device in kinds:
        of_kind = [e for e in kv if (e.planned.equation, e.run.device) == (equation, device)]
        stats = statistics_of(of_kind)
        if stats is not None and stats.count >= LEAST_RUNS:
            low, median, high = (round(x, 4) for x in (stats.low, stats.median, stats.high))
            rows.append(ErrorSpread(equation, profiles[device], stats.count, low, median, high))
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"
