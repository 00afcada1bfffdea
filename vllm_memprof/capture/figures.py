"""The engine's own numbers, read in bytes from its worker object; nothing is computed or called.

Sources, vllm-ascend 0.23.0: ``worker.py::NPUWorker`` (init_snapshot, requested_memory),
``model_runner.model_memory_usage``, and the MemoryProfilingResult of vLLM's ``memory_profiling``.
CUDA's ``gpu_worker.py::Worker`` has the same names. vllm-ascend before 0.15 takes no snapshot: its
worker holds what was free at the start (init_npu_memory), and reads the terms of its equation
without keeping them.
"""

from __future__ import annotations

from typing import Any

from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.recorder import Recorder

#: FIGURES name -> attribute path from the worker, or several of different releases; the first that
#: is there counts.
_OF_WORKER = {
    "device_total_bytes": "init_snapshot.total_memory",
    "initial_free_bytes": "init_snapshot.free_memory | init_npu_memory",
    "initial_non_torch_bytes": "init_snapshot.non_torch_memory",
    "gpu_memory_utilization": "cache_config.gpu_memory_utilization",
    "requested_bytes": "requested_memory",
    "weights_bytes": "model_runner.model_memory_usage",
    "kv_cache_memory_bytes_arg": "cache_config.kv_cache_memory_bytes",
}

#: FIGURES name -> attribute path from the MemoryProfilingResult.
_OF_RESULT = {
    "peak_activation_bytes": "torch_peak_increase",
    "non_torch_increase_bytes": "non_torch_increase",
    "profile_before_allocated_peak_bytes": "before_profile.torch_peak",
    "profile_before_non_torch_bytes": "before_profile.non_torch_memory",
    "profile_after_allocated_peak_bytes": "after_profile.torch_peak",
    "profile_after_non_torch_bytes": "after_profile.non_torch_memory",
    "profile_after_free_bytes": "after_profile.free_memory",
}


def read_worker(recorder: Recorder, worker: Any) -> None:
    """Take over the figures that the worker holds; the others stay unknown."""
    _read(recorder, worker, _OF_WORKER)


def read_profile(recorder: Recorder, worker: Any, granted: Any) -> None:
    """Take over the terms of the equation that granted so many bytes of KV cache."""
    read_worker(recorder, worker)
    result, recorder.notes.profile_result = recorder.notes.profile_result, None
    if result is not None:
        _read(recorder, result, _OF_RESULT)
    recorder.figures["kv_cache_bytes"] = _number(granted)
    # (physical layers, buffers, logical over physical bytes); a factor of 1 changes nothing
    reuse = getattr(worker, "_gva_layerwise_memory_info", None)
    if isinstance(reuse, tuple) and len(reuse) == 3 and reuse[2] != 1.0:
        recorder.figures["kv_layer_reuse"] = _number(reuse[2])


def _read(recorder: Recorder, source: Any, paths: dict[str, str]) -> None:
    for name, choices in paths.items():
        for path in choices.split(" | "):
            if (number := _number(reach(source, path))) is not None:
                recorder.figures[name] = number
                break


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
