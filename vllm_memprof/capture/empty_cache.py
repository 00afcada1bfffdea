"""The audit of ``empty_cache``: its caller, the call chain, the thread and the running requests.

Runs in worker processes. Everything is read at the moment of the call, nothing before it: the
running requests are those that the model runner holds then, so that no hook lies in the path of a
step. Frees and seconds follow from the two snapshots and the clock around the allocator's own
function, device synchronisation included.

Memprof itself calls ``empty_cache`` only where the user named a phase (``memprof offline
--empty-cache-at``); such a call is marked as memprof's own.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import Any

from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.callsite import call_chain, find_site, in_step
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.probe import runtime_of
from vllm_memprof.capture.recorder import Recorder

#: Where a worker keeps its unfinished requests, the first that it has: model runners v1 and v2 of
#: vLLM, a scheduler that is the worker, what an engine's actions keep of them.
_REQUESTS = (
    "model_runner.requests",
    "model_runner.req_states.req_id_to_index",
    "model_runner.input_batch.req_id_to_index",
    "running_batch.reqs",
    "requests",
)


def enter(recorder: Recorder, call: Call) -> None:
    if recorder.is_open("empty_cache") or not recorder.probe.is_ready():
        return
    detail: dict[str, object] = {
        "thread": threading.current_thread().name,
        "requests": running_requests(recorder),
    }
    own, caller = recorder.notes.own_empty_cache or (None, None)
    if caller == threading.get_ident():
        detail |= {"site": f"--empty-cache-at {own}", "by": "memprof", "at": own, "in_step": False}
    else:
        frame = sys._getframe(1)
        detail["site"], detail["function"] = find_site(frame)
        detail |= {"chain": call_chain(frame), "in_step": in_step(frame)}
    opened = recorder.begin("empty_cache", call.hook.id, detail, workspace_wanted(recorder))
    call.token = opened, time.perf_counter_ns()


def leave(recorder: Recorder, call: Call) -> None:
    if call.token is None:
        return
    opened, started_ns = call.token
    opened.detail["seconds"] = (time.perf_counter_ns() - started_ns) / 1e9
    recorder.end(opened, call.error, workspace_wanted(recorder))


def workspace_wanted(recorder: Recorder) -> bool:
    """Return True if the operator workspace, which empty_cache releases too, may be read.

    Reading it takes milliseconds with thousands of blocks: too much while requests run, and before
    each captured graph.
    """
    if recorder.is_open("graph_capture"):
        return False
    return not recorder.notes.serving or running_requests(recorder) == 0


def keep_worker(recorder: Recorder, worker: Any) -> None:
    """Remember the worker whose requests are asked about, without prolonging its life."""
    recorder.notes.worker = weakref.ref(worker)


def worker_of(recorder: Recorder) -> Any:
    """Return the worker that is remembered; None where there is none any more."""
    reference = recorder.notes.worker
    return None if reference is None else reference()


def running_requests(recorder: Recorder) -> int | None:
    """Return the number of requests that the model runner holds; None: unknown.

    They were scheduled at least once and are not known to be finished. A finished request leaves
    the runner with the next schedule, which vLLM sends also when nothing else is to be done.
    """
    for path in _REQUESTS:
        held = reach(worker_of(recorder), path)
        if hasattr(held, "__len__"):
            return len(held)
    return None


def call_after(recorder: Recorder, phase: str) -> None:
    """Empty the cache, as memprof's own call, at the end of a phase that the user named."""
    probe = recorder.probe
    asked = phase in recorder.empty_cache_at and not recorder.is_open("empty_cache")
    if not asked or not probe.is_ready():
        return
    device = runtime_of(probe.backend_name)
    if device is None:
        return
    recorder.notes.own_empty_cache = phase, threading.get_ident()
    try:
        device.empty_cache()
    finally:
        recorder.notes.own_empty_cache = None
