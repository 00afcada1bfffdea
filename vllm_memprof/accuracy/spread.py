"""The errors of published runs of one kind, as a plan's report prints them.

``data/spread.json`` is made by ``scripts.accuracy`` from predictions alone. A kind is a profile of
the simulated device and a KV-cache equation. Fewer than five runs support no spread.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data/spread.json"


@dataclass(frozen=True)
class ErrorSpread:
    """Signed errors of predicted KV caches: what is missing or too much does not grow with them."""

    equation: str
    profile: str  # of the simulated device, its name
    runs: int
    low_bytes: int
    median_bytes: int
    high_bytes: int


@cache
def list_spreads() -> tuple[ErrorSpread, ...]:
    """Return the spreads that the table supports."""
    return tuple(ErrorSpread(**row) for row in json.loads(DATA.read_text("utf-8")))


def spread_of(equation: str | None, profile: str | None) -> ErrorSpread | None:
    """Return the spread of the KV cache for plans of a kind; None where too few runs are of it.

    Args:
        equation: that the engine's release has.
        profile: name of the simulated device's profile; one made from it has none.
    """
    kinds = {(each.equation, each.profile): each for each in list_spreads()}
    return kinds.get((equation or "", profile or ""))
