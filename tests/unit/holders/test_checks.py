"""Rows of ``memprof doctor --device``."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.report.test_who import NPU, WORKER
from vllm_memprof.holders.checks import holder_checks
from vllm_memprof.launch.doctor import GOOD, INFO, WARNING


def test_devices_that_are_held_and_those_that_are_not() -> None:
    rows = holder_checks(NPU)
    assert [(row.name, row.state) for row in rows] == [
        ("device 0", INFO),
        ("device 4", INFO),
        ("devices", GOOD),
        ("left behind", WARNING),
    ]
    assert rows[0].found == (
        "14.38 GiB of 64.00 GiB free; 4321 (Worker_TP0) 30.00 GiB, 77 (/opt/python) 12.00 GiB, "
        "99 (ended) 4.00 GiB"
    )
    assert rows[1].found == "unknown of unknown free; refused"
    assert rows[2].found == "no process holds memory of 1, 2, 3"
    assert "process 4321, holds 30.00 GiB: its parent, 4300, has ended" in rows[3].found


def test_a_process_left_behind_that_no_list_names() -> None:
    (*_, last) = holder_checks(replace(NPU, left_behind=[replace(WORKER, bytes=None)]))
    assert "holds unknown" in last.found
