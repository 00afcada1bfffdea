"""The rule that tells growth from noise and from a cache that fills, on simulated runs."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.series import HEAVY, MIB, NOISE, PLATEAUS, simulated
from vllm_memprof.accounting.serving.growth import LEAST_REQUESTS, LEAST_RISE_BYTES
from vllm_memprof.accounting.serving.trend import (
    CONFIDENCE,
    GREW,
    GROWING,
    STEADY,
    TOO_SHORT,
    Trend,
    theil_sen,
    trend,
)

#: Seeds that the constants of the rule were not chosen on.
SEEDS, MANY_SEEDS = 25, 400


def judge(kind: str, seed: int, count: int, scale: float = 1) -> Trend:
    return trend(*simulated(kind, seed, count, scale), LEAST_RISE_BYTES, LEAST_REQUESTS)


def found(kind: str, seeds: int, count: int, scale: float = 1) -> Counter[str]:
    return Counter(judge(kind, seed, count, scale).verdict for seed in range(seeds))


@pytest.mark.parametrize("scale", [1, HEAVY])
@pytest.mark.parametrize("kind", NOISE)
def test_a_thousand_clean_requests_do_not_grow(kind: str, scale: float) -> None:
    assert found(kind, SEEDS, 1000, scale)[GROWING] == 0


@pytest.mark.parametrize("count", [200, 1000])
@pytest.mark.parametrize("kind", PLATEAUS)
def test_a_plateau_is_no_growth(kind: str, count: int) -> None:
    assert found(kind, SEEDS, count)[GROWING] == 0


def test_a_leak_is_found_within_200_requests() -> None:
    for seed in range(SEEDS):
        result = judge("leak/1", seed, 200)
        assert result.verdict == GROWING, seed
        assert result.slope == pytest.approx(MIB, rel=0.1), seed
        assert result.low is not None
        assert result.high is not None
        assert 0 < result.low < result.slope < result.high


def test_a_leak_in_steps_of_twenty_requests_is_found_within_a_thousand() -> None:
    assert found("leak/20", SEEDS, 1000) == {GROWING: SEEDS}


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scale", [1, HEAVY])
@pytest.mark.parametrize("kind", [*NOISE, *PLATEAUS])
def test_clean_runs_over_many_seeds(kind: str, scale: float) -> None:
    """Under noise sixteen times the ordinary, one plateau in twenty at most passes for growth.

    Readings that wander have no level to return to: some do rise all the time, by chance, as often
    as the rule's interval leaves open, in either of its two windows.
    """
    allowed = 0
    if scale == HEAVY:
        by_chance = round(MANY_SEEDS * 2 * (1 - CONFIDENCE) / 2)
        allowed = MANY_SEEDS // 20 if kind in PLATEAUS else by_chance * (kind == "wandering")
    assert found(kind, MANY_SEEDS, 1000, scale)[GROWING] <= allowed


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_leaks_over_many_seeds() -> None:
    results = [judge("leak/1", seed, 200) for seed in range(MANY_SEEDS)]
    assert [seed for seed, one in enumerate(results) if one.verdict != GROWING] == []
    assert all(one.slope == pytest.approx(MIB, rel=0.1) for one in results)
    assert found("leak/1", MANY_SEEDS, 1000, HEAVY)[GROWING] >= 0.99 * MANY_SEEDS


def test_a_cache_that_fills_ever_more_slowly_grew() -> None:
    sizes = [4096 * MIB * (1 - 0.99**at) for at in range(300)]
    assert trend(range(300), sizes, LEAST_RISE_BYTES, LEAST_REQUESTS).verdict == GREW


def test_a_leak_behind_a_cache_that_fills_first_is_found_in_the_second_half() -> None:
    sizes = [4096 * MIB * min(at / 200, 1) + MIB * max(at - 200, 0) for at in range(1000)]
    result = trend(range(1000), sizes, LEAST_RISE_BYTES, LEAST_REQUESTS)
    assert result.verdict == GROWING
    assert result.first == 549.45
    assert result.slope == MIB


def test_growth_that_ended_before_the_last_fifth_is_none() -> None:
    sizes = [MIB * min(at, 800) for at in range(1000)]
    result = trend(range(1000), sizes, LEAST_RISE_BYTES, LEAST_REQUESTS)
    assert result.verdict == GREW


def test_growth_below_the_least_is_none_however_even() -> None:
    sizes = [at * LEAST_RISE_BYTES / 1000 for at in range(1000)]
    result = trend(range(1000), sizes, LEAST_RISE_BYTES, LEAST_REQUESTS)
    assert result.verdict == STEADY
    assert result.low is not None
    assert result.low > 0


def test_memory_that_falls_does_not_grow() -> None:
    sizes = [MIB * (1000 - at) for at in range(1000)]
    assert trend(range(1000), sizes, LEAST_RISE_BYTES, LEAST_REQUESTS).verdict == STEADY


def test_too_few_requests_are_not_judged() -> None:
    sizes = [MIB * at for at in range(160)]
    assert trend(range(160), sizes, LEAST_RISE_BYTES, 150) == Trend(TOO_SHORT)  # less its warm-up
    assert trend(range(170), [*sizes, *sizes[:10]], LEAST_RISE_BYTES, 150).verdict != TOO_SHORT
    assert trend([], [], LEAST_RISE_BYTES, 150) == Trend(TOO_SHORT)
    one_place = [5.0] * 100
    assert trend(one_place, sizes[:100], LEAST_RISE_BYTES, 0) == Trend(TOO_SHORT)


def test_readings_in_few_stretches_are_not_judged() -> None:
    positions = sorted([*range(10), *(990 + at for at in range(10))] * 3)
    sizes = [MIB * at for at in positions]
    assert trend(positions, sizes, LEAST_RISE_BYTES, 150).verdict == TOO_SHORT


@pytest.mark.parametrize(
    ("values", "slope", "low", "high"),
    [
        (
            [
                10.31,
                13.6,
                4.53,
                -0.12,
                -0.74,
                10.25,
                3.82,
                2.51,
                17.59,
                19.07,
                24.37,
                14.69,
                24.04,
                25.48,
                15.95,
                34.3,
                34.57,
                53.11,
                37.62,
                36.84,
                49.86,
                43.59,
                51.27,
                43.08,
                49.75,
                58.19,
                57.57,
                55.03,
                47.34,
                61.56,
            ],
            2.1154545454545457,
            1.5847619047619048,
            2.6406666666666667,
        ),
        (
            [
                0.0,
                0.0,
                0.0,
                0.0,
                0.0,
                1.0,
                1.0,
                1.0,
                1.0,
                1.0,
                2.0,
                2.0,
                2.0,
                2.0,
                2.0,
                3.0,
                3.0,
                3.0,
                3.0,
                3.0,
                4.0,
                4.0,
                4.0,
                4.0,
                4.0,
            ],
            0.19523809523809524,
            0.15789473684210525,
            0.2222222222222222,
        ),
        (
            [
                1.0,
                1.0,
                1.0,
                1.0,
                1.0,
                1.0,
                1.0,
                1.0,
                1.0,
                1.0,
                4.0,
                4.0,
                4.0,
                4.0,
                4.0,
                4.0,
                4.0,
                4.0,
                4.0,
                4.0,
            ],
            0.17647058823529413,
            0.0,
            0.3,
        ),
        (
            [2.7, 2.6, 2.5, 6.2, 3.4, 0.2, 18.2, 8.1, 10.3, 2.1, 49.0, 19.7],
            1.2333333333333334,
            -0.7666666666666666,
            6.114285714285714,
        ),
    ],
)
def test_slope_and_interval_are_those_of_scipy(
    values: list[float], slope: float, low: float, high: float
) -> None:
    """``scipy.stats.theilslopes(values, range(len(values)), alpha=0.998)``, SciPy 1.17.1."""
    assert theil_sen(range(len(values)), values) == pytest.approx((slope, low, high))
