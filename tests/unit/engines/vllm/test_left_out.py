"""What is left out of a compilation comes back after it."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from vllm_memprof.engines.vllm.skipped_compilation import _uncollected, without_guards


class Pickler:
    @classmethod
    def dumps(cls, wanted: bool) -> tuple[str, bool]:
        return cls.__name__, gc.isenabled() == wanted

    @staticmethod
    def loads() -> bool:
        return gc.isenabled()


def test_the_collector_is_off_inside_alone() -> None:
    for name in ("dumps", "loads"):
        setattr(Pickler, name, _uncollected(vars(Pickler)[name]))
    assert Pickler.dumps(False) == ("Pickler", True)
    assert not Pickler.loads()
    assert gc.isenabled()

    gc.disable()
    try:
        Pickler.loads()
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()


def test_the_collector_is_on_again_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        _uncollected(lambda: 1 // 0)()
    assert gc.isenabled()


def test_a_graph_has_its_guards_again() -> None:
    graph = SimpleNamespace(_guards={"a guard"})
    with without_guards(graph):
        assert graph._guards == set()
    assert graph._guards == {"a guard"}
