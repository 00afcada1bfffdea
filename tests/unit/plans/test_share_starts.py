"""Starts beside each other, with processes that only pretend: who waits where, and who goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from vllm_memprof.plans import share_starts
from vllm_memprof.plans.model import Plan, PlanRow, Task
from vllm_memprof.plans.runner import Interrupted, PlanRunner
from vllm_memprof.plans.share import Flags, InstanceStart
from vllm_memprof.plans.share_starts import Instance, ShareJob, start_all
from vllm_memprof.plans.wants import Want
from vllm_memprof.record.schema import ENV_HOLD, MOMENTS, READY, SERVED
from vllm_memprof.sim.runtime import ENV_STATE


class Pretended:
    """A plan that passes its moments as the engine does; each step is one ``poll``."""

    log: ClassVar[list[str]] = []
    states: ClassVar[set[str]] = set()
    fails: ClassVar[set[str]] = set()
    interrupts: ClassVar[set[str]] = set()

    def __init__(self, task: Task) -> None:
        assert task.environ is not None
        self.task, self.name = task, task.run_dir.name
        self._holds = Path(task.environ[ENV_HOLD])
        self._left = list(MOMENTS)
        self._ended = False
        self.states.add(task.environ[ENV_STATE])
        self.log.append(f"{self.name} starts")

    def poll(self) -> bool:
        if self.name in self.fails or self._ended:
            return True
        if self.name in self.interrupts:
            self.interrupts.discard(self.name)
            os.kill(os.getpid(), signal.SIGINT)
        if self._left:
            held = self._holds / f"{self._left[0]}.held"
            asked = self._holds / f"{self._left[0]}.hold"
            if asked.exists():
                asked.rename(held)
                self.log.append(f"{self.name} {self._left[0]}")
            if held.exists():
                return False
            self._left.pop(0)
            return False
        self._ended = True
        self.log.append(f"{self.name} ends")
        return True

    def wait(self) -> None:
        while not self.poll():
            pass

    def end(self, why: str) -> None:
        self._ended = True
        self.log.append(f"{self.name} {why}")

    def row(self) -> PlanRow:
        if self.name in self.fails:
            return PlanRow({}, "failed", "no room")
        return PlanRow({}, "ok", tokens=1000, kv_cache_bytes=1 << 30)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(share_starts, "PlanProcess", Pretended)
    Pretended.log, Pretended.states = [], set()
    Pretended.fails, Pretended.interrupts = set(), set()
    yield Pretended.log
    assert len(Pretended.states) == 1  # one device for all, and its accounting is gone
    assert not Path(*Pretended.states).exists()


def start(
    folder: Path, moment: str, names: str = "AB", wants: tuple[Want, ...] = ()
) -> InstanceStart:
    own = {"device": "sim:910b", "until": "ready"}
    instances = [Instance(name, Plan(f"m/{name}", [], own=own), list(wants)) for name in names]
    flags = [Flags(name, 0.5, 7) for name in names]
    job = ShareJob(instances, 0, 0)
    return start_all(job, "1", flags, list(names), moment, PlanRunner(folder))


def test_the_next_one_meets_a_neighbour_that_has_served(tmp_path: Path, log: list[str]) -> None:
    found = start(tmp_path, SERVED)
    assert log == ["A starts", "A served", "B starts", "B served", "A ends", "B ends"]
    assert found.passes
    assert [each.value for each in found.results] == ["A", "B"]


def test_the_next_one_meets_a_neighbour_that_is_ready(tmp_path: Path, log: list[str]) -> None:
    """And then they serve, one after the other, until all hold what that took."""
    found = start(tmp_path, READY)
    assert log == [
        "A starts", "A ready", "B starts", "B ready", "A served", "B served", "A ends", "B ends",
    ]  # fmt: skip
    assert found.passes


def test_after_one_that_fails_no_other_is_started(tmp_path: Path, log: list[str]) -> None:
    Pretended.fails = {"B"}
    found = start(tmp_path, SERVED, "ABC")
    assert log == ["A starts", "A served", "B starts", "A ends"]
    assert not found.passes
    plans = [each.plan for each in found.results]
    assert [(each.status, each.reason) for each in plans] == [("ok", None), ("failed", "no room")]


def test_what_is_wanted_has_to_be_there(tmp_path: Path, log: list[str]) -> None:
    found = start(tmp_path, SERVED, wants=(Want("tokens", 2000),))
    missing = [[miss.text for miss in each.missing] for each in found.results]
    assert missing == [["KV tokens 1,000 < 2,000"]] * 2
    assert not found.passes


def test_a_signal_ends_all(tmp_path: Path, log: list[str]) -> None:
    Pretended.interrupts = {"B"}
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        start(tmp_path, SERVED, "ABC")
    assert caught.value.number == signal.SIGINT
    assert log[-2:] == ["A interrupted", "B interrupted"]
    assert "C starts" not in log
    assert signal.getsignal(signal.SIGINT) is before


def test_the_command_of_a_start(tmp_path: Path) -> None:
    own = {"device": "sim:910b", "until": "ready"}
    plan = Plan("m/a", ["--gpu-memory-utilization=0.9", "-tp", "1"], own=own, timeout_s=100)
    made = share_starts._beside_others(plan, Flags("A", 0.49, 12), ["A", "B"])
    command = made.command(tmp_path / "run")
    cut = command.index("--")
    assert command[cut + 1 :] == [
        "--gpu-memory-utilization", "0.49", "-tp", "1", "--num-gpu-blocks-override", "12",
    ]  # fmt: skip
    assert "--share-device" in command[:cut]
    assert "--until=ready" in command[:cut]
    assert "--startup-timeout=200" in command[:cut]
