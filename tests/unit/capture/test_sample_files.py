"""The files of samples stay within their bound, and what is dropped is thinned, not lost."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_memprof.capture import sample_files
from vllm_memprof.capture.sample_files import SampleFiles
from vllm_memprof.capture.writer import EventWriter
from vllm_memprof.record import schema
from vllm_memprof.record.samples import load_samples

BOUND = 64 << 20


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.jsonl"))


def only_process(folder: Path) -> str:
    [process] = (folder / schema.SAMPLES_DIR).iterdir()
    return process.name


def test_the_bounds_of_a_process_add_up_to_64_mib() -> None:
    total = schema.EVENTS_BYTES + sum(schema.LEVEL_BYTES) + schema.REQUESTS_BYTES
    assert total <= BOUND


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """A thousandth of the bound, so that a week of lines takes a thousandth of its time."""
    levels = tuple(size // 1000 for size in schema.LEVEL_BYTES)
    monkeypatch.setattr(sample_files, "LEVEL_BYTES", levels)
    monkeypatch.setattr(sample_files, "REQUESTS_BYTES", schema.REQUESTS_BYTES // 1000)
    return sum(levels) + schema.REQUESTS_BYTES // 1000


def test_a_long_run_stays_within_the_bound_and_keeps_lowest_and_highest(
    tmp_path: Path, small: int
) -> None:
    """A thousandth of a week at 100 steps a second, in files of a thousandth of the size."""
    steps = 7 * 24 * 3600 * 100 // 1000
    files = SampleFiles(tmp_path, EventWriter(tmp_path), list)
    most = 0
    for step in range(1, steps + 1):
        figures: dict[str, int | None] = {
            "allocated_bytes": 1000 + step % 7,
            "reserved_bytes": 10**9,
        }
        if step == 777:
            figures["allocated_bytes"] = 10**9
        if step == 1234:
            figures["allocated_bytes"] = 5
        files.sample("sample", step, step, 1, figures)
        if step % 1000 == 0:
            most = max(most, bytes_below(tmp_path))
    assert 0.5 * schema.LEVEL_BYTES[0] / 1000 < most <= small

    samples = load_samples(tmp_path, only_process(tmp_path)).samples
    assert max(each.high["allocated_bytes"] or 0 for each in samples) == 10**9
    assert min(each.low["allocated_bytes"] or 0 for each in samples) == 5
    assert samples[-1].folded == 1
    assert samples[-1].t_ns == steps
    assert any(each.folded > schema.FOLD for each in samples)
    times = [(each.since_ns, each.t_ns) for each in samples]
    assert times == sorted(times)
    for (_, end), (begin, _) in itertools.pairwise(times):
        assert end < begin, "a time that two samples tell of"


def test_every_step_is_in_one_sample_while_the_highest_level_lasts(
    tmp_path: Path, small: int
) -> None:
    steps = 20_000
    files = SampleFiles(tmp_path, EventWriter(tmp_path), list)
    for step in range(1, steps + 1):
        files.sample("kv_sample", step, step, 1, {"running": step % 3})
    samples = load_samples(tmp_path, only_process(tmp_path)).kv_samples
    covered = sum(each.t_ns - each.since_ns + 1 for each in samples)
    assert covered == steps
    assert sum(each.folded for each in samples) == covered


def memory_line(number: int, peak: int) -> dict[str, Any]:
    return {"t_ns": number, "id": f"r{number}", "end_ns": number, "allocated_peak_bytes": peak}


def test_the_largest_requests_outlive_their_file(tmp_path: Path, small: int) -> None:
    large = memory_line(1, 10**9)
    files = SampleFiles(tmp_path, EventWriter(tmp_path), lambda: [large])
    files.event("request_memory", large)
    for number in range(2, 2000):
        files.event("request_memory", memory_line(number, 5))
    served = load_samples(tmp_path, only_process(tmp_path))
    names = [each.id for each in served.request_memory]
    assert names[0] == "r1"
    assert names[-1] == "r1999"
    assert len(names) == len(set(names))
    assert served.dropped == {"request_memory": 1999 - len(names)}


def test_a_disk_that_refuses_ends_the_samples_and_not_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / schema.SAMPLES_DIR).write_text("in the way")
    writer = EventWriter(tmp_path)
    files = SampleFiles(tmp_path, writer, list)
    files.sample("sample", 1, 1, 1, {})
    files.event("stage", {})
    assert capsys.readouterr().err.count("records nothing until it can") == 1
    assert writer.loss is not None


def test_a_sample_is_json_with_null_for_what_is_unknown(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, EventWriter(tmp_path), list)
    files.sample("device_sample", 5, None, 0, {"host_rss_bytes": None, "reserved_bytes": 3})
    [path] = tmp_path.rglob("*.jsonl")
    assert json.loads(path.read_text()) == {
        "kind": "device_sample",
        "t_ns": 5,
        "step": None,
        "steps": 0,
        "host_rss_bytes": None,
        "reserved_bytes": 3,
    }
