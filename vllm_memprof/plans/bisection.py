"""The search for the best value: verdicts of values enter, the best one that passes leaves. Pure.

Values stand in the order of ambition, the most ambitious last. The verdict of each is TOO_LITTLE,
HOLDS or TOO_MUCH, expected in that order along the values. Where it is not, ``ordered`` is False:
the answer passes all the same, but a value that was not tried may be better.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

TOO_LITTLE, HOLDS, TOO_MUCH = -1, 0, 1


def bisect(values: Sequence[str], probe: Callable[[str], int]) -> tuple[str | None, bool]:
    """Find the last value that passes, in about log2 of their number of tries.

    The most ambitious value is tried first: where it passes, no other has to be tried. Then the
    border below TOO_MUCH is searched. One more try checks the order: the middle of the widest gap
    above the answer. Where that is not too much, the search goes on from there. Whatever the order,
    it ends with an answer whose next value was tried and does not pass, unless it is the last.

    Returns:
        The most ambitious value tried that passes, None: none does; and whether the verdicts stand
        in order.
    """
    tried: dict[int, int] = {}  # by index

    def verdict(index: int) -> int:
        if index not in tried:
            tried[index] = probe(values[index])
        return tried[index]

    def border(low: int, high: int, *above: int) -> int:
        """Return the index below the first with such a verdict, of those between the two."""
        while high - low > 1:
            middle = (low + high) // 2
            if verdict(middle) in above:
                high = middle
            else:
                low = middle
        return low

    def last_passing() -> int | None:
        return max((i for i, found in tried.items() if found == HOLDS), default=None)

    if verdict(len(values) - 1) == TOO_MUCH:
        low = border(-1, len(values) - 1, TOO_MUCH)
        above = [i for i in sorted(tried) if i > low]
        gaps = ((right - left, left) for left, right in itertools.pairwise(above))
        width, start = max(gaps, default=(0, 0))
        middle = start + width // 2
        if width > 1 and verdict(middle) != TOO_MUCH:
            border(middle, start + width, TOO_MUCH)
    best = last_passing()
    if best is not None:
        border(best, min((i for i in tried if i > best), default=best), TOO_LITTLE, TOO_MUCH)
        best = last_passing()
    verdicts = [tried[i] for i in sorted(tried)]
    return None if best is None else values[best], verdicts == sorted(verdicts)
