"""The audit of ``empty_cache``: who called it, through what, in which thread, and what was running. Worker processes.

Everything is read at the moment of the call, nothing before it: whether requests run is what the model runner holds
then, so that no hook lies in the path of a step. Frees and seconds follow from the two snapshots and the clock around
the allocator's own function, device synchronisation included.

Memprof itself calls ``empty_cache`` only where the user named a phase (``memprof offline --empty-cache-at``); such a
call is marked as memprof's own.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from vllm_memprof.capture.callsite import call_chain, find_site, in_step

if TYPE_CHECKING:
    from vllm_memprof.capture.actions import Call
    from vllm_memprof.capture.core import Capture
    from vllm_memprof.capture.session import Session

_STARTED = "started_ns"
#: Where a model runner keeps its unfinished requests, the first that it has (vLLM: model runner v1, v2).
_REQUESTS = ("requests", "req_states.req_id_to_index", "input_batch.req_id_to_index")


def enter(capture: Capture, call: Call) -> None:
    session = capture.session
    if session.is_open("empty_cache") or not session.probe.is_ready():
        return
    opened = session.begin(
        "empty_cache", call.hook.id, _describe(session), workspace_wanted(capture)
    )
    call.token = opened, time.perf_counter_ns()


def leave(capture: Capture, call: Call) -> None:
    if call.token is None:
        return
    opened, started_ns = call.token
    opened.detail["seconds"] = (time.perf_counter_ns() - started_ns) / 1e9
    capture.session.end(opened, call.error, workspace_wanted(capture))


def workspace_wanted(capture: Capture) -> bool:
    """Workspace is what empty_cache returns beside cached blocks.

    Reading it costs milliseconds with thousands of blocks: too much while requests run, and before each captured
    graph.
    """
    session = capture.session
    if session.is_open("graph_capture"):
        return False
    return not session.notes.get("serving") or running_requests(session) == 0


def keep_worker(session: Session, worker: Any) -> None:
    """Remember whose requests are asked about; the worker's life is not prolonged by it."""
    session.notes["worker"] = weakref.ref(worker)


def running_requests(session: Session) -> int | None:
    """Requests that the model runner holds: scheduled at least once, and not known to be finished. None: unknown.

    A finished request leaves the runner with the next schedule, which vLLM sends also when nothing else is to be done.
    """
    reference = session.notes.get("worker")
    worker = None if reference is None else reference()
    runner = getattr(worker, "model_runner", None)
    for path in _REQUESTS:
        held: Any = runner
        for name in path.split("."):
            held = getattr(held, name, None)
        if held is not None:
            try:
                return len(held)
            except TypeError:
                continue
    return None


def call_after(capture: Capture, phase: str) -> None:
    """The experiment: empty the cache at the end of a phase that the user named, and say whose call it was."""
    session = capture.session
    if (
        phase not in capture.empty_cache_at
        or not session.probe.is_ready()
        or session.is_open("empty_cache")
    ):
        return
    module = sys.modules.get("torch_npu" if session.probe.backend_name == "npu" else "torch")
    device = getattr(module, session.probe.backend_name or "", None)
    if device is None:
        return
    session.notes["own_empty_cache"] = phase, threading.get_ident()
    try:
        device.empty_cache()
    finally:
        session.notes.pop("own_empty_cache", None)


def _describe(session: Session) -> dict[str, Any]:
    frame = sys._getframe(2)
    thread = threading.current_thread().name
    own, caller = session.notes.get("own_empty_cache", (None, None))
    if caller == threading.get_ident():
        return {"site": f"--empty-cache-at {own}", "thread": thread, "by": "memprof", "at": own,
                "requests": running_requests(session), "in_step": False}  # fmt: skip
    site, function = find_site(frame)
    return {
        "site": site,
        "function": function,
        "thread": thread,
        "chain": call_chain(frame),
        "requests": running_requests(session),
        "in_step": in_step(frame),
    }
