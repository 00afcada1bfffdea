"""Shortcuts of a plan: what is done once, what is left out, and that it is as before afterwards."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from vllm_memprof.engines.vllm.shortcuts import (
    all_replaced,
    of_a_worker,
    of_an_inspection,
    remembering,
    replaced,
    uncollected,
)


class Owner:
    value = 1

    @staticmethod
    def fixed() -> str:
        return "fixed"


def test_an_attribute_is_put_back_as_it_lay_there() -> None:
    held = vars(Owner)["fixed"]
    with replaced(Owner, "fixed", staticmethod(lambda: "other")), replaced(Owner, "value", 2):
        assert (Owner.fixed(), Owner().fixed(), Owner.value) == ("other", "other", 2)
    assert vars(Owner)["fixed"] is held
    assert (Owner.fixed(), Owner.value) == ("fixed", 1)
    with pytest.raises(ValueError, match="inside"), replaced(Owner, "value", 2):
        raise ValueError("inside")
    assert Owner.value == 1


def test_it_is_run_once_for_each_object_and_key() -> None:
    calls: list[tuple[object, object]] = []
    add = remembering(
        lambda to, what: calls.append((to, what)) or len(calls),  # type: ignore[func-returns-value]
        lambda _, what: what,
    )
    first, second = ["first"], ["second"]
    pairs = ((first, 1), (first, 1), (second, 1), (first, 2), (second, 1), (first, None))
    assert [add(*pair) for pair in pairs] == [1, 1, 2, 3, 2, 4]
    add(first, None)
    assert calls == [(first, 1), (second, 1), (first, 2), (first, None), (first, None)]


def test_what_failed_is_tried_again() -> None:
    calls: list[object] = []

    def failing(to: object, what: object) -> None:
        calls.append(what)
        raise ValueError("again")

    add = remembering(failing, lambda _, what: what)
    for _ in range(2):
        with pytest.raises(ValueError, match="again"):
            add([], "a")
    assert calls == ["a", "a"]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="inspect remembers by itself from 3.12 on")
def test_attributes_are_found_as_before() -> None:
    class Plain:
        value = 1

    class Hiding:
        __dict__ = {"value": 2}  # type: ignore[assignment]

    held = vars(inspect)["_shadowed_dict"]
    instances = [Plain(), Hiding(), Plain]
    before = [inspect.getattr_static(each, "value", None) for each in instances]
    with all_replaced([(inspect, "_shadowed_dict", remembering(held, lambda _: "dict"))]):
        for _ in range(2):
            assert [inspect.getattr_static(each, "value", None) for each in instances] == before
    assert vars(inspect)["_shadowed_dict"] is held


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_off_inside_alone_and_then_as_it_was(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        assert not uncollected(gc.isenabled)()
        assert gc.isenabled() == collects
        with pytest.raises(ZeroDivisionError):
            uncollected(lambda: 1 // 0)()
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that stands for ``vllm.model_executor.models.registry``; ``asked`` holds what it was
    asked itself."""
    module = ModuleType("registry")
    module.asked = []  # type: ignore[attr-defined]
    module._run_in_subprocess = lambda function: module.asked.append(function) or "engine"  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models", SimpleNamespace(registry=module))  # type: ignore[misc]
    return module


def test_the_answer_comes_from_another_process_that_leaves_no_trace(registry: ModuleType) -> None:
    seen: list[int] = []

    def look() -> tuple[int, int]:
        seen.append(1)
        return os.getpid(), len(seen)

    with all_replaced(of_an_inspection()):
        pid, count = registry._run_in_subprocess(look)
    assert pid != os.getpid()
    assert (count, seen, registry.asked) == (1, [], [])


def test_an_error_is_left_to_the_engine(
    registry: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    def look() -> None:
        raise ImportError("no such model")

    with all_replaced(of_an_inspection()):
        assert registry._run_in_subprocess(look) == "engine"
    assert registry.asked == [look]
    assert capfd.readouterr().err == ""


def test_a_process_that_dies_is_left_to_the_engine(registry: ModuleType) -> None:
    with all_replaced(of_an_inspection()):
        assert registry._run_in_subprocess(lambda: os._exit(3)) == "engine"


def test_the_engine_s_own_way_is_back_afterwards(registry: ModuleType) -> None:
    own = registry._run_in_subprocess
    with all_replaced(of_an_inspection()):
        assert registry._run_in_subprocess is not own
    assert registry._run_in_subprocess is own
    with pytest.raises(KeyError), all_replaced(of_an_inspection()):
        raise KeyError
    assert registry._run_in_subprocess is own


def test_a_release_without_that_function_is_left_alone(registry: ModuleType) -> None:
    del registry._run_in_subprocess
    with all_replaced(of_an_inspection()):
        assert not hasattr(registry, "_run_in_subprocess")


def test_torchair_calls_the_registration_of_patterns_as_without_the_shortcut(monkeypatch) -> None:
    """It asks the function's code whether it has ``pass_dicts``, and else gives ``pass_dict``."""

    def register(search: str, pass_dicts: str) -> str:
        return search + pass_dicts

    inductor = ModuleType("torch._inductor")
    inductor.pattern_matcher = SimpleNamespace(register_replacement=register)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setitem(sys.modules, "torch._inductor", inductor)
    subclasses = ModuleType("torch._subclasses")
    subclasses.FakeTensor = type("FakeTensor", (), {})
    monkeypatch.setitem(sys.modules, "torch._subclasses", subclasses)
    *_, (_, name, wrapped) = of_a_worker()
    assert name == "register_replacement"
    assert "pass_dicts" in wrapped.__code__.co_varnames
    assert wrapped("a", pass_dicts="b") == wrapped("a", "b") == "ab"
