"""The search against all values: exact where values stand in order, never wrong about what holds
where they do not.
"""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from vllm_memprof.plans.bisection import (
    HOLDS,
    TOO_LITTLE,
    TOO_MUCH,
    BisectionResult,
    bisect,
    each,
    from_the_least,
)


def values_of(verdicts: list[int]) -> dict[str, int]:
    return {str(i): verdict for i, verdict in enumerate(verdicts)}


def search(verdicts: list[int]) -> tuple[BisectionResult, list[str]]:
    table, asked = values_of(verdicts), list[str]()

    def probe(value: str) -> int:
        asked.append(value)
        return table[value]

    return bisect(list(table), probe), asked


def best_of_all(verdicts: list[int]) -> str | None:
    return max(
        (value for value, verdict in values_of(verdicts).items() if verdict == HOLDS),
        key=int,
        default=None,
    )


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_in_order_it_finds_what_an_exhaustive_search_finds(
    little: int, holding: int, much: int
) -> None:
    verdicts = [TOO_LITTLE] * little + [HOLDS] * holding + [TOO_MUCH] * much
    found, asked = search(verdicts)
    assert found.answer == best_of_all(verdicts)
    assert found.ordered
    assert len(asked) == len(set(asked)) <= 3 + math.log2(max(1, len(verdicts)))


@given(st.lists(st.sampled_from([TOO_LITTLE, HOLDS, TOO_MUCH]), max_size=60))
def test_in_any_order_the_answer_holds_and_no_answer_means_that_none_tried_does(
    verdicts: list[int],
) -> None:
    table = values_of(verdicts)
    found, asked = search(verdicts)
    assert list(found.tried) == asked
    assert found.tried == {value: table[value] for value in asked}
    holding = [int(value) for value in asked if table[value] == HOLDS]
    assert (None if found.answer is None else int(found.answer)) == max(holding, default=None)
    if found.answer is not None and int(found.answer) < len(verdicts) - 1:
        after = found.tried[str(int(found.answer) + 1)]  # tried, so that the step is exact
        assert after == TOO_MUCH if found.ordered else after != HOLDS


@given(st.lists(st.sampled_from([HOLDS, TOO_MUCH]), min_size=2, max_size=60))
def test_what_it_saw_out_of_order_it_says(verdicts: list[int]) -> None:
    found, asked = search(verdicts)
    seen = [values_of(verdicts)[value] for value in sorted(asked, key=int)]
    assert found.ordered == (seen == sorted(seen))


def test_the_widest_gap_above_the_answer_is_looked_into() -> None:
    verdicts = [HOLDS] * 10 + [TOO_MUCH] * 50 + [HOLDS] * 20 + [TOO_MUCH] * 20
    found, _ = search(verdicts)
    assert (found.answer, found.ordered) == ("79", False)
    assert search([HOLDS] * 10 + [TOO_MUCH] * 90)[0].ordered


def test_the_most_ambitious_value_first() -> None:
    assert search([HOLDS] * 100)[1] == ["99"]


@given(st.lists(st.sampled_from([HOLDS, TOO_MUCH]), max_size=10))
def test_from_the_least_tries_each_until_one_holds(verdicts: list[int]) -> None:
    table = values_of(verdicts)
    found = from_the_least(list(table), table.__getitem__)
    holding = [value for value in table if table[value] == HOLDS]
    assert found.answer == (holding[0] if holding else None)
    assert (
        list(found.tried) == list(table)[: list(table).index(holding[0]) + 1 if holding else None]
    )


@given(st.lists(st.sampled_from([HOLDS, TOO_MUCH]), max_size=10))
def test_each_value_is_tried_and_the_first_that_holds_is_found(verdicts: list[int]) -> None:
    table = values_of(verdicts)
    found = each(list(table), table.__getitem__)
    assert found.tried == table
    assert found.answer == next((value for value in table if table[value] == HOLDS), None)
