"""The engine's own numbers, read in bytes from its objects; nothing of the engine is called.

Sources, vllm-ascend 0.23.0: ``worker.py::NPUWorker`` (init_snapshot, requested_memory),
``model_runner.model_memory_usage``, and the MemoryProfilingResult of vLLM's ``memory_profiling``.
CUDA's ``gpu_worker.py::Worker`` has the same names. vllm-ascend before 0.15 takes no snapshot: its
worker holds what was free at the start (init_npu_memory), and reads the terms of its equation
without keeping them.

The last steps of a budget are actions of rows: what the engine makes of the bytes that it computed.
vllm-ascend, from 0.26 on: a start-up plan that replaces profiling, the scaling of a budget over
several KV cache groups, layers that share buffers, blocks in host memory or on other ranks. Where a
step changes the budget, its figures are kept; where it does not, there are none.
(``vllm_ascend/worker/worker.py::NPUWorker.determine_available_memory``, 0.26.0rc1 to 0.30.0rc2)
"""

from __future__ import annotations

from typing import Any

from vllm_memprof.capture.attributes import NAMES, reach
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.kv_plan import specs_of
from vllm_memprof.capture.recorder import Recorder

_FIXED_SIZE = "cache_config.kv_cache_memory_bytes"


def read_worker(recorder: Recorder, worker: Any, names: str = "worker_figures") -> None:
    """Take over the figures that the worker holds; the others stay unknown."""
    for name, paths in NAMES[names].items():
        found = (_number(reach(worker, path)) for path in paths)
        known = next((value for value in found if value is not None), recorder.figures[name])
        recorder.figures[name] = known


def read_profile(recorder: Recorder, worker: Any, granted: Any) -> None:
    """Take over the terms of the equation that granted so many bytes of KV cache."""
    read_worker(recorder, worker)
    read_worker(recorder, recorder.profile_result, "profile_figures")
    recorder.profile_result = None
    recorder.figures["kv_cache_bytes"] = _number(granted)
    # (physical layers, buffers, logical over physical bytes); a factor of 1 changes nothing
    reuse = reach(worker, "_gva_layerwise_memory_info")
    if isinstance(reuse, tuple) and len(reuse) == 3 and reuse[2] != 1.0:
        recorder.figures["kv_layer_reuse"] = _number(reuse[2])


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, (int, float)) else None


def enter_startup_plan(recorder: Recorder, call: Call) -> None:
    call.kept = reach(call.subject, _FIXED_SIZE)


def leave_startup_plan(recorder: Recorder, call: Call) -> None:
    """Keep the size that a plan of an earlier start has put in the place of profiling."""
    if call.kept is None:
        recorder.figures["startup_plan_bytes"] = reach(call.subject, _FIXED_SIZE)


def keep_groups(recorder: Recorder, call: Call) -> None:
    recorder.kv_groups = None if call.error is not None else call.result


def leave_multi_group(recorder: Recorder, call: Call) -> None:
    """Keep the bytes of a block: of the largest group, and of all groups, where it scaled by them.

    The pages are added up here from the engine's groups, as its buffers are made: per layer.
    """
    groups, recorder.kv_groups = recorder.kv_groups or (), None
    pages = [sum(int(spec.page_size_bytes) for spec in specs_of(group).values())
             for group in groups]  # fmt: skip
    if pages and call.error is None and call.result != call.argument("available_memory"):
        recorder.figures["kv_largest_group_page_bytes"] = max(pages)
        recorder.figures["kv_all_page_bytes"] = sum(pages)


def leave_planner(recorder: Recorder, call: Call) -> None:
    """Keep what a planner of blocks was given and returned, where that is not the same."""
    given = next((value for value in (*call.args[1:], *call.kwargs.values())), None)
    if given is None or int(given) == int(call.result):
        return
    if recorder.figures["kv_planner_input_bytes"] is None:  # the first of several
        recorder.figures["kv_planner_input_bytes"] = int(given)
    recorder.figures["kv_planner_bytes"] = int(call.result)
