"""Rows of ``memprof doctor --device``."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.report.test_who import NPU, WORKER
from vllm_memprof.holders.document import holder_checks
from vllm_memprof.launch.doctor import INFO, WARNING


def test_devices_and_what_is_left_behind() -> None:
    rows = holder_checks(NPU)
    assert [(row.name, row.state) for row in rows] == [
        *((f"device {number}", INFO) for number in range(5)),
        ("left behind", WARNING),
    ]
    assert rows[0].found == (
        "14.38 of 64.00 GiB are free; in use by 4321 (vllm Worker_TP0) 30.00 GiB, "
        "77 (python) 12.00 GiB, 99 (ended) 4.00 GiB"
    )
    assert rows[1].found == "60.38 of 64.00 GiB are free; in use by no process that is listed"
    assert rows[4].found.startswith("- of - GiB are free; ")
    assert rows[4].found.endswith("; refused")
    assert rows[5].found == "4321 (vllm Worker_TP0) 30.00 GiB: its parent, 4300, has ended"
    assert rows[5].todo == "kill 4321, if nobody needs it"


def test_a_process_left_behind_that_no_list_names() -> None:
    (*_, last) = holder_checks(replace(NPU, left_behind=[replace(WORKER, bytes=None)]))
    assert "(vllm Worker_TP0) - GiB" in last.found
