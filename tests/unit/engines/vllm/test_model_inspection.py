"""The look at a model's class in a fork: its answer, the traces it does not leave, the engine's own
way on errors."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from vllm_memprof.engines.vllm.model_inspection import in_a_fork


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

    with in_a_fork():
        pid, count = registry._run_in_subprocess(look)
    assert pid != os.getpid()
    assert (count, seen, registry.asked) == (1, [], [])


def test_an_error_is_left_to_the_engine(
    registry: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    def look() -> None:
        raise ImportError("no such model")

    with in_a_fork():
        assert registry._run_in_subprocess(look) == "engine"
    assert registry.asked == [look]
    assert capfd.readouterr().err == ""


def test_a_process_that_dies_is_left_to_the_engine(registry: ModuleType) -> None:
    with in_a_fork():
        assert registry._run_in_subprocess(lambda: os._exit(3)) == "engine"


def test_the_engine_s_own_way_is_back_afterwards(registry: ModuleType) -> None:
    own = registry._run_in_subprocess
    with in_a_fork():
        assert registry._run_in_subprocess is not own
    assert registry._run_in_subprocess is own
    with pytest.raises(KeyError), in_a_fork():
        raise KeyError
    assert registry._run_in_subprocess is own


def test_a_release_without_that_function_is_left_alone(registry: ModuleType) -> None:
    del registry._run_in_subprocess
    with in_a_fork():
        assert not hasattr(registry, "_run_in_subprocess")
