"""``memprof who`` on the simulated device: real processes that hold its memory, one of them killed.

No engine runs: the processes load the shim and allocate, one of them under the title of a worker of
vLLM, started by a launcher that is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.engine import MEMPROF
from tests.support.left_behind import Family, start_family
from vllm_memprof.sim.profiles import load_profile
from vllm_memprof.sim.runtime import ENV_STATE, prepare_runtime

pytestmark = [pytest.mark.sim, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
MEMORY = load_profile("910b").memory
TOTAL = load_profile("910b").device.total_bytes
HOLD = """
import acl, time
acl.set_device({device})
acl.malloc({size})
print("READY", flush=True)
time.sleep(150)
"""


class Machine:
    """Processes on simulated devices that nobody else uses, and ``memprof who`` on them."""

    def __init__(self, stack: str, folder: Path) -> None:
        self.folder = folder
        own = {ENV_STATE: str(folder / "devices")}
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **own}
        shim = prepare_runtime("910b", stack).env
        self.holder_env = {**self.env, **shim, "PYTHONPATH": str(ROOT / "tests" / "shim")}
        self.started: list[subprocess.Popen[str]] = []
        self.families: list[Family] = []

    def hold(self, device: int, size: int) -> subprocess.Popen[str]:
        """Start a program that holds memory of a device."""
        code = HOLD.format(device=device, size=size)
        process = self._start([sys.executable, "-c", code], self.holder_env)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("READY")
        return process

    def hold_as_worker(self, device: int, size: int) -> Family:
        """Start a launcher, and under it a worker of an engine that holds memory of a device."""
        code = HOLD.format(device=device, size=size)
        self.families.append(start_family(code, env=self.holder_env))
        return self.families[-1]

    def who(self, *args: str, status: int = 0) -> dict[str, Any]:
        command = [*MEMPROF, "who", "--device", "sim:910b", "--json", *args]
        done = subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == status, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def wait(self, *args: str) -> subprocess.Popen[str]:
        return self._start([*MEMPROF, "who", "--device", "sim:910b", "--json", *args], self.env)

    def _start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, env=env, cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def close(self) -> None:
        for family in self.families:
            family.close()
        for process in self.started:
            process.kill()
            process.communicate(timeout=30)


@pytest.fixture
def machine(sim_stack: str, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(sim_stack, tmp_path)
    yield made
    made.close()


def held(found: dict[str, Any], device: int) -> dict[int, int]:
    """Return pid -> bytes of the processes on a device."""
    return {row["pid"]: row["bytes"] for row in found["devices"][device]["processes"]}


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def test_three_processes_one_of_them_left_by_a_killed_launcher(machine: Machine) -> None:
    worker = machine.hold_as_worker(0, 3 * GIB)
    program = machine.hold(0, 2 * GIB)
    other = machine.hold(1, 4 * GIB)
    first, further = MEMORY.context_bytes, MEMORY.further_context_bytes
    on_0 = {worker.worker: 3 * GIB + first, program.pid: 2 * GIB + further}
    on_1 = {other.pid: 4 * GIB + first}

    found = machine.who()
    assert [held(found, device) for device in (0, 1, 2)] == [on_0, on_1, {}]
    zero = found["devices"][0]
    assert (zero["total_bytes"], zero["used_bytes"]) == (TOTAL, sum(on_0.values()))
    assert zero["free_bytes"] == TOTAL - sum(on_0.values())
    rows = {row["pid"]: row for row in zero["processes"]}
    assert rows[worker.worker]["engine"] == "vllm"
    assert rows[worker.worker]["role"] == "Worker_TP0"
    assert rows[worker.worker]["left_behind"] is False
    assert rows[program.pid]["engine"] is None
    assert found["left_behind"] == []

    worker.kill_launcher()
    after = machine.who()
    assert [held(after, device) for device in (0, 1, 2)] == [on_0, on_1, {}]  # frees none
    left = [row for row in after["left_behind"] if row["pid"] in rows]
    assert [(row["pid"], row["bytes"]) for row in left] == [(worker.worker, 3 * GIB + first)]
    assert f"its parent is {worker.reaper.pid} (sleep)" in left[0]["why"]
    assert all(psutil.pid_exists(pid) for pid in (worker.worker, program.pid, other.pid))

    # waits until both have ended, says so when what it waits for changes, and ends neither
    waiting = machine.wait("--only", "0", "--wait", "FREE=60GiB", "--timeout", "60s")
    said = line_of(waiting)
    assert said.startswith("memprof: waiting for 60.00 GiB on device 0: ")
    assert f"{worker.worker} (vllm Worker_TP0) 3.35 GiB" in said
    assert f"{program.pid} (python" in said
    program.send_signal(signal.SIGKILL)
    program.wait(30)
    said = line_of(waiting)
    assert f"{worker.worker} (vllm Worker_TP0) 3.35 GiB" in said
    assert str(program.pid) not in said
    time.sleep(2.5)  # two more looks, at which nothing has changed
    assert waiting.poll() is None
    assert psutil.pid_exists(worker.worker)
    os.kill(worker.worker, signal.SIGKILL)
    out, err = waiting.communicate(timeout=30)
    assert (waiting.returncode, err) == (0, "")
    done = json.loads(out)
    assert done["devices"][0]["free_bytes"] == TOTAL
    assert (done["wait"]["met"], done["wait"]["free_bytes"]) == (True, 60 * GIB)
    assert done["wait"]["seconds"] > 2.5


def test_the_end_of_a_wait_that_is_not_met(machine: Machine) -> None:
    holder = machine.hold(1, 4 * GIB)
    interrupted = machine.wait("--only", "1", "--wait", "FREE=60GiB")
    assert "device 1" in line_of(interrupted)
    found = machine.who("--only", "1", "--wait", "FREE=60GiB", "--timeout", "1s", status=124)
    assert (found["wait"]["met"], found["wait"]["timeout_seconds"]) == (False, 1.0)
    assert held(found, 0) == {holder.pid: 4 * GIB + MEMORY.context_bytes}
    interrupted.send_signal(signal.SIGINT)
    out, err = interrupted.communicate(timeout=30)
    assert (interrupted.returncode, out, err) == (130, "", "")
    assert holder.poll() is None
    assert machine.who("--wait", "FREE=50GiB", "--timeout", "0s")["wait"]["met"] is True
