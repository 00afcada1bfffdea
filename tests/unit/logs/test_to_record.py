"""Figures of a start become those of its processes."""

from __future__ import annotations

from vllm_memprof.units import GIB


def test_cuda_oom_gives_reserved_memory(runs_of):
    (run,) = runs_of(
        "INFO non-default args: {'model': 'org/m', 'gpu_memory_utilization': 0.9}\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a total capacity of 22.36 GiB of which 120.88 MiB is free. "
        "Including non-PyTorch memory, this process has 22.20 GiB memory in use. Of the allocated memory 20.00 GiB is allocated by PyTorch, with 0.40 GiB "
        "allocated in private pools (e.g., CUDA Graphs), and 1.50 GiB is reserved by PyTorch but unallocated.\n"
    )
    assert run.info.engine == "vllm"
    detail = run.processes[0].phases[-1].detail
    assert detail["reserved_bytes"] == round(21.5 * GIB)
    assert detail["process_bytes"] == round(22.2 * GIB)


def test_the_fixed_size_and_the_request_of_the_set_up(runs_of):
    (run,) = runs_of(
        "$ vllm serve org/m -tp 1 --kv-cache-memory-bytes 1000000 \\\n  --gpu-memory-utilization=0.9 --block-size 128 # why\nINFO Available KV cache memory: 1.00 GiB\n"
    )
    figures = run.processes[0].figures
    assert figures["kv_cache_memory_bytes_arg"] == 1_000_000
    assert figures["gpu_memory_utilization"] == 0.9
    assert run.info.model == "org/m"


def test_a_utilization_that_the_figures_contradict_is_not_used(runs_of):
    (run,) = runs_of(
        "vllm serve m --gpu-memory-utilization 0.5\nAvailable memory: 43.40 GiB, total memory: 60.96 GiB\nAvailable memory: 43.40 GiB, requested memory: 57.91 GiB\n"
    )
    assert "gpu_memory_utilization" not in run.processes[0].figures
