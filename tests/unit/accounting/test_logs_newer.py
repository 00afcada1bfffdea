"""Logs of vllm-ascend from 0.26 on: what its budget becomes before it is returned.

The lines are those that the releases print (worker.py, startup_plan.py); the numbers are chosen.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.accounting.test_logs import explained, ids, rank_of
from vllm_memprof.accounting.budget.equations import STARTUP_PLAN
from vllm_memprof.report.documents.report import report_document
from vllm_memprof.units import GIB

#: What vllm-ascend 0.21 and 0.22 print of one rank. (vllm-project/vllm-ascend#10700)
_ESTIMATED = (
    "INFO 06-24 10:01:30 [gpu_model_runner.py:6806] Estimated CUDA graph memory: 0.59 GiB total",
    "INFO 06-24 10:01:36 [worker.py:428] [vllm-ascend] - Available KV cache memory: 21.26 GiB",
    "INFO 06-24 10:01:36 [worker.py:437] [vllm-ascend] - ACL graph memory profiling is enabled (default "
    "since v0.21.0). The current --gpu-memory-utilization=0.9200 is equivalent to "
    "--gpu-memory-utilization=0.9103 without ACL graph memory profiling.",
    "INFO 06-24 10:02:13 [gpu_model_runner.py:6243] Graph capturing finished in 34 secs, took 0.44 GiB",
    "INFO 06-24 10:02:13 [worker.py:589] [vllm-ascend] - ACL graph pool memory: 0.44 GiB (actual), "
    "0.59 GiB (estimated), difference: 0.15 GiB (33.0%).",
    "INFO 06-24 10:02:13 [worker.py:634] [vllm-ascend] - Free memory on device (60.6/60.96 GiB) on "
    "startup. Desired GPU memory utilization is (0.92, 56.08 GiB). Actual usage: 30.16 GiB for weights, "
    "2.0 GiB for peak activation, 2.07 GiB for non-torch memory, 0.44 GiB for NPU graph memory. Replace "
    "gpu_memory_utilization with `--kv-cache-memory=22827512422` (21.26 GiB) to fit into requested "
    "memory, or `--kv-cache-memory=27679779840` (25.78 GiB) to fully utilize NPU free memory. Current "
    "KV cache memory: 21.26 GiB.",
)
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


@pytest.mark.parametrize(
    ("line", "left"),
    [
        (
            "Memory profiling results: total_gpu_memory=139.80GiB initial_memory_usage=2.71GiB "
            "peak_torch_memory=2.38GiB memory_usage_post_profile=2.81Gib non_torch_memory=0.73GiB "
            "kv_cache_size=122.71GiB gpu_memory_utilization=0.90",
            122.71,
        ),
        (
            "Memory profiling results: total_gpu_memory=47.54GiB initial_memory_usage=18.60GiB "
            "peak_torch_memory=19.60GiB memory_usage_post_profile=18.62GiB non_torch_memory=0.44GiB "
            "kv_cache_size=22.74GiB gpu_memory_utilization=0.90",
            22.74,
        ),
    ],
)
def test_the_line_of_vllm_0_6_4(tmp_path: Path, line: str, left: float) -> None:
    """One line has all of them: total x utilization - peak - what is in use beside torch."""
    report = explained(
        tmp_path,
        "INFO 12-06 11:39:34 model_runner.py:1077] Loading model weights took 2.0512 GB",
        f"INFO 12-06 11:39:36 worker.py:232] {line}",
        "INFO 12-06 11:39:36 gpu_executor.py:113] # GPU blocks: 1207, # CPU blocks: 1365",
        "INFO 12-06 11:40:01 model_runner.py:1518] Graph capturing finished in 21 secs, took 0.54 GiB",
    )
    rank = rank_of(report)
    assert (rank.budget.equation, rank.budget.balanced) == ("E0a", True)
    assert (rank.budget.engine_kv_cache_bytes or 0) / GIB == pytest.approx(left, abs=0.001)
    assert "equation-unbalanced" not in ids(report)


@pytest.mark.parametrize("lines", [_ESTIMATED, _ESTIMATED[3:]], ids=["whole", "as pasted"])
def test_the_estimate_of_the_graphs_is_subtracted(tmp_path: Path, lines: tuple[str, ...]) -> None:
    """One start, whose books balance: 56.08 - 30.16 - 2.0 - 2.07 - 0.59 = 21.26."""
    report = explained(tmp_path, *(f"(Worker_TP0 pid=1115) {line}" for line in lines))
    budget = rank_of(report).budget
    assert report.run.engine == "vllm-ascend"
    assert (budget.equation, budget.balanced, budget.residual_bytes) == ("E4", True, 0)
    assert (budget.term("graph_estimate") or 0) / GIB == pytest.approx(0.59, abs=0.01)
    # the graphs are smaller than their estimate: nothing is left out
    assert not {"graph-not-charged", "equation-unbalanced"} & ids(report)


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
