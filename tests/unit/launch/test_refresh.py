"""Newer figures for views, from a process of its own."""

from __future__ import annotations

import sys
import time
from typing import Any

import psutil
import pytest

from tests.unit.launch.test_status import budgets, served
from vllm_memprof.launch import refresh
from vllm_memprof.launch.progress import EngineProgress, RankBudget
from vllm_memprof.launch.refresh import Refresher
from vllm_memprof.launch.watch import OWN_CHILDREN, ProcessWatch


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh, "_EVERY_S", 0.05)
    monkeypatch.setattr(refresh, "_REST", 0)


def serving() -> EngineProgress:
    progress = served()
    progress.serve([])
    return progress


def until(condition: Any, seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_the_state_gets_what_the_process_printed_in_the_thread_that_updates() -> None:
    progress, printed = serving(), list[bytes]()

    def read(text: bytes) -> list[RankBudget]:
        printed.append(text)
        return budgets(7)

    refresher = Refresher([sys.executable, "-c", "print('a report')"], read)
    refresher.update(serving())
    until(lambda: len(printed) > 1)  # and again
    assert printed[0] == b"a report\n"
    assert progress.workers[0].budget is None  # nothing comes from another thread
    refresher.update(progress)
    assert progress.workers[0].budget == budgets(7)[0]
    refresher.close()


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "print('no report')"])
def test_what_cannot_be_read_changes_nothing(code: str) -> None:
    progress, tried = serving(), []

    def read(text: bytes) -> list[RankBudget]:
        tried.append(text)
        raise ValueError("no report")

    refresher = Refresher([sys.executable, "-c", code], read)
    refresher.update(serving())
    until(lambda: len(tried) > 1)
    refresher.update(progress)
    refresher.close()
    assert progress.workers[0].budget is None


def test_its_process_is_none_of_the_engine_and_ends_with_it() -> None:
    refresher = Refresher([sys.executable, "-c", "import time; time.sleep(60)"], lambda text: [])
    watch = ProcessWatch(psutil.Process().pid)
    try:
        refresher.update(serving())
        until(lambda: OWN_CHILDREN)
        (child,) = OWN_CHILDREN
        watch.walk()
        assert child not in watch.living()
        began = time.monotonic()
        refresher.close()
        assert time.monotonic() - began < 30  # the child sleeps for a minute
        until(lambda: not psutil.pid_exists(child), 10)
        assert not OWN_CHILDREN
    finally:
        watch.close()
