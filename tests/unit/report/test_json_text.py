"""JSON in pieces is the JSON that the standard library writes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_memprof.report.json_text import json_pieces

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(VALUES, st.integers(0, 6))
def test_any_value(value: object, levels: int) -> None:
    text = "".join(json_pieces(value, levels))
    assert json.loads(text) == value
    assert text.endswith("\n")


def test_an_iterator_is_a_list_that_is_never_whole() -> None:
    made = []

    def rows():
        for number in range(3):
            made.append(number)
            yield {"a": number}

    pieces = json_pieces({"rows": rows(), "none": iter(())}, levels=1)
    assert not made
    text = next(pieces) + next(pieces)
    while "0" not in text:
        text += next(pieces)
    assert made == [0]
    text += "".join(pieces)
    assert text == '{\n "rows": [\n  {"a": 0},\n  {"a": 1},\n  {"a": 2}\n ],\n "none": []\n}\n'


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        "".join(json_pieces({"a": float("nan")}))
