"""Newer figures for views, from a process of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

import psutil
import pytest

from tests.unit.launch.test_status import budgets
from vllm_memprof.launch.live import View
from vllm_memprof.launch.progress import EngineProgress
from vllm_memprof.launch.refresh import Refresher
from vllm_memprof.launch.status import RankBudget
from vllm_memprof.launch.watch import OWN_CHILDREN, ProcessWatch


class Told(View):
    def __init__(self) -> None:
        self.budgets: list[list[RankBudget]] = []

    def serve(self, budgets: Iterable[RankBudget]) -> None:
        self.budgets.append(list(budgets))


def until(condition: Any, seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_views_get_what_the_process_printed_in_the_thread_that_updates() -> None:
    told = Told()
    printed: list[bytes] = []

    def read(text: bytes) -> list[RankBudget]:
        printed.append(text)
        return budgets(7)

    refresher = Refresher(
        [sys.executable, "-c", "print('a report')"], read, [told], every_s=0.05, rest=0
    )
    refresher.serve([])
    until(lambda: len(printed) > 1)  # and again
    assert printed[0] == b"a report\n"
    assert told.budgets == []  # nothing comes from another thread
    refresher.update(EngineProgress())
    assert told.budgets == [budgets(7)]
    refresher.close()


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "print('no report')"])
def test_what_cannot_be_read_changes_nothing(code: str) -> None:
    told, tried = Told(), []

    def read(text: bytes) -> list[RankBudget]:
        tried.append(text)
        raise ValueError("no report")

    refresher = Refresher([sys.executable, "-c", code], read, [told], every_s=0.05, rest=0)
    refresher.serve([])
    until(lambda: len(tried) > 1)
    refresher.update(EngineProgress())
    refresher.close()
    assert told.budgets == []


def test_its_process_is_none_of_the_engine_and_ends_with_it() -> None:
    refresher = Refresher(
        [sys.executable, "-c", "import time; time.sleep(60)"], lambda text: [], [], every_s=0.01
    )
    watch = ProcessWatch(psutil.Process().pid)
    try:
        refresher.serve([])
        until(lambda: OWN_CHILDREN)
        (child,) = OWN_CHILDREN
        watch.walk()
        assert child not in watch.living()
        began = time.monotonic()
        refresher.close()
        assert time.monotonic() - began < 10
        until(lambda: not psutil.pid_exists(child), 10)
        assert not OWN_CHILDREN
    finally:
        watch.close()
