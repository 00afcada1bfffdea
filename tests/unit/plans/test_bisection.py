"""The search against all values: exact where values stand in order, never wrong about what holds
where they do not.
"""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from vllm_memprof.plans.knobs import HOLDS, TOO_LITTLE, TOO_MUCH, bisect


def values_of(verdicts: list[int]) -> dict[str, int]:
    return {str(i): verdict for i, verdict in enumerate(verdicts)}


def search(verdicts: list[int]) -> tuple[str | None, bool, list[str]]:
    """The answer, whether the verdicts stood in order, and the values asked for."""
    table, asked = values_of(verdicts), list[str]()

    def probe(value: str) -> int:
        if value not in asked:
            asked.append(value)
        return table[value]

    return *bisect(list(table), probe), asked


def best_of_all(verdicts: list[int]) -> str | None:
    holding = (value for value, verdict in values_of(verdicts).items() if verdict == HOLDS)
    return max(holding, key=int, default=None)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 40))
def test_in_order_it_finds_what_an_exhaustive_search_finds(
    little: int, holding: int, much: int
) -> None:
    verdicts = [TOO_LITTLE] * little + [HOLDS] * holding + [TOO_MUCH] * much
    answer, ordered, asked = search(verdicts)
    assert answer == best_of_all(verdicts)
    assert ordered
    assert len(asked) <= 3 + math.log2(max(1, len(verdicts)))


@given(st.lists(st.sampled_from([TOO_LITTLE, HOLDS, TOO_MUCH]), min_size=1, max_size=60))
def test_in_any_order_the_answer_holds_and_no_answer_means_that_none_tried_does(
    verdicts: list[int],
) -> None:
    table = values_of(verdicts)
    answer, ordered, asked = search(verdicts)
    holding = [int(value) for value in asked if table[value] == HOLDS]
    assert (None if answer is None else int(answer)) == max(holding, default=None)
    if answer is not None and int(answer) < len(verdicts) - 1:
        after = str(int(answer) + 1)  # tried, so that the step is exact
        assert after in asked
        assert table[after] == TOO_MUCH if ordered else table[after] != HOLDS


@given(st.lists(st.sampled_from([HOLDS, TOO_MUCH]), min_size=2, max_size=60))
def test_what_it_saw_out_of_order_it_says(verdicts: list[int]) -> None:
    _, ordered, asked = search(verdicts)
    seen = [values_of(verdicts)[value] for value in sorted(asked, key=int)]
    assert ordered == (seen == sorted(seen))


def test_the_widest_gap_above_the_answer_is_looked_into() -> None:
    verdicts = [HOLDS] * 10 + [TOO_MUCH] * 50 + [HOLDS] * 20 + [TOO_MUCH] * 20
    assert search(verdicts)[:2] == ("79", False)
    assert search([HOLDS] * 10 + [TOO_MUCH] * 90)[1]


def test_the_most_ambitious_value_first() -> None:
    assert search([HOLDS] * 100)[2] == ["99"]
