"""What is added again for every layer, added once."""

from __future__ import annotations

from vllm_memprof.engines.vllm.asked_once import once_for_each


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
