"""What is added again for every layer, added once."""

from __future__ import annotations

import inspect
import sys

import pytest

from vllm_memprof.engines.replaced import all_replaced
from vllm_memprof.engines.vllm.dynamo_caches import hidden_dictionaries, once_for_each, remembering


def test_each_of_equal_pairs_is_added_once() -> None:
    calls: list[tuple[object, object]] = []
    add = once_for_each(lambda to, what: calls.append((to, what)))
    first, second = ["first"], ["second"]
    for to, what in ((first, 1), (first, 1), (second, 1), (first, 2), (second, 1)):
        add(to, what)
    assert calls == [(first, 1), (second, 1), (first, 2)]


def test_what_failed_is_tried_again() -> None:
    calls: list[object] = []

    def failing(to: object, what: object) -> None:
        calls.append(what)
        raise ValueError

    add = once_for_each(failing)
    for _ in range(2):
        try:
            add([], "a")
        except ValueError:
            continue
    assert calls == ["a", "a"]


def test_a_class_is_asked_for_once() -> None:
    asked: list[type] = []
    answer = remembering(lambda of: asked.append(of) or of.__name__)  # type: ignore[func-returns-value]
    assert [answer(of) for of in (int, str, int, int)] == ["int", "str", "int", "int"]
    assert asked == [int, str]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="inspect remembers by itself from 3.12 on")
def test_attributes_are_found_as_before() -> None:
    class Plain:
        value = 1

    class Hiding:
        __dict__ = {"value": 2}  # type: ignore[assignment]

    held = vars(inspect)["_shadowed_dict"]
    instances = [Plain(), Hiding(), Plain]
    before = [inspect.getattr_static(each, "value", None) for each in instances]
    with all_replaced(hidden_dictionaries()):
        assert vars(inspect)["_shadowed_dict"] is not held
        for _ in range(2):
            assert [inspect.getattr_static(each, "value", None) for each in instances] == before
    assert vars(inspect)["_shadowed_dict"] is held
