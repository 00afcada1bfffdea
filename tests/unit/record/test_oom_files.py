"""torch_npu's csv of an OOM: found by the launcher, kept in the run folder, read by the loader."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.unit.accounting.builders import process, run_of, snapshot, span
from vllm_memprof.accounting import build_report
from vllm_memprof.record import oom_files
from vllm_memprof.record.loader import load_run
from vllm_memprof.record.schema import RUN_SCHEMA

#: As torch_npu 2.10.0.post4 wrote it on the simulated device.
CSV = "moduleName,curMemSize(MB),memPeakSize(MB)\nAPP,50126.0000,62046.0000\nRUNTIME,26.0664,26.0664\n"
NAME = "device_0_memUsageInfo_20260105080000.csv"
MIB = 1 << 20


def test_figures_are_mebibytes_with_four_digits() -> None:
    found = oom_files.parse(CSV)
    assert found["APP"] == {"bytes": 50_126 * MIB, "peak_bytes": 62_046 * MIB}
    assert abs(found["RUNTIME"]["bytes"] - 27_332_608) <= 53
    assert oom_files.parse("moduleName,cur\nAPP,torn") == {}


def test_only_files_of_this_run_are_kept_and_only_when_asked_for(tmp_path: Path) -> None:
    there, run_dir = tmp_path / "there", tmp_path / "run"
    there.mkdir()
    run_dir.mkdir()
    (there / NAME).write_text(CSV)
    (there / "device_1_memUsageInfo_20200101000000.csv").write_text(CSV)
    os.utime(there / "device_1_memUsageInfo_20200101000000.csv", (1000, 1000))
    env = {"OOM_SNAPSHOT_PATH": str(there)}
    assert oom_files.keep(env, 2000, run_dir) == []
    assert oom_files.keep({**env, "OOM_SNAPSHOT_ENABLE": "0"}, 2000, run_dir) == []
    assert oom_files.keep({**env, "OOM_SNAPSHOT_ENABLE": "2"}, 2000, run_dir) == [NAME]
    assert set(oom_files.load(run_dir)) == {0}


def test_a_run_folder_has_them_by_device(tmp_path: Path) -> None:
    info = {
        "schema": RUN_SCHEMA,
        "id": "r",
        "mode": "offline",
        "model": "m",
        "command": ["memprof"],
        "status": "oom",
    }
    (tmp_path / "run.json").write_text(json.dumps(info))
    (tmp_path / "oom").mkdir()
    (tmp_path / "oom" / NAME).write_text(CSV)
    (tmp_path / "oom" / "device_0_memUsageInfo_20260105080001.csv").write_text(
        CSV.replace("APP,50126", "APP,50128")
    )
    (tmp_path / "oom" / "notes.csv").write_text(CSV)
    assert load_run(tmp_path).oom_counters[0]["APP"]["bytes"] == 50_128 * MIB


def test_the_report_takes_the_reading_at_the_oom_and_else_the_file() -> None:
    csv = {1: {"APP": {"bytes": 5, "peak_bytes": 6}}}
    read = {"APP": {"bytes": 7, "peak_bytes": 8}}

    def components(own: dict[str, dict[str, int]] | None, device: int) -> object:
        at = snapshot(reserved_bytes=4, components=own)  # type: ignore[arg-type]
        run = run_of(process([span("oom", None, at)], device_index=device))
        run.oom_counters.update(csv)
        oom = build_report(run).ranks[0].oom
        assert oom is not None
        return oom.components

    assert components(read, 1) == read
    assert components(None, 1) == csv[1]
    assert components(None, 0) is None
