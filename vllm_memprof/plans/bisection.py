"""The search for the best value: verdicts of values enter, the best one that passes leaves. Pure.

Values stand in the order of ambition, the most ambitious last. The verdict of each is TOO_LITTLE,
HOLDS or TOO_MUCH, expected in that order along the values. Where it is not, ``ordered`` is False:
the answer passes all the same, but a value that was not tried may be better.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TOO_LITTLE, HOLDS, TOO_MUCH = -1, 0, 1

Probe = Callable[[str], int]


@dataclass(frozen=True)
class BisectionResult:
    """The result of a search."""

    answer: str | None  # the most ambitious value tried that passes; None: none does
    tried: dict[str, int]  # value -> verdict, in the order of the tries
    ordered: bool


def bisect(values: Sequence[str], probe: Probe) -> BisectionResult:
    """Find the last value that passes, in about log2 of their number of tries.

    The most ambitious value is tried first: where it passes, no other has to be tried. Then the
    border below TOO_MUCH is searched. One more try checks the order: the middle of the widest gap
    above the answer. Where that is not too much, the search goes on from there. Whatever the order,
    it ends with an answer whose next value was tried and does not pass, unless it is the last.
    """
    tried: dict[str, int] = {}

    def verdict(index: int) -> int:
        value = values[index]
        if value not in tried:
            tried[value] = probe(value)
        return tried[value]

    def border(low: int, high: int, *above: int) -> int:
        """Return the index below the first with such a verdict, of those between the two."""
        while high - low > 1:
            middle = (low + high) // 2
            if verdict(middle) in above:
                high = middle
            else:
                low = middle
        return low

    if values and verdict(len(values) - 1) == TOO_MUCH:
        low = border(-1, len(values) - 1, TOO_MUCH)
        indices = [i for i in range(low + 1, len(values)) if values[i] in tried]
        gaps = ((right - left, left) for left, right in itertools.pairwise(indices))
        width, start = max(gaps, default=(0, 0))
        middle = start + width // 2
        if width > 1 and verdict(middle) != TOO_MUCH:
            border(middle, start + width, TOO_MUCH)
    best = _last(values, tried)
    if best is not None:
        after = next((i for i in range(best + 1, len(values)) if values[i] in tried), best)
        border(best, after, TOO_LITTLE, TOO_MUCH)
        best = _last(values, tried)
    verdicts = [tried[value] for value in values if value in tried]
    return BisectionResult(
        None if best is None else values[best], tried, ordered=verdicts == sorted(verdicts)
    )


def _last(values: Sequence[str], tried: Mapping[str, int]) -> int | None:
    """Return the index of the last value that was tried and passes."""
    passing = (i for i, value in enumerate(values) if tried.get(value) == HOLDS)
    return max(passing, default=None)


def from_the_least(values: Sequence[str], probe: Probe) -> BisectionResult:
    """Find the first of few values that passes, whatever their order of verdicts.

    Values stand in the order of their cost, the least first; each before the answer is tried.
    """
    tried: dict[str, int] = {}
    for value in values:
        tried[value] = probe(value)
        if tried[value] == HOLDS:
            return BisectionResult(value, tried, ordered=True)
    return BisectionResult(None, tried, ordered=True)


def each(values: Sequence[str], probe: Probe) -> BisectionResult:
    """Try every value, and find the first that passes."""
    tried = {value: probe(value) for value in values}
    answer = next((value for value, found in tried.items() if found == HOLDS), None)
    return BisectionResult(answer, tried, ordered=True)
