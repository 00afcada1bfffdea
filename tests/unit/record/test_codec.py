"""Types to JSON and back, and what reading refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import pytest

from vllm_memprof.record.codec import computed, from_json, one_of, to_json
from vllm_memprof.text import text


@dataclass(frozen=True)
class Inner:
    """A part."""

    size: int | None
    share: float | int | None = None
    side: Annotated[str, one_of("low", "high")] = "low"


@dataclass(frozen=True)
class Outer:
    """All kinds of fields."""

    name: str  # of the whole
    parts: list[Inner]
    high: Inner | None = None
    by_number: dict[int, list[str]] = field(default_factory=dict)
    anything: Mapping[str, object] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    other: bool = False
    SCHEMA: ClassVar[str] = "test/1"

    @property
    @computed
    def count(self) -> int | None:
        return len(self.parts) or None


WHOLE = Outer(
    name="whole",
    parts=[Inner(5), Inner(None, 0.5)],
    high=Inner(1),
    by_number={3: ["a"]},
    anything={"deep": [{"x": None}]},
    words=("b", "c"),
    other=True,
)


def test_every_field_is_a_key_and_comes_back() -> None:
    data = to_json(WHOLE)
    assert data == {
        "schema": "test/1",
        "name": "whole",
        "parts": [
            {"size": 5, "share": None, "side": "low"},
            {"size": None, "share": 0.5, "side": "low"},
        ],
        "high": {"size": 1, "share": None, "side": "low"},
        "by_number": {"3": ["a"]},
        "anything": {"deep": [{"x": None}]},
        "words": ["b", "c"],
        "other": True,
        "count": 2,
    }
    assert list(data)[:2] == ["schema", "name"]
    assert from_json(Outer, json.loads(json.dumps(data))) == WHOLE
    assert from_json(Outer, to_json(replace(WHOLE, name=text("whole")))).name == "whole"


def test_unknown_keys_are_ignored_and_what_has_a_default_may_be_missing() -> None:
    assert from_json(Inner, {"size": 1, "unknown": 2}) == Inner(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "test/2"}, "schema 'test/2', this memprof reads 'test/1'"),
        ({"name": None}, r"Expected `str`, got `null` - at `\$.name`"),
        ({"parts": [{"size": 1}, {"size": 1.5}]}, r"Expected `int .* at `\$.parts\[1\].size`"),
        ({"parts": [{}]}, r"missing required field `size` - at `\$.parts\[0\]`"),
        ({"parts": {}}, r"Expected `array`.* at `\$.parts`"),
        ({"by_number": {"x": []}}, "Expected `int`"),
        ({"high": {}}, r"missing required field `size` - at `\$.high`"),
        ({"other": 1}, r"at `\$.other`"),
        ({"parts": [{"size": True}]}, r"at `\$.parts\[0\].size`"),
    ],
)
def test_what_is_something_else_is_refused_with_the_way_to_it(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        from_json(Outer, {**to_json(WHOLE), **change})
    with pytest.raises(ValueError, match="Expected `object`"):
        from_json(Outer, [])
