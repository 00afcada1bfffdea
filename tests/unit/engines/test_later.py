"""Modules that are executed at their first use."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_memprof.engines.later import loaded_later

NAME = "memprof_test_heavy"


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A package that tells when its modules are executed."""
    told: list[str] = []
    monkeypatch.setattr(sys, "memprof_told", told, raising=False)
    package = tmp_path / NAME
    package.mkdir()
    tell = "import sys\nsys.memprof_told.append(__name__)\n"
    (package / "__init__.py").write_text(tell + "value = 1\n")
    (package / "part.py").write_text(
        tell + "class Thing:\n    def __init__(self, size):\n        self.size = size\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield told
    for name in (f"{NAME}.part", NAME):
        sys.modules.pop(name, None)


def test_a_module_is_executed_when_something_of_it_is_asked_for(executed: list[str]) -> None:
    with loaded_later({NAME: ()}):
        module = importlib.import_module(NAME)
    assert executed == []
    assert module.value == 1
    assert module.value == 1
    assert executed == [NAME]
    assert type(module) is type(sys)


def test_who_walks_over_all_modules_executes_none(executed: list[str]) -> None:
    with loaded_later({NAME: ()}):
        module = importlib.import_module(NAME)
    assert not hasattr(module, "__wrapped__")
    assert not hasattr(module, "__warningregistry__")
    assert inspect.getsourcefile(module) == module.__file__
    assert executed == []


def test_a_promised_class_is_made_by_the_module_at_its_first_call(executed: list[str]) -> None:
    with loaded_later({f"{NAME}.part": ("Thing",)}):
        thing_class = importlib.import_module(f"{NAME}.part").Thing
    annotated: object = thing_class | None
    assert annotated is not None
    assert not isinstance(3, thing_class)
    assert executed == [NAME]  # the package, which nobody named
    thing = thing_class(size=3)
    assert executed == [NAME, f"{NAME}.part"]
    assert thing.size == 3
    assert isinstance(thing, thing_class)
    assert type(thing) is sys.modules[f"{NAME}.part"].Thing


def test_a_name_that_was_not_promised_executes_the_module(executed: list[str]) -> None:
    with loaded_later({f"{NAME}.part": ()}):
        part = importlib.import_module(f"{NAME}.part")
    assert part.Thing(1).size == 1
    assert executed == [NAME, f"{NAME}.part"]


def test_afterwards_and_for_others_an_import_executes(executed: list[str]) -> None:
    with loaded_later({"another": ()}):
        importlib.import_module(NAME)
    assert executed == [NAME]
    importlib.import_module(f"{NAME}.part")
    assert executed == [NAME, f"{NAME}.part"]


def test_a_module_that_is_not_there_is_not_there_at_once() -> None:
    with loaded_later({"memprof_test_absent": ()}), pytest.raises(ModuleNotFoundError):
        importlib.import_module("memprof_test_absent")


def test_what_it_is_said_to_lack_is_there_once_it_is_executed(executed: list[str]) -> None:
    with loaded_later({NAME: ("-value",)}):
        module = importlib.import_module(NAME)
    assert not hasattr(module, "value")
    assert executed == []
    assert not hasattr(module, "another")  # asked for something else: executed
    assert module.value == 1


def test_a_patch_that_came_first_stays(executed: list[str]) -> None:
    with loaded_later({NAME: ()}):
        module = importlib.import_module(NAME)
    module.value = 2
    assert not hasattr(module, "another")
    assert executed == [NAME]
    assert module.value == 2
