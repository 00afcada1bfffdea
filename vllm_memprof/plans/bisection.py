"""The search for the best value: verdicts of values enter, the best one that passes leaves. Pure.

Values stand in the order of ambition, the most ambitious last. The verdict of each is TOO_LITTLE,
HOLDS or TOO_MUCH, expected in that order along the values. Where it is not, ``ordered`` is False:
the answer passes all the same, but a value that was not tried may be better.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TOO_LITTLE, HOLDS, TOO_MUCH = -1, 0, 1

Probe = Callable[[str], int]


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    answer: str | None  # the most ambitious value tried that passes; None: none does
    tried: dict[str, int]  # value -> verdict, in the order of the tries
    ordered: bool


def bisect(values: Sequence[str], probe: Probe) -> Found:
    """Find the last value that passes, in about log2 of their number of tries.

    The most ambitious value is tried first: where it passes, no other has to be tried. Then the
    border below TOO_MUCH is searched; the answer's next value has been tried as well, unless the
    answer is the last. One more try checks the order: the middle of the widest gap above the
    answer. Where that is not too much, the search goes on from there.
    """
    tried: dict[str, int] = {}

    def verdict(index: int) -> int:
        value = values[index]
        if value not in tried:
            tried[value] = probe(value)
        return tried[value]

    def border(low: int, high: int) -> int:
        while high - low > 1:
            middle = (low + high) // 2
            if verdict(middle) == TOO_MUCH:
                high = middle
            else:
                low = middle
        return low

    if values and verdict(len(values) - 1) == TOO_MUCH:
        low = border(-1, len(values) - 1)
        indices = [i for i in range(low + 1, len(values)) if values[i] in tried]
        width, start = max(
            ((right - left, left) for left, right in itertools.pairwise(indices)), default=(0, 0)
        )
        middle = start + width // 2
        if width > 1 and verdict(middle) != TOO_MUCH:
            border(middle, start + width)
    known = [(value, tried[value]) for value in values if value in tried]
    passing = [value for value, found in known if found == HOLDS]
    verdicts = [found for _, found in known]
    return Found(passing[-1] if passing else None, tried, ordered=verdicts == sorted(verdicts))


def from_the_least(values: Sequence[str], probe: Probe) -> Found:
    """Find the first of few values that passes, whatever their order of verdicts.

    Values stand in the order of their cost, the least first; each before the answer is tried.
    """
    tried: dict[str, int] = {}
    for value in values:
        tried[value] = probe(value)
        if tried[value] == HOLDS:
            return Found(value, tried, ordered=True)
    return Found(None, tried, ordered=True)
