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

from vllm_memprof.capture.attributes import NAMES, Fields, reach
from vllm_memprof.capture.callsite import FORWARDERS, chain_of, find_site, outwards
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.recorder import Recorder

#: Frames that a call chain lists, from the innermost outwards.
_CHAIN_LENGTH = 8


def enter(recorder: Recorder, call: Call) -> None:
    if recorder.is_open("empty_cache") or not recorder.probe.is_ready():
        return
    detail: Fields = {
        "thread": threading.current_thread().name,
        "requests": running_requests(recorder),
    }
    own = recorder.own_empty_cache
    if own is not None:
        detail |= {"site": f"--empty-cache-at {own}", "by": "memprof", "at": own, "in_step": False}
    else:
        frames = list(outwards(sys._getframe(1)))
        detail["site"], detail["function"] = find_site(frames, FORWARDERS)
        detail["chain"] = chain_of(frames, _CHAIN_LENGTH)
        steps = NAMES["step_functions"]
        detail["in_step"] = any(frame.f_code.co_name in steps for frame in frames)
    call.token = recorder.begin("empty_cache", call.hook.id, detail, _workspace_wanted(recorder))
    call.kept = time.perf_counter_ns()


def leave(recorder: Recorder, call: Call) -> None:
    if call.token is not None:
        call.token.detail["seconds"] = (time.perf_counter_ns() - call.kept) / 1e9
        recorder.end(call.token, call.error, _workspace_wanted(recorder))


def _workspace_wanted(recorder: Recorder) -> bool:
    """Return True if the operator workspace, which empty_cache releases too, may be read.

    Reading it takes milliseconds with thousands of blocks: too much while requests run, and before
    each captured graph.
    """
    idle = not recorder.serving or running_requests(recorder) == 0
    return idle and not recorder.is_open("graph_capture")


def running_requests(recorder: Recorder) -> int | None:
    """Return the number of requests that the model runner holds; None: unknown.

    They were scheduled at least once and are not known to be finished. A finished request leaves
    the runner with the next schedule, which vLLM sends also when nothing else is to be done.
    """
    found = (reach(recorder.worker(), path) for path in NAMES["running_requests"])
    return next((len(held) for held in found if hasattr(held, "__len__")), None)


def call_after(recorder: Recorder, phase: str) -> None:
    """Empty the cache, as memprof's own call, at the end of a phase that the user named."""
    asked = phase in recorder.empty_cache_at and not recorder.is_open("empty_cache")
    if asked and recorder.probe.is_ready():
        recorder.own_empty_cache = phase
        try:
            recorder.probe.runtime.empty_cache()
        finally:
            recorder.own_empty_cache = None
