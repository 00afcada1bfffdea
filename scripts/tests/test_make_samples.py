"""The committed samples: one of each format of the table, and pictures of the sizes it says."""

from __future__ import annotations

import struct

import pytest

from scripts.make_samples import DATA, SAMPLES, SCREENSHOTS, TARGET, Sample, Screenshot
from vllm_memprof.sources import build_run


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.file)
def test_samples_are_of_their_runs(sample: Sample) -> None:
    text = (TARGET / sample.file).read_text(encoding="utf-8")
    report = build_run(DATA / sample.run)
    assert (report.run.id if sample.file.endswith(".csv") else report.run.model) in text.replace(
        "\\", ""
    )
    assert 1000 < len(text.encode()) < 6_000_000
    if sample.file.endswith(".html"):
        for rank in report.ranks:
            assert f"{rank.budget.engine_kv_cache_bytes:,}" in text


@pytest.mark.parametrize("shot", SCREENSHOTS, ids=lambda shot: shot.file)
def test_screenshots_have_their_size(shot: Screenshot) -> None:
    head = (TARGET / shot.file).read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (shot.width, shot.height)
