"""Memory files of other tools: real ones of a simulated device, and documented forms of the rest.

``snapshot.pickle`` and the csv of counters were written together by torch_npu 2.10 on a simulated
910B, and ``engine_0.23.0.pickle.gz`` after a request to vLLM-Ascend 0.23.0 there (Qwen3-0.6B,
graphs); both without their history, and with shorter paths. The csv of profilers and of msMemScope
are made by hand in the forms that their sources have.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.accounting.builders import DATA
from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.cli import app, main
from vllm_memprof.errors import RunRecordError
from vllm_memprof.logs.memory_files import TABLE, beside, form_of, plain_objects
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.loader import Run
from vllm_memprof.record.memory_files import FileRow
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.sources import build_runs, read_reports

FILES = DATA / "memory_files"
SNAPSHOT = FILES / "snapshot.pickle"
COUNTERS = FILES / "device_0_memUsageInfo_20261128144659.csv"
MODULES, RECORD = FILES / "npu_module_mem_20240101.csv", FILES / "memory_record.csv"
OPERATORS, MEMSCOPE = FILES / "operator_memory.csv", FILES / "memscope_dump_20240101000000.csv"
LOG = DATA / "logs" / "vllm-project__vllm-ascend-1617.log"
MIB, GIB = 1 << 20, 1 << 30


def one(path: Path) -> Run:
    (run,) = read_log(str(path))
    return run


def rows_of(run: Run, table: str) -> dict[str, FileRow]:
    (process,) = run.processes
    return {row.name: row for file in process.files for row in file.rows if row.table == table}


def read_of(run: Run) -> Snapshot:
    ((span,),) = (each.phases for each in run.processes)
    assert span.after is not None
    return span.after


# Snapshots of torch


def test_a_snapshot_adds_up_to_what_torch_says() -> None:
    """torch_npu printed 234881024 reserved and 163581952 allocated at the same moment."""
    run = one(SNAPSHOT)
    read = read_of(run)
    assert (read.reserved_bytes, read.allocated_bytes) == (234881024, 163581952)
    owners, free = rows_of(run, "owners"), rows_of(run, "free")
    assert sum(row.bytes or 0 for row in owners.values()) == read.reserved_bytes
    idle = owners["reserved_not_allocated"].bytes
    assert idle == sum(row.bytes or 0 for row in free.values())
    assert sum(row.bytes or 0 for row in rows_of(run, "segments").values()) == read.reserved_bytes
    assert read.graph_pool_bytes == rows_of(run, "segments")["private pool (1, 0)"].bytes
    assert read.npu_workspace_bytes is None  # no segment behind torch's own


def test_owners_are_by_frames() -> None:
    owners = rows_of(one(SNAPSHOT), "owners")
    weights, cache = owners["weights"], owners["kv_cache"]
    assert (weights.bytes, weights.count, weights.largest_bytes) == (4 * 16777728, 4, 16777728)
    assert (cache.bytes, cache.count) == (64 * MIB + 512, 1)
    assert owners["graph"].bytes == 3146240 + 2 * 512
    sites = rows_of(one(SNAPSHOT), "tensors")
    assert sites["snap.py:7 initialize_kv_cache"].bytes == cache.bytes


def test_free_memory_is_divided_by_what_can_use_it() -> None:
    free = rows_of(one(SNAPSHOT), "free")
    assert free["whole"].bytes == 23068672
    assert (free["private"].count, free["private"].bytes) == (1, 17825280)
    assert free["pieces"].largest_bytes == 5243392


def snapshot(*segments: dict[str, Any], **more: Any) -> bytes:
    return pickle.dumps({"segments": list(segments), **more}, 4)


def segment(address: int, size: int, frames: Any = (), **more: Any) -> dict[str, Any]:
    block = {"size": size, "state": "active_allocated", "frames": list(frames)}
    return {
        "device": 0, "address": address, "total_size": size, "stream": address,
        "segment_type": "large", "segment_pool_id": (0, 0), "blocks": [block], **more,
    }  # fmt: skip


def frame(name: str, path: str = "/x/vllm/worker.py") -> dict[str, Any]:
    return {"filename": path, "line": 7, "name": name}


def read_bytes(folder: Path, data: bytes, name: str = "given") -> Run:
    (folder / name).write_bytes(data)
    return one(folder / name)


def test_workspace_behind_torchs_own_segments_is_no_reserved_memory(tmp_path: Path) -> None:
    data = snapshot(segment(100, 20), segment(200, 40), segment(50, 7), segment(60, 8))
    read = read_of(read_bytes(tmp_path, data))
    assert (read.reserved_bytes, read.npu_workspace_bytes) == (60, 15)
    assert read.npu_workspace_streams == {"50": 7, "60": 8}


@pytest.mark.parametrize(
    ("frames", "owner"),
    [
        ([], "no_frames"),
        ([frame("forward"), frame("main")], "other_tensors"),
        ([frame("forward"), frame("profile_run"), frame("load_model")], "activation"),
        ([frame("empty"), frame("execute_model")], "activation"),
        ([frame("f", "/vllm/distributed/utils.py"), frame("load_model")], "communicator"),
        ([frame("f"), frame("capture_model"), frame("compile_or_warm_up_model")], "graph"),
        ([frame("init_memory_pool", "/sglang/srt/model_runner.py")], "kv_cache"),
    ],
)
def test_the_innermost_frame_that_names_an_owner_counts(
    tmp_path: Path, frames: list[dict[str, Any]], owner: str
) -> None:
    rows = rows_of(read_bytes(tmp_path, snapshot(segment(1, 512, frames))), "owners")
    assert {name for name, row in rows.items() if row.bytes} == {owner}


def test_devices_are_ranks(tmp_path: Path) -> None:
    run = read_bytes(tmp_path, snapshot(segment(9, 4), segment(2, 6, device=3)))
    report = build_report(run)
    assert [(rank.label, rank.device_index) for rank in report.ranks] == [
        ("device 0", 0),
        ("device 3", 3),
    ]


def test_the_history_is_not_read(tmp_path: Path) -> None:
    """Of a file that is cut in it all segments are there; most of a file is history."""
    data = snapshot(segment(1, 512), device_traces=[[{"action": "alloc"}] * 9])
    cut = data[: data.index(b"device_traces") + 20]
    assert read_of(read_bytes(tmp_path, cut)).reserved_bytes == 512
    packed = read_bytes(tmp_path, gzip.compress(data), "snapshot.pickle.gz")
    assert read_of(packed).reserved_bytes == 512


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_read_as_pickle_reads_it(protocol: int) -> None:
    data = {"a": [1, -2, 1 << 40, 1 << 200, 1.5, True, None], "b": (1,), "c": ({}, [], ()),
            "d": "é" * 300, "e": (1, 2, 3, 4), "f": list(range(3000))}  # fmt: skip
    data["g"] = data["a"]
    assert plain_objects(pickle.dumps(data, protocol), "x") == data


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/memprof-was-run",)


def deep(levels: int) -> bytes:
    return b"\x80\x04" + b"]" * levels + b"a" * (levels - 1) + b"."


HOSTILE = {
    "call": (pickle.dumps({"segments": [Evil()]}, 4), "asks for STACK_GLOBAL"),
    "global": (b"\x80\x02cos\nsystem\n.", "asks for GLOBAL os system"),
    "persistent": (b"\x80\x04Q.", "the pickle asks for BINPERSID|not a whole"),
    "deep": (deep(200_000), "not a whole torch snapshot"),
    "cut": (SNAPSHOT.read_bytes()[:900], "not a whole torch snapshot"),
    "two bytes": (b"\x80\x04", "not a whole torch snapshot"),
    "wrong shape": (pickle.dumps([1, 2], 4), "not a whole torch snapshot"),
    "no segments": (pickle.dumps({"segments": []}, 4), "no row about memory"),
    "a list of numbers": (pickle.dumps({"segments": [1]}, 4), "not a whole torch snapshot"),
    "text for a size": (snapshot(segment(1, 1) | {"total_size": "x"}), "not a whole"),
    "negative": (snapshot(segment(1, -4)), "-4 bytes"),
    "a mark alone": (b"\x80\x04(u.", "not a whole torch snapshot"),
    "appends to a dict": (b"\x80\x04}K\x01a.", "not a whole torch snapshot"),
    "long memo": (b"\x80\x04]r\xff\xff\xff\x7f.", "not a whole torch snapshot"),
    "more than it has": (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f", "not a whole"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, _ = HOSTILE[name]
    path = tmp_path / "evil.pickle"
    path.write_bytes(data)
    with pytest.raises(RunRecordError, match=HOSTILE[name][1]):
        read_log(str(path))
    assert main(["explain", str(path)]) == 3
    assert "Traceback" not in capsys.readouterr().err
    assert not Path("/tmp/memprof-was-run").exists()


#: A tuple of 60 levels, each of which has the one below it twice: 2**60 leaves, without an end to
#: who prints, compares or hashes it.
BOMB = b")\x94" + b"".join(b"h%ch%c\x86\x94" % (level, level) for level in range(60))


@pytest.mark.parametrize("key", ["filename", "line", "name", "stream", "segment_type"])
def test_what_would_be_printed_for_ever_is_refused(tmp_path: Path, key: str) -> None:
    mark = "to be replaced"
    held = segment(1, 4, [frame("f")])
    if key in held:
        held[key] = mark
    else:
        held["blocks"][0]["frames"][0][key] = mark
    # without a memo of its own: indexes of the bomb are its own
    data = pickle.dumps({"segments": [held]}, 4).replace(b"\x94", b"")
    data = data.replace(b"\x8c\x0e" + mark.encode(), BOMB)
    with pytest.raises(RunRecordError, match="tuple"):
        read_bytes(tmp_path, data)


def test_keys_are_texts(tmp_path: Path) -> None:
    with pytest.raises(RunRecordError, match="a tuple in place of str"):
        read_bytes(tmp_path, b"\x80\x04}" + BOMB + b"K\x01s.")


def test_a_pickle_of_too_many_objects_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMPROF_LIMITS", "objects=100")
    with pytest.raises(RunRecordError, match="more than 100 objects"):
        read_bytes(tmp_path, snapshot(*[segment(i, 4) for i in range(20)]))
    few = segment(1, 4) | {"blocks": [{"size": 1, "state": "inactive"}]}
    few["blocks"] *= 200
    with pytest.raises(RunRecordError, match="more than 100 objects"):
        read_bytes(tmp_path, snapshot(few))


def test_of_many_lines_of_code_the_rest_is_one_row(tmp_path: Path) -> None:
    """Owners are told apart nevertheless, also those that come last."""
    frames = [[frame(f"f{i}")] for i in range(1500)] + [[frame("load_model")]]
    data = snapshot(*(segment(i, 4, each) for i, each in enumerate(frames)))
    run = read_bytes(tmp_path, data)
    assert rows_of(run, "tensors")["others"].count == 501
    assert rows_of(run, "owners")["weights"].bytes == 4
    assert read_of(run).allocated_bytes == read_of(run).reserved_bytes == 4 * 1501


def test_an_empty_file_is_a_log_without_lines(tmp_path: Path) -> None:
    (tmp_path / "empty.pickle").write_bytes(b"")
    with pytest.raises(RunRecordError, match="it is empty"):
        read_log(str(tmp_path / "empty.pickle"))


def test_an_engines_weights_and_kv_cache_are_what_its_log_says(tmp_path: Path) -> None:
    """The log of the same run prints 1.1397 and 29.14 GiB; torch_npu had 32877051904 reserved."""
    lines = (
        "INFO 11-28 15:05:15 [model_runner_v1.py:3794] Loading model weights took 1.1397 GB\n"
        "INFO 11-28 15:05:42 [worker.py:593] Available KV cache memory: 29.14 GiB\n"
    )
    (tmp_path / "engine.log").write_text(lines)
    runs = [*read_log(str(tmp_path / "engine.log")), one(FILES / "engine_0.23.0.pickle.gz")]
    (rank,) = build_report(beside(runs)[-1]).ranks
    rows = {row.name: row for file in rank.files for row in file.rows if row.table == "owners"}
    assert f"{(rows['weights'].bytes or 0) / GIB:.4f}" == "1.1397"
    blocks = (rank.budget.engine_kv_cache_bytes or 0) - (rows["kv_cache"].bytes or 0)
    assert 0 <= blocks < 10 * MIB  # whole blocks, and the rounding of the log
    assert sum(row.bytes or 0 for row in rows.values()) == 32877051904
    assert rows["graph"].bytes
    assert "no_frames" not in rows


# Tables


def test_counters_of_torch_npu() -> None:
    modules = rows_of(one(COUNTERS), "modules")
    assert modules["APP"].bytes == modules["APP"].peak_bytes == 224 * MIB
    assert modules["RUNTIME"].bytes == round(28.0664 * MIB)
    assert build_report(one(COUNTERS)).ranks[0].device_index == 0


def test_modules_of_the_profiler_end_and_peak() -> None:
    modules = rows_of(one(MODULES), "modules")
    hccl = modules["HCCL"]
    assert (hccl.bytes, hccl.peak_bytes, hccl.peak_s) == (800 * MIB, 1000 * MIB, 1.5)
    assert "SLOG" not in modules  # -1: only releases were seen


def test_units_stand_in_the_heads(tmp_path: Path) -> None:
    in_mb = MODULES.read_text().replace("(KB)", "(MB)").encode()
    rows = rows_of(read_bytes(tmp_path, in_mb), "modules")
    assert rows["HCCL"].bytes == 819200 * MIB
    old = b"Component,Timestamp(us),Total Reserved(KB),Device\nHCCL,1,1024,NPU:2\n"
    run = read_bytes(tmp_path, old)
    assert rows_of(run, "modules")["HCCL"].bytes == MIB
    assert run.processes[0].identity.device_index == 2


def test_a_memory_record_is_a_snapshot_with_a_peak() -> None:
    run = one(RECORD)
    read, pools = read_of(run), rows_of(run, "pools")
    assert (read.reserved_bytes, read.allocated_bytes) == (9 * GIB, 6 * GIB)
    assert (read.reserved_peak_bytes, pools["PTA"].peak_s) == (10 * GIB, 1.0)
    assert (read.process_bytes, read.npu_workspace_bytes) == (12 * GIB, 128 * MIB)


def test_operators_by_their_largest_allocation() -> None:
    rows = rows_of(one(OPERATORS), "operators")
    empty = rows["aten::empty"]
    assert (empty.bytes, empty.largest_bytes, empty.count) == (GIB, GIB, 2)
    assert (rows["aten::mm"].bytes, rows["aten::mm"].largest_bytes) == (0, 256 * MIB)


def test_operators_of_msprof_have_a_duration(tmp_path: Path) -> None:
    data = (
        b"Device_id,Name,Size(KB),Allocation Time(us),Duration(us),Allocation Total Allocated(KB)\n"
        b"1,MatMul_1,2048,10.0,5.0,2048\n1,MatMul_2,1024,12.0,,3072\n"
    )
    run = read_bytes(tmp_path, data)
    rows = rows_of(run, "operators")
    assert (rows["MatMul_1"].bytes, rows["MatMul_2"].bytes) == (0, MIB)
    assert run.processes[0].identity.device_index == 1


@pytest.mark.parametrize("path", [SNAPSHOT, COUNTERS, MODULES, RECORD, OPERATORS, MEMSCOPE])
def test_every_kind_says_who_measured(path: Path) -> None:
    (process,) = one(path).processes
    assert {file.kind for file in process.files} <= {*TITLES["file_kinds"]}
    assert {row.table for file in process.files for row in file.rows} <= {*TITLES["file_tables"]}
    assert {*TABLE["kinds"]} == {*TITLES["file_kinds"]}


def test_msmemscope_csv_and_database(tmp_path: Path) -> None:
    run = one(MEMSCOPE)
    read, pools, live = read_of(run), rows_of(run, "pools"), rows_of(run, "live")
    assert (read.device_total_bytes, read.device_free_bytes) == (65452113920, 64822548890)
    assert (read.reserved_bytes, read.allocated_peak_bytes) == (20971520, 18875392)
    assert (pools["PTA"].bytes, pools["PTA"].allocated_bytes) == (20971520, 16777728)
    assert live["PTA: PTA@model@weight"].bytes == 16777728
    assert "PTA: PTA@ops@aten" not in live  # freed
    heads = ",".join(f'"{head}"' for head in MEMSCOPE.read_text().splitlines()[0].split(","))
    path = tmp_path / "memscope_dump.db"
    with closing(sqlite3.connect(path)) as base:
        base.execute(f"CREATE TABLE memscope_dump ({heads})")
        attr = {"allocation_id": "2", "size": "512", "total": "2048", "used": "512", "owner": "a"}
        row = (1, "MALLOC", "PTA", "N/A", 5 * 10**9, 1, 1, "0", "0x1", json.dumps(attr), "", "")
        base.execute(f"INSERT INTO memscope_dump VALUES ({','.join('?' * len(row))})", row)
        base.commit()
    stored = one(path)
    assert rows_of(stored, "pools")["PTA"].bytes == 2048
    assert rows_of(stored, "live")["PTA: a"].bytes == 512


@pytest.mark.parametrize(
    "data",
    [
        b"SQLite format 3\0" + b"\0" * 200,
        b"moduleName,curMemSize(MB),memPeakSize(MB)\n",
        b"moduleName,curMemSize(MB),memPeakSize(MB)\nAPP,nan,inf\nHCCL,,\n",
        b"moduleName,curMemSize(MB),memPeakSize(MB)\nAPP,1e300,1e300\n",
    ],
    ids=["database", "head", "not numbers", "too large"],
)
def test_a_file_without_figures_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(RunRecordError, match="given"):
        read_bytes(tmp_path, data)


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    run = read_bytes(tmp_path, RECORD.read_bytes()[:-20])
    assert read_of(run).reserved_bytes == 9 * GIB


def test_logs_are_no_memory_files() -> None:
    for path in (DATA / "logs").glob("*.log"):
        assert form_of(path.read_bytes()[:4096]) is None


# Beside a log or a run


def test_files_of_one_device_are_one_rank() -> None:
    (report,) = map(build_report, beside([one(SNAPSHOT), one(COUNTERS), one(MODULES)]))
    assert [file.kind for file in report.ranks[0].files] == [
        "torch_snapshot",
        "usage_info",
        "module_mem",
    ]


def test_a_file_stands_beside_the_figures_of_a_log() -> None:
    runs = beside([one(SNAPSHOT), *read_log(str(LOG))])
    report = build_report(runs[-1])
    assert report.run.source == "log"
    assert [file.name for rank in report.ranks for file in rank.files] == ["snapshot.pickle"]


def test_a_file_is_put_on_the_rank_of_its_device(tmp_path: Path) -> None:
    data = snapshot(segment(2, 6, device=3))
    (tmp_path / "s.pickle").write_bytes(data)
    report = build_runs([str(DATA / "recorded_tp2"), str(SNAPSHOT), str(COUNTERS)])
    assert [len(rank.files) for rank in report.ranks] == [2, 0]
    with pytest.raises(RunRecordError, match="device 3, and no rank"):
        build_runs([str(DATA / "recorded_tp2"), str(tmp_path / "s.pickle")])


def test_files_of_an_archive_are_read_beside_its_log(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in (MODULES, RECORD, LOG):
            archive.write(path, path.name)
    (run,) = read_log(str(tmp_path / "all.zip"))
    report = build_report(run)
    assert report.run.source == "log"
    files = [file.kind for rank in report.ranks for file in rank.files]
    assert sorted(files) == ["memory_record", "module_mem"]


def test_commands_take_files() -> None:
    def said(*args: object) -> str:
        done = CliRunner().invoke(app, [*map(str, args), "--section", "files"])
        assert done.exit_code == 0, done.output
        return done.output

    out = said("report", DATA / "recorded_tp1", SNAPSHOT)
    assert "Reserved memory by owner, snapshot.pickle, TP0" in out
    out = said("explain", MODULES, RECORD)
    assert "measured by the CANN profiler (msprof)" in out
    assert "Allocators, memory_record.csv, device 0" in out


def test_report_reads_a_file_alone() -> None:
    (report,) = read_reports(str(RECORD))
    assert report.run.source == "file"
    assert report.ranks[0].phases[0].after == read_of(one(RECORD))
