"""Dataclasses to JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import pytest

from vllm_memprof.record.codec import (
    INLINE,
    OPTIONAL,
    Allowed,
    Size,
    Spread,
    computed,
    from_json,
    to_json,
)


@dataclass(frozen=True)
class Inner:
    """A part."""

    size: Size | None
    share: float | int | None = None


@dataclass(frozen=True)
class End:
    """One of two ends."""

    side: Annotated[str, Allowed(("low", "high"))]
    inner: Inner = field(metadata={"json": INLINE})
    more: Inner | None = field(default=None, metadata={"json": False})


@dataclass(frozen=True)
class Outer:
    """All kinds of fields."""

    name: str  # of the whole
    parts: list[Inner]
    ends: tuple[End, ...] = field(metadata={"json": Spread("side", ("low", "high"))})
    by_number: dict[int, list[str]] = field(default_factory=dict)
    anything: Mapping[str, object] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    renamed: bool = field(default=False, metadata={"json": "other"})
    rare: str | None = field(default=None, metadata={"json": OPTIONAL})
    hidden: int = field(default=7, compare=False, metadata={"json": False})
    SCHEMA: ClassVar[str] = "test/1"

    @property
    @computed
    def count(self) -> int | None:
        return len(self.parts) or None


WHOLE = Outer(
    name="whole",
    parts=[Inner(5), Inner(None, 0.5)],
    ends=(End("high", Inner(1)),),
    by_number={3: ["a"]},
    anything={"deep": [{"x": None}]},
    words=("b", "c"),
    renamed=True,
)


def test_every_field_is_a_key_and_comes_back() -> None:
    data = to_json(WHOLE)
    assert data == {
        "schema": "test/1",
        "name": "whole",
        "parts": [{"size": 5, "share": None}, {"size": None, "share": 0.5}],
        "low": None,
        "high": {"size": 1, "share": None},
        "by_number": {"3": ["a"]},
        "anything": {"deep": [{"x": None}]},
        "words": ["b", "c"],
        "other": True,
        "count": 2,
    }
    assert list(data)[:2] == ["schema", "name"]
    assert from_json(Outer, json.loads(json.dumps(data))) == WHOLE


def test_a_list_can_be_made_one_by_one() -> None:
    data = to_json(WHOLE, lazy=("parts",))
    assert next(data["parts"]) == {"size": 5, "share": None}
    assert {**data, "parts": [to_json(WHOLE.parts[0]), *data["parts"]]} == to_json(WHOLE)
    assert WHOLE.parts[0].size == 5


def test_what_has_its_default_may_be_left_out() -> None:
    assert "rare" not in to_json(WHOLE)
    assert to_json(replace(WHOLE, rare="x"))["rare"] == "x"
    assert from_json(Inner, {"size": 1, "unknown": 2}) == Inner(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "test/2"}, "schema 'test/2', this memprof reads 'test/1'"),
        ({"name": None}, "^name: str is wanted, not None"),
        ({"parts": [{"size": 1}, {"size": 1.5}]}, "^parts: 1: size: int is wanted, not 1.5"),
        ({"parts": [{}]}, "^parts: 0: 'size' is missing"),
        ({"parts": {}}, "^parts: a list is wanted"),
        ({"by_number": []}, "^by_number: an object is wanted"),
        ({"by_number": {"x": []}}, "^by_number: invalid literal"),
        ({"high": {}}, "^high: 'size' is missing"),
        ({"other": 1}, "^other: bool is wanted, not 1"),
        ({"parts": [{"size": True}]}, "size: int is wanted, not True"),
    ],
)
def test_what_is_something_else_is_refused_with_the_way_to_it(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        from_json(Outer, {**to_json(WHOLE), **change})
    with pytest.raises(ValueError, match="an object is wanted, not "):
        from_json(Outer, [])
