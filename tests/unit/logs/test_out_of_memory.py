"""Logs that end in an OOM or a refusal: what each form of the message is told as.

The lines are written by hand in the engines' formats; figures as the comments derive them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.logs.conftest import explain
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.model import Finding, Report
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.units import GIB, MIB

INIT = (
    "(EngineCore_DP0 pid=20) INFO 01-01 00:00:00 [core.py:58] Initializing a V1 LLM engine (v{version}) "
    "with config: model='Qwen/Qwen3-8B', tensor_parallel_size=2, pipeline_parallel_size=1, \n"
)
CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 148.00 MiB. GPU 1 has a total capacity of "
    "23.65 GiB of which 11.00 MiB is free. {process}Of the allocated memory 19.80 GiB is allocated by PyTorch, "
    "with 120.00 MiB allocated in private pools (e.g., CUDA Graphs), and 350.10 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.\n"
)
PROCESS = "Including non-PyTorch memory, this process has 21.40 GiB memory in use. "
NPU = (
    "RuntimeError: NPU out of memory. Tried to allocate 4.50 GiB (NPU 0; 60.96 GiB total capacity; 52.87 GiB already "
    "allocated; 52.87 GiB current active; 2.77 GiB free; 54.00 GiB reserved in total by PyTorch)\n"
)
WORKSPACE = (
    "NPU out of memory. NPUWorkspaceAllocator tried to allocate 180.00 MiB(NPU 1; 60.96 GiB total capacity; "
    "86.81 MiB free). If you want to reduce memory usage, take a try to set TASK_QUEUE_ENABLE=1.\n"
)
RUNTIME = (
    "[Error]: Failed to apply for memory.\nEL0004: [PID: 316198] Failed to allocate memory.\n"
    "        Failed to allocate resource[DeviceMemory] with info [size:2147483648]. Reason: Memory resources are "
    "exhausted.\n"
)
BY_HAND = "total_memory: 60.96 G\ntorch_memory: 59.38 G\ntorch_memory_peak: 54.77 G\nnon_torch_memory: 1.15 G\n"


def report_of(text: str) -> Report:
    (run,) = explain(text)
    return build_report(run)


def only(report: Report, name: str) -> Finding:
    (found,) = (finding for finding in report.findings if finding.id == name)
    return found


def frames(*names: str) -> str:
    head = "(Worker_TP1 pid=31) ERROR 01-01 [multiproc_executor.py:671] "
    lines = [f'  File "/x/vllm/v1/worker/gpu_worker.py", line 350, in {name}' for name in names]
    return "".join(f"{head}{line}\n" for line in ("Traceback (most recent call last):", *lines))


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        (CUDA.format(process=PROCESS), 148 * MIB),
        (CUDA.format(process=""), 148 * MIB),
        (NPU, round(4.5 * GIB)),
        (WORKSPACE, 180 * MIB),
        (RUNTIME, 2 * GIB),
        (BY_HAND, None),
    ],
)
def test_no_form_of_an_oom_is_without_a_finding(message: str, asked: int | None) -> None:
    report = report_of(message)
    found = only(report, "out-of-memory")
    oom = report.ranks[0].oom
    assert oom is not None
    assert oom.requested_bytes == asked
    assert (report.run.status, found.severity) == ("oom", "error")
    assert found.evidence
    assert found.action
    assert "the phase is not known" in found.evidence


def test_what_the_process_held_is_divided_from_the_others() -> None:
    """23.65 - 0.011 - 21.40 = 2.24 GiB of others; 21.40 - (19.80 + 0.342) = 1.26 outside torch."""
    report = report_of(CUDA.format(process=PROCESS))
    oom = report.ranks[0].oom
    assert oom is not None
    assert oom.process_bytes == round(21.40 * GIB)
    sizes = (oom.process_non_torch_bytes, oom.other_processes_bytes, oom.graph_pools_bytes)
    assert [round((size or 0) / GIB, 2) for size in sizes] == [1.26, 2.24, 0.12]
    evidence = only(report, "out-of-memory").evidence
    assert "outside torch in this process 1.26 GiB; other processes 2.24 GiB" in evidence
    assert "outside this process's allocator" not in evidence
    bare = report_of(CUDA.format(process="")).ranks[0].oom
    assert bare is not None
    assert bare.other_processes_bytes is bare.process_non_torch_bytes is None


def test_most_of_the_device_in_other_processes_is_what_has_to_go() -> None:
    text = CUDA.format(process=PROCESS).replace("21.40 GiB", "5.40 GiB").replace("19.80", "4.00")
    found = only(report_of(text), "out-of-memory")
    assert "the largest: other processes, 18.24 GiB" in found.evidence
    assert found.action == "stop other processes on device 1 or use a different one gives 18.24 GiB"


def test_the_traceback_names_the_phase_and_the_grant_what_gives_way() -> None:
    """148 - 11 MiB are missing, and 0.01 MiB more by the rounding of both figures."""
    worker = "(Worker_TP1 pid=31) "
    text = (
        INIT.format(version="0.11.0")
        + f"{worker}INFO 01-01 [gpu_model_runner.py:2653] Model loading took 7.6189 GiB and 3.65 seconds\n"
        + f"{worker}INFO 01-01 [gpu_worker.py:298] Available KV cache memory: 10.50 GiB\n"
        + frames("compile_or_warm_up_model", "capture_model", "_dummy_run")
        + f"{worker}ERROR 01-01 [x.py:671] {CUDA.format(process=PROCESS)}"
    )
    report = report_of(text)
    found = only(report, "out-of-memory")
    assert (found.label, found.title) == ("TP1", "The device ran out of memory in graph_capture")
    assert found.bytes == 137 * MIB
    assert "the largest: KV cache, 10.50 GiB" in found.evidence
    half = 5_368_710  # of 10.50
    needed = 137 * MIB + 2 * 5243
    assert (
        f"--kv-cache-memory-bytes {round(10.5 * GIB) - half - needed} gives at least 0.1338"
        in found.action
    )
    assert "--gpu-memory-utilization lower by 0.01 gives 0.2365 GiB" in found.action
    assert "--enforce-eager" in found.action


@pytest.mark.parametrize(
    ("named", "phase", "flag"),
    [
        (("load_model",), "weight_load", "--quantization"),
        (
            ("determine_available_memory", "profile_run", "_dummy_run"),
            "profile_run",
            "--max-num-seqs",
        ),
        (
            ("determine_num_available_blocks", "profile_run", "execute_model"),
            "profile_run",
            "--max-num-seqs",
        ),
        (("initialize_from_config", "initialize_kv_cache"), "kv_cache_alloc", ""),
        (("execute_model", "forward"), "request", "--gpu-memory-utilization"),
    ],
)
def test_phases_by_traceback(named: tuple[str, ...], phase: str, flag: str) -> None:
    found = only(
        report_of(frames(*named) + f"(Worker_TP1 pid=31) ERROR [x.py:1] {CUDA.format(process='')}"),
        "out-of-memory",
    )
    assert found.title == f"The device ran out of memory in {phase}"
    assert flag in found.action
    if phase in ("weight_load", "profile_run"):
        assert "--gpu-memory-utilization" not in found.action


def test_a_traceback_of_another_process_names_no_phase() -> None:
    text = frames("load_model") + f"(Worker_TP0 pid=30) ERROR [x.py:1] {CUDA.format(process='')}"
    assert only(report_of(text), "out-of-memory").title == "The device ran out of memory"


def test_lines_before_the_message_tell_how_far_the_start_got() -> None:
    text = "INFO [worker.py:1] Available KV cache memory: 20.00 GiB\n" + NPU
    found = only(report_of(text), "out-of-memory")
    assert "the phase is not known; before the message: the KV cache is sized" in found.evidence


def test_an_argument_gives_what_is_missing_and_the_rounding_of_the_log() -> None:
    """4.50 - 2.77 = 1.73 GiB, each to 0.005, is 0.0286 of 60.96: in steps of 0.01, 0.03 gives 1.83."""
    begins = "(EngineCore pid=1) Initializing a V1 LLM engine (v0.23.0) with config: model='m',\n"
    found = only(report_of(begins + NPU), "out-of-memory")
    assert "--gpu-memory-utilization lower by 0.03 gives 1.83 GiB" in found.action
    assert "expandable_segments" not in found.action  # 1.13 GiB are not enough


@pytest.mark.parametrize(
    ("line", "name", "said"),
    [
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine.\n",
            "negative-kv",
            "the engine refused to start: no memory for the cache blocks",
        ),
        (
            "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored "
            "in KV cache (1234). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.\n",
            "kv-too-small",
            "max_model_len is 32,768 tokens, and the KV cache has room for 1,234",
        ),
        (
            "ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (3.18 GiB). Based on the available memory, the "
            "estimated maximum model length is 26032. \n",
            "kv-too-small",
            "one request takes 4.00 GiB, KV cache 3.18 GiB",
        ),
        (
            "ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV cache is "
            "needed, which is larger than the available\n",
            "kv-too-small",
            "one request takes 4.00 GiB",
        ),
        (
            "ValueError: Free memory on device cuda:1 (19.77/22.05 GiB) on startup is less than desired GPU memory\n",
            "startup-refused",
            "free 19.77 of 22.05 GiB",
        ),
    ],
)
def test_every_refusal_has_its_finding(line: str, name: str, said: str) -> None:
    report = report_of(line)
    assert report.run.status == "failed"
    assert said in only(report, name).evidence
    assert len(report.findings) == 1  # one cause, one finding


def test_a_share_of_the_device_changes_nothing_while_weights_are_loaded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "(NPURayWorkerWrapper pid=4) ERROR 06-09 06:57:48 worker_base.py:581] RuntimeError: NPU out of "
        "memory. Tried to allocate 30.00 MiB (NPU 3; 60.96 GiB total capacity; 60.34 GiB already "
        "allocated; 60.34 GiB current active; 14.24 MiB free; 60.60 GiB reserved in total by PyTorch)\n"
    )
    (run,) = read_log(str(log))
    report = build_report(run)
    oom = report.ranks[0].oom
    assert report.failure is not None
    assert report.failure.kind == "weights-too-large"
    assert oom is not None
    assert "utilization" not in {remedy.id for remedy in oom.remedies}


def test_a_process_of_which_the_driver_tells_nothing_leaves_no_other_process() -> None:
    nothing = "Including non-PyTorch memory, this process has 0 bytes memory in use. "
    (rank,) = report_of(CUDA.format(process=nothing)).ranks
    assert rank.oom is not None
    assert (rank.oom.process_non_torch_bytes, rank.oom.other_processes_bytes) == (None, None)
    assert "other_processes" not in {remedy.id for remedy in rank.oom.remedies}


def test_the_variable_of_the_allocator_is_that_of_the_device() -> None:
    text = f"[2026-01-01 00:00:00 TP0] Scheduler hit an exception: sglang/srt/x.py\n{CUDA}"
    (rank,) = report_of(text.format(process="")).ranks
    assert rank.oom is not None
    said = " ".join(remedy.argument for remedy in rank.oom.remedies)
    assert "PYTORCH_CUDA_ALLOC_CONF" in said
    assert "PYTORCH_NPU_ALLOC_CONF" not in said


@pytest.mark.parametrize(
    ("blocks", "rate", "tokens"),
    [("# cuda blocks: 7191", "28.09", 115_056), ("# npu blocks: 3915", "122.34", 501_120)],
)
def test_blocks_of_the_older_engine_are_tokens(blocks: str, rate: str, tokens: int) -> None:
    """7191 blocks of 16 tokens, 3915 of 128, as the concurrency bears out."""
    report = report_of(
        "INFO 03-21 20:15:45 [worker.py:267] the rest of the memory reserved for KV Cache is 56.18GiB.\n"
        f"INFO 03-21 20:15:46 [executor_base.py:111] {blocks}, # CPU blocks: 512\n"
        f"INFO 03-21 20:15:46 [executor_base.py:116] Maximum concurrency for 4096 tokens per request: {rate}x\n"
    )
    assert report.ranks[0].kv.tokens == tokens
