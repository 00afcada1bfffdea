"""Logs of vllm-ascend from 0.26 on: what its budget becomes before it is returned.

The lines are those that the releases print (worker.py, startup_plan.py); the numbers are chosen.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.accounting.test_logs import explained, rank_of
from vllm_memprof.accounting.equations import STARTUP_PLAN
from vllm_memprof.report.documents.report import report_document
from vllm_memprof.units import GIB

_READY = (
    "INFO 01-01 00:00:00 [worker.py:900] Free memory on device (60.61/60.96 GiB) on startup. Desired "
    "GPU memory utilization is (0.9, 54.86 GiB). Actual usage: 12.0 GiB for weights, 1.0 GiB for "
    "peak activation, 0.5 GiB for non-torch memory, 0.0 GiB for NPU graph memory."
)


def _start(release: str, *lines: str) -> list[str]:
    head = (
        f"Initializing a V1 LLM engine (v{release}) with config: model='m/m', max_seq_len=16384, "
    )
    return [
        f"INFO 01-01 00:00:00 [core.py:1] {head}",
        "INFO 01-01 00:00:00 [platform.py:1] platform plugin ascend is activated",
        *(f"INFO 01-01 00:00:00 {line}" for line in lines),
        _READY,
    ]


@pytest.mark.parametrize(
    ("release", "line", "granted", "stage"),
    [
        (
            "0.30.0",
            "[worker.py:733] Ascend per-layer KV layout scales the multi-group budget by 0.5000 "
            "(3145728 bytes/block over 6291456 total page bytes) so per-layer buffers fit within "
            "device memory.",
            20.68,
            "multi_group",
        ),
        (
            "0.26.0",
            "[worker.py:634] Layerwise KV cache reuse maps 61 layers onto 4 buffer assignments; "
            "scale logical KV budget by 15.250.",
            630.74,
            "layer_reuse",
        ),
    ],
)
def test_a_stage_closes_the_equation_of_a_log(
    tmp_path: Path, release: str, line: str, granted: float, stage: str
) -> None:
    said = f"[worker.py:642] Available KV cache memory: {granted:.2f} GiB"
    budget = rank_of(explained(tmp_path, *_start(release, line, said))).budget
    assert (budget.equation, budget.balanced) == ("E4", True)
    left = 54.86 - 13.5 - granted
    assert (budget.term(stage) or 0) / GIB == pytest.approx(left, abs=0.4)
    # without the line the release's equation does not close
    other = rank_of(explained(tmp_path, *_start(release, said))).budget
    assert other.balanced is not True


@pytest.mark.parametrize(
    ("release", "line"),
    [
        ("0.26.0", "Sparse KV offload is enabled, enlarge total available memory to 93.41 GiB"),
        (
            "0.30.0",
            "Sparse KV offload memory plan: npu_limit=5120 blocks, dram_limit=4096 blocks, "
            "workload_limit=9000 blocks, final=4096 blocks (dram limited), planner=93.41 GiB, "
            "host=52.05 GiB, device=41.36 GiB, alignment_reserve=0.24 GiB.",
        ),
    ],
)
def test_host_memory_is_no_memory_of_the_device(tmp_path: Path, release: str, line: str) -> None:
    """What is printed before it is the device's; the equation gives that."""
    said = "[worker.py:642] Available KV cache memory: 41.36 GiB"
    rank = rank_of(explained(tmp_path, *_start(release, said, f"[worker.py:534] {line}")))
    assert rank.budget.balanced is True
    assert (rank.budget.engine_kv_cache_bytes or 0) / GIB == pytest.approx(41.36, abs=0.01)
    assert rank.figures["kv_planner_bytes"] == pytest.approx(93.41 * GIB, abs=GIB / 100)


def test_a_start_up_plan_is_said(tmp_path: Path) -> None:
    report = explained(
        tmp_path,
        *_start(
            "0.30.0",
            "[model_runner_v1.py:4490] Loading model weights took 12.0000 GB",
            "[startup_plan.py:157] Applying persisted startup plan (fingerprint 0123456789abcdef): "
            "kv_cache_memory_bytes=41803055104 (38.93 GiB), recorded free-memory baseline 60.61 "
            "GiB, current 60.61 GiB. Memory profiling will be skipped.",
            "[worker.py:578] Initial free memory 60.61 GiB, reserved 38.93 GiB for KV Cache as "
            "specified by kv_cache_memory_bytes, skipping memory profiling.",
        )[:-1],
    )
    budget = rank_of(report).budget
    assert (budget.override, budget.kv_cache_bytes) == (STARTUP_PLAN, 41803055104)
    notes = [note for section in report_document(report, 100).sections for note in section.notes]
    said = "profiling was skipped; NOT MEASURED: peak activation, non-torch increase"
    assert [note for note in notes if note.endswith(said)]
