"""Actions around the last steps of an engine's budget: what it makes of the bytes it computed.

vllm-ascend, from 0.26 on: a start-up plan that replaces profiling, the scaling of a budget over
several KV cache groups, layers that share buffers, blocks in host memory or on other ranks. Where a
step changes the budget, its figures are kept; where it does not, there are none.
(``vllm_ascend/worker/worker.py::NPUWorker.determine_available_memory``, 0.26.0rc1 to 0.30.0rc2)
"""

from __future__ import annotations

from typing import Any

from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.kv_plan import specs_of
from vllm_memprof.capture.recorder import Recorder

_FIXED_SIZE = "cache_config.kv_cache_memory_bytes"


def enter_startup_plan(recorder: Recorder, call: Call) -> None:
    call.token = reach(call.subject, _FIXED_SIZE)


def leave_startup_plan(recorder: Recorder, call: Call) -> None:
    """Keep the size that a plan of an earlier start has put in the place of profiling."""
    size = reach(call.subject, _FIXED_SIZE)
    if call.error is None and call.token is None and size is not None:
        recorder.figures["startup_plan_bytes"] = int(size)


def keep_groups(recorder: Recorder, call: Call) -> None:
    recorder.notes.kv_groups = None if call.error is not None else call.result


def leave_multi_group(recorder: Recorder, call: Call) -> None:
    """Keep the bytes of a block: of the largest group, and of all groups, where it scaled by them.

    The pages are added up here from the engine's groups, as its buffers are made: per layer.
    """
    groups, recorder.notes.kv_groups = recorder.notes.kv_groups, None
    if call.error is not None or not groups or call.result == call.argument("available_memory"):
        return
    pages = [group_page_bytes(group) for group in groups]
    recorder.figures["kv_largest_group_page_bytes"] = max(pages)
    recorder.figures["kv_all_page_bytes"] = sum(pages)


def group_page_bytes(group: Any) -> int:
    """Return the bytes of one block over all layers of a group, which may differ in their pages."""
    return sum(int(spec.page_size_bytes) for spec in specs_of(group).values())


def leave_planner(recorder: Recorder, call: Call) -> None:
    """Keep what a planner of blocks was given and returned, where that is not the same."""
    given = next((value for value in (*call.args[1:], *call.kwargs.values())), None)
    if call.error is not None or given is None or int(given) == int(call.result):
        return
    if recorder.figures["kv_planner_input_bytes"] is None:  # the first of several
        recorder.figures["kv_planner_input_bytes"] = int(given)
    recorder.figures["kv_planner_bytes"] = int(call.result)
