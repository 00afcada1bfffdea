"""Rows of devices from what the driver says, and the wait; the driver's answers are by hand."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_memprof.errors import MemprofError, UsageError
from vllm_memprof.holders import look as look_module
from vllm_memprof.holders import processes
from vllm_memprof.holders.look import Source, device_row, look, read_driver, wait_until_free
from vllm_memprof.holders.rows import ELSEWHERE, ENDED, HERE, HOST_NUMBERS, OWN_NUMBERS, Who

GIB = 1 << 30
NPU = Source("npu", {})
DEAD = (1 << 22) + 1  # above the largest number that Linux gives


def listed(
    device: int = 0,
    processes: list[tuple[int, int]] | None = None,
    used: int | None = 20 * GIB,
    reasons: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return a row as the driver's list has it."""
    total = None if used is None else 64 * GIB
    row: dict[str, Any] = {"device": device, "card": device, "chip": 0, "processes": processes}
    return row | {"total_bytes": total, "used_bytes": used, "reasons": list(reasons)}


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Who]:
    def run(*rows: dict[str, Any], numbers: str = OWN_NUMBERS, only: tuple[int, ...] = ()) -> Who:
        monkeypatch.setattr(look_module, "read_driver", lambda source: list(rows))
        monkeypatch.setattr(look_module, "numbers_of_the_driver", lambda simulated: numbers)
        return look(NPU, only)

    return run


def test_what_no_living_process_accounts_for(looked: Callable[..., Who]) -> None:
    """Of an ended process that the driver still lists, the bytes belong to nobody who lives."""
    (row,) = looked(listed(processes=[(os.getpid(), 9 * GIB), (DEAD, 4 * GIB)])).devices
    assert row.processes is not None
    assert [(each.pid, each.where) for each in row.processes] == [
        (os.getpid(), HERE),
        (DEAD, ENDED),
    ]
    assert (row.used_bytes, row.held_bytes, row.free_bytes) == (20 * GIB, 9 * GIB, 44 * GIB)
    assert row.no_process_bytes == 11 * GIB
    assert row.driver_base_bytes is None


def test_processes_of_the_host_hold_what_they_hold(looked: Callable[..., Who]) -> None:
    (row,) = looked(listed(processes=[(os.getpid(), 9 * GIB)]), numbers=HOST_NUMBERS).devices
    assert row.processes is not None
    assert [each.where for each in row.processes] == [ELSEWHERE]
    assert row.no_process_bytes == 11 * GIB


def test_what_is_not_told_is_unknown(looked: Callable[..., Who]) -> None:
    no_list, no_memory = looked(
        listed(processes=None, reasons=("no list",)),
        listed(1, processes=[(os.getpid(), GIB)], used=None, reasons=("no memory",)),
    ).devices
    assert (no_list.processes, no_list.held_bytes, no_list.no_process_bytes) == (None, None, None)
    assert no_list.free_bytes == 44 * GIB
    assert (no_memory.free_bytes, no_memory.no_process_bytes) == (None, None)
    assert (no_memory.held_bytes, no_memory.reasons) == (GIB, ["no memory"])


def test_a_full_list_may_leave_processes_out(looked: Callable[..., Who]) -> None:
    (row,) = looked(listed(processes=[(os.getpid(), 1)] * 32)).devices
    assert (row.processes_complete, row.no_process_bytes) == (False, None)
    assert row.reasons == ["the driver lists 32 processes at most"]
    (row,) = looked(listed(processes=[(os.getpid(), 1)] * 31)).devices
    assert (row.processes_complete, row.no_process_bytes) == (True, 20 * GIB - 31)


def test_only_some_devices(looked: Callable[..., Who]) -> None:
    rows = [listed(device, []) for device in range(4)]
    assert [row.device for row in looked(*rows, only=(1, 3)).devices] == [1, 3]
    with pytest.raises(UsageError, match="the devices are 0-3"):
        looked(*rows, only=(1, 4, 7))


