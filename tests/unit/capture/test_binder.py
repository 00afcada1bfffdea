"""Binding by hand-made modules: late imports, static and class methods, decorators, removal."""

from __future__ import annotations

import functools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from vllm_memprof.capture.binder import Binder, is_ours
from vllm_memprof.capture.hook import Hook, Moment, Need
from vllm_memprof.capture.hooks.table import HOOKS

SOURCE = """
    class Worker:
        def load(self): return "loaded"
        @staticmethod
        def fixed(): return "fixed"
        @classmethod
        def made(cls): return cls.__name__
    class Special(Worker):
        def load(self): return "special " + super().load()
    def plan(): return "planned"
"""


class Bench:
    """A binder over one temporary module, and the calls that its wrappers saw."""

    def __init__(self, folder: Path) -> None:
        (folder / "engine_under_test.py").write_text(textwrap.dedent(SOURCE))
        self.calls: list[str] = []
        self.errors: list[str] = []

    def bind(self, *targets: str, **fields: Any) -> Binder:
        hook = Hook("h", None, tuple(f"engine_under_test:{t}" for t in targets), **fields)
        self.binder = Binder(
            [hook], self.wrap, lambda where, error: self.errors.append(f"{where}: {error}")
        )
        self.binder.install()
        return self.binder

    def uninstall(self) -> None:
        if self.binder in sys.meta_path:
            sys.meta_path.remove(self.binder)
        for binding in self.binder.bindings:
            binding.unbind()

    def wrap(self, hook: Hook, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(function.__name__)
            return function(*args, **kwargs)

        return wrapper


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Bench(tmp_path)
    yield made
    made.uninstall()
    sys.modules.pop("engine_under_test", None)


def test_binds_right_after_the_module_s_own_import(bench: Bench) -> None:
    binder = bench.bind("Worker.load", "plan")
    assert [binding.state for binding in binder.bindings] == ["pending", "pending"]

    import engine_under_test as engine  # type: ignore[import-not-found]

    assert engine.Worker().load() == "loaded"
    assert engine.plan() == "planned"
    assert bench.calls == ["load", "plan"]
    assert [binding.state for binding in binder.bindings] == ["bound", "bound"]
    assert "exec_module" not in vars(
        engine.__spec__.loader
    )  # the import system's loader is as it was


def test_binds_what_is_already_loaded(bench: Bench) -> None:
    import engine_under_test as engine

    bench.bind("plan")
    engine.plan()
    assert bench.calls == ["plan"]


def test_keeps_static_and_class_methods(bench: Bench) -> None:
    bench.bind("Worker.fixed", "Worker.made")
    import engine_under_test as engine

    assert engine.Worker.fixed() == engine.Worker().fixed() == "fixed"
    assert engine.Special.made() == "Special"
    assert bench.calls == ["fixed", "fixed", "made"]
    assert isinstance(vars(engine.Worker)["fixed"], staticmethod)


def test_missing_is_a_state_and_not_an_error(bench: Bench) -> None:
    binder = bench.bind("Worker.gone", "Nobody.load")
    import engine_under_test  # noqa: F401

    assert [binding.state for binding in binder.bindings] == ["missing", "missing"]
    assert not bench.errors


def test_inherited_methods_are_left_to_their_defining_class(bench: Bench) -> None:
    binder = bench.bind("Special.fixed")
    import engine_under_test  # noqa: F401

    assert binder.bindings[0].state == "missing"


def test_a_class_that_took_the_name_of_its_base_is_seen_through(bench: Bench) -> None:
    import engine_under_test as engine

    base = engine.Worker

    class Balanced(base):  # type: ignore[misc]
        def made_here(self) -> str:
            return "made here"

    engine.Worker = Balanced
    binder = bench.bind("Worker.load", "Worker.made_here", "Worker.gone", "Special.fixed")
    assert [binding.state for binding in binder.bindings] == [
        "bound", "bound", "missing", "missing",
    ]  # fmt: skip
    assert binder.bindings[0].owner is base
    assert Balanced().load() == base().load() == "loaded"
    binder.check()
    binder.bind_instance(None)
    assert engine.Worker().load() == "loaded"
    assert bench.calls == ["load", "load", "load"]
    bench.uninstall()
    assert "load" not in vars(Balanced)
    assert not is_ours(vars(base)["load"])


def test_overrides_of_the_class_really_used(bench: Bench) -> None:
    binder = bench.bind("Worker.load")
    import engine_under_test as engine

    binder.bind_instance(engine.Special())
    binder.bind_instance(engine.Special())
    assert engine.Special().load() == "special loaded"
    assert bench.calls == ["load", "load"]


def test_never_wraps_twice(bench: Bench) -> None:
    binder = bench.bind("plan")
    import engine_under_test as engine

    first = engine.plan
    binder.bind_instance(None)
    binder.bindings[0].bind(bench.wrap, engine)
    assert engine.plan is first
    assert is_ours(first)


def test_a_decorator_over_ours_is_not_overwriting(bench: Bench) -> None:
    binder = bench.bind("plan")
    import engine_under_test as engine

    ours = engine.plan

    @functools.wraps(ours)
    def theirs() -> Any:
        return ours()

    engine.plan = theirs
    binder.check()
    assert binder.bindings[0].state == "bound"
    assert not is_ours(theirs)


def test_overwritten_is_bound_again_once(bench: Bench) -> None:
    binder = bench.bind("plan")
    import engine_under_test as engine

    engine.plan = lambda: "other"
    binder.check()
    assert engine.plan() == "other"
    assert bench.calls == ["<lambda>"]
    assert "bound again" in str(binder.bindings[0].detail)


def test_release_restores_the_original(bench: Bench) -> None:
    binder = bench.bind("Worker.load", until="profiled")
    import engine_under_test as engine

    binder.release("model_ready")
    assert is_ours(vars(engine.Worker)["load"])
    binder.release("profiled")
    assert not is_ours(vars(engine.Worker)["load"])
    engine.Worker().load()
    assert not bench.calls


def test_the_table_is_consistent() -> None:
    from tests.support.names import PHASES, ROLES
    from vllm_memprof.capture.versions import in_range

    assert len({hook.id for hook in HOOKS}) == len(HOOKS)
    for hook in HOOKS:
        assert hook.enter or hook.leave or hook.done or hook.becomes
        assert hook.phase is None or hook.phase in PHASES
        assert hook.role in ROLES
        assert hook.need in get_args(Need)
        assert {hook.due, hook.until or "end"} <= {*get_args(Moment)}
        assert all(target.count(":") == 1 for target in hook.targets)
        in_range("0.23.0", hook.versions)
