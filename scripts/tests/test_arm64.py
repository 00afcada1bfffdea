"""What of two reports is compared, and what a machine that cannot do it is told."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import pytest

from scripts import arm64
from vllm_memprof.report.files import report_json
from vllm_memprof.sources import read_report

DATA = Path(__file__).parents[2] / "tests/data"


@pytest.fixture(scope="module")
def report() -> dict:
    return json.loads("".join(report_json(read_report(str(DATA / "recorded_023_tp2")))))


def test_equal_reports_have_hundreds_of_values(report) -> None:
    count, lines, expected = arm64.differing(report, copy.deepcopy(report))
    assert (count > 500, lines, expected) == (True, [], [])


def test_a_byte_that_differs_is_named_and_host_memory_is_not_compared(report) -> None:
    other = copy.deepcopy(report)
    other["ranks"][1]["budget"]["kv_cache_bytes"] += 1
    other["ranks"][0]["phases"][0]["after"]["host_rss_bytes"] = 7
    other["ranks"][0]["seconds"] = 1.0
    del other["ranks"][0]["weights"]
    finding = {"id": "empty-cache-refilled", "label": "TP0", "bytes": 7}
    other["findings"].append(finding)
    _, lines, expected = arm64.differing(report, other)
    path = "findings[empty-cache-refilled,TP0].bytes: absent on x86-64, 7 on aarch64"
    assert expected == [f"{path} (a finding by the seconds of a call)"]
    bytes_of = report["ranks"][1]["budget"]["kv_cache_bytes"]
    told = f"budget.kv_cache_bytes: {bytes_of} on x86-64, {bytes_of + 1} on aarch64"
    assert len([line for line in lines if line.endswith(told)]) == 1
    assert not [line for line in lines if "host_rss" in line or "seconds" in line]
    gone = [line for line in lines if line.endswith("absent on aarch64")]
    assert len(gone) == len(lines) - 1
    assert all(".weights." in line for line in gone)


def test_what_a_machine_lacks(monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(arm64.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(arm64.shutil, "which", lambda name: None)
    assert [line.split(":")[0].split(",")[0] for line in arm64.needed()] == [
        "root", "x86-64", "Debian or one of its kind",
    ]  # fmt: skip


def test_a_step_that_fails_shows_its_last_lines(tmp_path: Path) -> None:
    job = arm64.Job(tmp_path, "stack", minutes=1)
    with pytest.raises(arm64.Failed, match=r"ended with status 3\n  no room\nall lines: "):
        job.run(sys.executable, "-c", "print('no room'); raise SystemExit(3)")
    job.end = 0.0
    with pytest.raises(arm64.Failed, match="--minutes are over"):
        job.run("sleep", "9")


def test_the_entry_of_the_kernel_is_a_rule_with_flag_f() -> None:
    name, kind, offset, magic, mask, qemu, flags = arm64.REGISTER.format("/q").split(":")[1:]
    assert (name, kind, offset, qemu, flags) == ("memprof-aarch64", "M", "", "/q", "F")
    header = magic.encode().decode("unicode_escape")
    assert (len(header), header[18:20]) == (20, "\xb7\x00")  # EM_AARCH64
    assert len(mask.encode().decode("unicode_escape")) == 20