def test_a_process_left_behind_has_its_bytes_of_all_devices(
    looked: Callable[..., Who], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = replace(
        processes.HolderRow(os.getpid(), None, HERE), engine="vllm", role="Worker_TP0",
        left_behind=True,
    )  # fmt: skip
    other = replace(worker, pid=DEAD)
    monkeypatch.setattr(look_module, "left_behind", lambda: [worker, other])
    held = [(os.getpid(), 3 * GIB)]
    found = looked(listed(0, held), listed(1, held))
    assert [(row.pid, row.bytes) for row in found.left_behind] == [
        (os.getpid(), 6 * GIB),
        (DEAD, 0),
    ]
    # one of the lists is missing, or may lack processes
    for rows in (None, held * 32):
        found = looked(listed(0, held), listed(1, rows))
        assert found.left_behind[1].bytes is None
    # of the host's numbers none is that of a process here
    found = looked(listed(0, held), numbers=HOST_NUMBERS)
    assert [row.bytes for row in found.left_behind] == [None, None]


# --- the child process that reads the driver ------------------------------------------------------


def test_without_a_driver_the_message_says_what_to_do() -> None:
    if Path("/usr/local/dcmi/libdcmi.so").exists():
        pytest.skip("this machine has an NPU's driver")
    with pytest.raises(MemprofError, match=r"no libdcmi\.so here") as error:
        read_driver(Source("npu", {"PATH": os.environ["PATH"]}))
    assert "--device sim:910b" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.abort()", "status -6"),
        ("raise OSError('libdrv: version mismatch')", "libdrv: version mismatch"),
        ("import time; time.sleep(60)", "did not answer in 1 s"),
    ],
)
def test_a_driver_that_breaks_takes_nobody_with_it(
    code: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "driver.py"
    program.write_text(code)
    monkeypatch.setattr(look_module.driver_list, "__file__", str(program))
    monkeypatch.setattr(look_module, "_TIMEOUT_S", 1.0)
    with pytest.raises(MemprofError, match=message):
        read_driver(NPU)


# --- the wait -------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass by sleeping alone."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def waited(looks: list[Who], wanted: int, timeout_s: float) -> tuple[Who, list[Who]]:
    clock, left, said = Clock(), list(looks), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock)
        patch.setattr(time, "sleep", clock.sleep)
        found = wait_until_free(
            lambda: left.pop(0) if len(left) > 1 else left[0], wanted, timeout_s, said.append
        )
    return found, said


def held(*used: int) -> Who:
    rows = []
    for device, size in enumerate(used):
        row = device_row(listed(device, [], used=size * GIB), NPU, OWN_NUMBERS)
        rows.append(row)
    return Who("npu", False, OWN_NUMBERS, rows, [])


def test_it_waits_until_every_device_has_it() -> None:
    looks = [held(60, 60), held(4, 60), held(60, 4), held(4, 4)]
    found, said = waited(looks, 50 * GIB, 600)
    assert said == looks[:3]
    assert found.wait is not None
    assert (found.wait.met, found.wait.seconds, found.devices) == (True, 3.0, looks[3].devices)


def test_it_does_not_wait_where_it_is_free() -> None:
    found, said = waited([held(14)], 50 * GIB, 0)
    assert found.wait is not None
    assert (found.wait.met, found.wait.seconds, said) == (True, 0.0, [])


def test_a_byte_too_little_is_too_little() -> None:
    found, _ = waited([held(14)], 50 * GIB + 1, 2.5)
    assert found.wait is not None
    assert (found.wait.met, found.wait.seconds) == (False, 2.5)


def test_the_last_look_is_at_the_timeout() -> None:
    found, said = waited([held(60), held(60), held(60), held(4)], 50 * GIB, 2.5)
    assert found.wait is not None
    assert (found.wait.met, found.wait.seconds, len(said)) == (True, 2.5, 3)


def test_what_can_never_be_free_is_refused() -> None:
    with pytest.raises(UsageError, match=r"GiB in all: .* never are free"):
        waited([held(0)], 64 * GIB + 1, 600)


def test_what_is_not_known_is_not_waited_for() -> None:
    row = device_row(listed(used=None, reasons=("refused",)), NPU, OWN_NUMBERS)
    who = Who("npu", False, OWN_NUMBERS, [row], [])
    with pytest.raises(MemprofError, match="free of device 0 is not known: refused"):
        waited([who], GIB, 600)


def test_who_loads_nothing_heavy() -> None:
    code = (
        "import vllm_memprof.holders.look, sys\n"
        "print(' '.join(m for m in sys.modules if '.' not in m))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"pandas", "numpy", "torch", "vllm", "typer", "rich"}
