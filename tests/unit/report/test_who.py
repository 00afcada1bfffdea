"""Who holds the devices, as a table in two widths and languages, and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from tests.support.render import printed
from tests.unit.report.test_schemas import problems, schema_of
from tests.unit.test_docs import lacking
from vllm_memprof.holders.document import waiting_lines, who_document
from vllm_memprof.holders.rows import (
    ELSEWHERE,
    ENDED,
    HERE,
    HOST_NUMBERS,
    OWN_NUMBERS,
    DeviceRow,
    HolderRow,
    WaitRow,
    Who,
)
from vllm_memprof.record.codec import from_json
from vllm_memprof.report.json_text import render_result_json
from vllm_memprof.report.markdown import render_markdown
from vllm_memprof.report.table import render_table

GIB = 1 << 30


def device(number: int, *rows: HolderRow, used: int | None = 0, **more: object) -> DeviceRow:
    held = sum(row.bytes or 0 for row in rows if row.where != ENDED)
    total = None if used is None else 64 * GIB
    row = DeviceRow(
        device=number, card=number, chip=0, total_bytes=total, used_bytes=used,
        free_bytes=None if used is None else 64 * GIB - used, step_bytes=1 << 20,
        processes=list(rows), processes_complete=True, held_bytes=held,
        no_process_bytes=None if used is None else used - held,
    )  # fmt: skip
    return replace(row, **more)  # type: ignore[arg-type]


WORKER = HolderRow(
    4321, 30 * GIB, HERE, "ops", ["VLLM::Worker_TP0"], "2026-01-02T03:04:05+00:00", 1, "vllm",
    "Worker_TP0", "/runs/a", True, "its parent, 4300, has ended",
)  # fmt: skip
TRAINING = HolderRow(
    77, 12 * GIB, HERE, "kim", ["/opt/python", "train.py"], "2026-01-01T00:00:00+00:00", 1
)
GONE = HolderRow(99, 4 * GIB, ENDED, why="the driver lists it, and no such process lives")
BASE = 3 * GIB + 5 * (GIB >> 3)
NPU = Who(
    "npu",
    False,
    OWN_NUMBERS,
    [
        device(0, WORKER, TRAINING, GONE, used=46 * GIB + BASE),
        *(device(number, used=BASE) for number in (1, 2, 3)),
        device(4, used=None, processes=None, held_bytes=None, reasons=["refused"]),
    ],
    [WORKER],
)


def table(who: Who, width: int, lang: str = "en") -> str:
    return printed(render_table(partial(who_document, who), lang=lang), width)


def test_the_table_at_120() -> None:
    assert (
        table(NPU, 120)
        == """\
device  npu

Devices

                                                        Used by  No process,
 Device  Total, GiB  Used, GiB  Free, GiB  Processes  them, GiB          GiB
 ───────────────────────────────────────────────────────────────────────────
      0       64.00      49.62      14.38          3      42.00         7.62
    1-3       64.00       3.62      60.38          0       0.00         3.62
      4           -          -          -          -          -            -

  no process: used - what living processes use. What the driver and the device use for themselves is in it; no driver
  tells how much that is
  device 4: refused

Processes

 Device   PID    GiB  User  Started, UTC               Process          State
 ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
      0  4321  30.00  ops   2026-01-02T03:04:05+00:00  vllm Worker_TP0  left behind: its parent, 4300, has ended
      0    77  12.00  kim   2026-01-01T00:00:00+00:00  python train.py
      0    99   4.00  -     -                          -                ended: the driver lists it, and no such process
                                                                        lives

  memprof ends none of them; kill PID asks one to end, kill -9 PID ends it
  recorded by memprof in /runs/a

note  engine processes left behind: 1, which use 30.00 GiB
"""
    )


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_nothing_is_lost_in_80_columns(lang: str) -> None:
    shown = table(NPU, 80, lang)
    assert max(map(len, shown.splitlines())) <= 80
    for word in ("4321", "30.00", "vllm Worker_TP0", "python train.py", "99", "49.62", "7.62"):
        assert word in shown
    assert "1-3" in shown  # devices that are alike share a row


def test_in_chinese() -> None:
    shown = table(NPU, 120, "zh")
    for word in ("遗留的引擎进程", "不属于", "已结束", "left behind"):
        assert (word in shown) == (word != "left behind")
    line = "等待设备 0 上的 50.00 GiB"
    from vllm_memprof.report.language import language

    assert language("zh")(waiting_lines(NPU, 50 * GIB)[0]).startswith(line)


def test_numbers_of_the_host_are_explained() -> None:
    row = HolderRow(4321, GIB, ELSEWHERE, why="it is not looked up here")
    shown = table(Who("npu", False, HOST_NUMBERS, [device(0, row, used=2 * GIB)], []), 120)
    assert "not looked up" not in shown
    assert "--pid=host" in shown
    assert "not visible here" in shown


def test_a_simulated_device_is_marked() -> None:
    rows = [device(0, TRAINING, used=12 * GIB, no_process_bytes=None, step_bytes=None)]
    shown = table(Who("sim:ascend910b", True, OWN_NUMBERS, rows, []), 120)
    assert "Used, GiB (m)" in shown
    assert "set by" not in shown
    assert "--share-device" in shown


def test_what_is_waited_for() -> None:
    busy = replace(NPU, devices=NPU.devices[:4])
    assert waiting_lines(busy, 50 * GIB) == [
        "waiting for 50.00 GiB on device 0: 14.38 of 64.00 GiB are free; in use by "
        "4321 (vllm Worker_TP0) 30.00 GiB, 77 (python) 12.00 GiB, 99 (ended) 4.00 GiB"
    ]
    base = waiting_lines(replace(NPU, devices=NPU.devices[1:2]), 61 * GIB)
    assert base == [
        "waiting for 61.00 GiB on device 1: 60.38 of 64.00 GiB are free; "
        "in use by no process that is listed"
    ]
    assert waiting_lines(busy, 14 * GIB) == []
    for met, words in ((True, "are free on every"), (False, "are not free on every")):
        waited = replace(NPU, wait=WaitRow(50 * GIB, 900.0, 12.3, met))
        assert f"50.00 GiB {words} device" in table(waited, 120)


def test_json_obeys_its_schema_and_can_be_read_back() -> None:
    waited = replace(NPU, wait=WaitRow(50 * GIB, 900.0, 12.3, True))
    data = json.loads(render_result_json(waited))
    assert data["schema"] == "memprof.who/1"
    assert data["devices"][4]["free_bytes"] is None
    assert list(problems(schema_of("who"), data)) == []
    assert from_json(Who, data) == waited
    data["devices"][0]["processes"][0]["where"] = "somewhere"
    assert len(list(problems(schema_of("who"), data))) == 1


def test_markdown() -> None:
    shown = render_markdown(partial(who_document, NPU))
    assert "| **0** | **4321** | **30.00** |" in shown
    assert "engine processes left behind: 1, which use 30.00 GiB" in shown
    assert "its parent, 4300, has ended" in shown


@pytest.mark.parametrize("width", [80, 120])
def test_every_heading_has_an_entry_in_the_glossary(width: int) -> None:
    assert list(lacking(who_document(NPU, width), "Who")) == []
