"""Whether a series of readings keeps growing, and by how much: numbers enter, a ``Trend`` leaves.

The rule, in the order in which it is applied. A window is the run after its warm-up, or the second
half of that: memory that fills first and leaks then is seen in the second.

1. **Levels.** The window is cut into 30 stretches of equal length. The level of a stretch is its
   lowest reading: what requests hold for a while comes on top of it, what stays raises it. Samples
   that were thinned to their lowest and highest reading give the same levels.
2. **Slope.** Theil-Sen: the median of the slopes of all pairs of levels.
3. **Interval**, 99.8 %, the wider of two: Sen's, for readings that are independent of each other
   (as ``scipy.stats.theilslopes`` computes it), and that of the growth of ten parts of the window
   (Student's t), for readings that wander, as the resident memory of a process does. A few steps,
   however late, leave most parts without growth: the second interval then holds 0.
4. **Persistence.** It grows where the interval lies above 0, and growth goes on to the end: Sen's
   interval of the second half of the window lies above 0 too, the last third grew by two thirds
   of what the first did at least, and the last fifth by half its share. A cache on its way to its
   plateau fails here.

What does not grow by this rule, but has every level of its last third above every level of its
first third, ``grew``: in a few steps, or ever more slowly.

A cache that fills at an even rate and is not full when the run ends cannot be told from a leak by
its readings. How often the rule is wrong: ``docs/concepts/growth.md``, from simulated readings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, mean, median, stdev
from typing import Annotated

from vllm_memprof.record.codec import one_of

GROWING, GREW, STEADY, TOO_SHORT = "growing", "grew", "steady", "too_short"
Verdict = Annotated[str, one_of(GROWING, GREW, STEADY, TOO_SHORT)]

#: Of the positions of a run, the share that is warm-up: caches and pools fill there.
WARM_UP = 0.1
STRETCHES = 30
#: A window with fewer stretches that hold a reading is too short to judge.
LEAST_STRETCHES = 20
PARTS = 10
CONFIDENCE = 0.998
#: Student's t for CONFIDENCE and the PARTS - 1 differences between the levels of parts.
_T = 4.5008
_Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
#: Growth of the last third over that of the first, and of the last fifth over its even share.
LAST_THIRD, LAST_FIFTH = 2 / 3, 1 / 2


@dataclass(frozen=True)
class Trend:
    """How a series moved along its positions; what could not be told is None."""

    verdict: Verdict
    slope: float | None = None  # units of the series per unit of position
    low: float | None = None  # of the interval
    high: float | None = None
    first: float | None = None  # position at which the window begins
    rise: float | None = None  # of the level over the window


def trend(
    positions: Sequence[float], values: Sequence[float], least_rise: float, least_span: float
) -> Trend:
    """Judge a series.

    Args:
        positions: of the readings, not falling: requests finished, or seconds.
        values: of the readings.
        least_rise: growth over a window that is worth speaking of.
        least_span: positions from the first to the last that a window has at least.

    Returns:
        The trend of the whole run after its warm-up; that of its second half where only that grows.
    """
    if len(positions) < LEAST_STRETCHES:
        return Trend(TOO_SHORT)
    first, last = positions[0], positions[-1]
    first += WARM_UP * (last - first)
    if last - first < least_span:
        return Trend(TOO_SHORT)
    whole = _judge(positions, values, first, last, least_rise)
    middle = (first + last) / 2
    if whole.verdict == GROWING or last - middle < least_span:
        return whole
    half = _judge(positions, values, middle, last, least_rise)
    return half if half.verdict == GROWING else whole


def _judge(
    positions: Sequence[float], values: Sequence[float], first: float, last: float, least: float
) -> Trend:
    levels = _levels(positions, values, first, last)
    if len(levels) < LEAST_STRETCHES:
        return Trend(TOO_SHORT)
    places, sizes = zip(*levels, strict=True)
    half, third = len(levels) // 2, len(levels) // 3
    slope, low, high = theil_sen(places, sizes)
    _, low_later, _ = theil_sen(places[half:], sizes[half:])
    parts = _parts(levels, first, last)
    grown = [after - before for before, after in pairwise(parts)]
    per_part = (last - first) / PARTS
    spread = _T * stdev(grown) / math.sqrt(len(grown))
    low = min(low, (mean(grown) - spread) / per_part)
    high = max(high, (mean(grown) + spread) / per_part)
    rise = parts[-1] - parts[0]
    thirds, fifth = len(grown) // 3, len(grown) // 5 + 1
    goes_on = sum(grown[-thirds:]) >= LAST_THIRD * sum(grown[:thirds]) and sum(
        grown[-fifth:]
    ) >= LAST_FIFTH * sum(grown) * fifth / len(grown)
    verdict = STEADY
    if rise >= least and low > 0 and low_later > 0 and goes_on:
        verdict = GROWING
    elif rise >= least and max(sizes[:third]) < min(sizes[-third:]):
        verdict = GREW
    return Trend(verdict, slope, low, high, first, rise)


def _levels(
    positions: Sequence[float], values: Sequence[float], first: float, last: float
) -> list[tuple[float, float]]:
    """Return the lowest reading of each stretch that holds a reading, with its position."""
    length = (last - first) / STRETCHES
    if length <= 0:
        return []
    lowest: dict[int, tuple[float, float]] = {}
    for at, value in zip(positions, values, strict=True):
        if at >= first:
            stretch = min(int((at - first) / length), STRETCHES - 1)
            if stretch not in lowest or value < lowest[stretch][1]:
                lowest[stretch] = at, value
    return [lowest[stretch] for stretch in sorted(lowest)]


def _parts(levels: list[tuple[float, float]], first: float, last: float) -> list[float]:
    """Return the median level of each part; that of the part before it where it has none."""
    length = (last - first) / PARTS
    inside: list[list[float]] = [[] for _ in range(PARTS)]
    for at, level in levels:
        inside[min(int((at - first) / length), PARTS - 1)].append(level)
    found: list[float] = []
    for part in inside:
        found.append(median(part) if part else found[-1] if found else levels[0][1])
    return found


def theil_sen(positions: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median slope of all pairs, and Sen's interval around it at CONFIDENCE.

    P. K. Sen, Estimates of the regression coefficient based on Kendall's tau, 1968; ties as in
    ``scipy.stats.theilslopes``, whose results are in the test. Written here because SciPy is 140
    MiB, and takes more time to import than a report takes to be made.
    """
    count = len(positions)
    slopes = sorted(
        (values[later] - values[earlier]) / (positions[later] - positions[earlier])
        for earlier in range(count)
        for later in range(earlier + 1, count)
        if positions[later] != positions[earlier]
    )
    repeated = [Counter(series).values() for series in (positions, values)]
    ties = sum(times * (times - 1) * (2 * times + 5) for each in repeated for times in each)
    variance = (count * (count - 1) * (2 * count + 5) - ties) / 18
    reach = _Z * math.sqrt(max(variance, 0.0))
    low = max(round((len(slopes) - reach) / 2) - 1, 0)
    high = min(round((len(slopes) + reach) / 2), len(slopes) - 1)
    return median(slopes), slopes[low], slopes[high]
