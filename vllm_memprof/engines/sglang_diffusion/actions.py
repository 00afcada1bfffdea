"""Actions of the rows of SGLang's diffusion runtime: what runs before or after a worker's call.

A worker process is scheduler and GPU worker in one: its role is ``worker``. The process that
started it hands it the requests (``api``). A request runs one pipeline, stage by stage; there is no
KV cache and no equation. Read in 0.5.23.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from vllm_memprof.capture import failure, identity
from vllm_memprof.capture.actions import begin_phase, end_phase
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.recorder import Recorder

#: Requests that are recorded, each with its stages: a server runs as many as it is sent.
RECORDED_REQUESTS = 64


class Running:
    """The requests under way: one at a time, where no object of the engine says which."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.done = 0


def leave_worker(recorder: Recorder, call: Call) -> None:
    """Announce the model: the pipeline is loaded, the worker waits for requests."""
    if recorder.model_ready:
        return
    recorder.model_ready = recorder.serving = True
    # one request runs at a time: calls of empty_cache are asked whether it is under way
    recorder.kept = Running()
    recorder.worker = weakref.ref(recorder.kept)
    recorder.emit("ready", what="model")
    recorder.hooks.self_check("model_ready")
    recorder.hooks.self_check("engine_ready")


def leave_device_init(recorder: Recorder, call: Call) -> None:
    """Groups are made and the device is chosen: identity, observer of failed allocations."""
    if call.error is None and recorder.label is None and recorder.probe.is_ready():
        # the ranks are those of torch's process group
        world = getattr(sys.modules.get("torch"), "distributed", None)
        label, rank, size = identity.label(None, None, None, None), None, None
        if world is not None and getattr(world, "is_initialized", bool)():
            rank, size = int(world.get_rank()), int(world.get_world_size())
            # it may be one of tensor, sequence or guidance parallelism: its number is what counts
            label = f"rank {rank}"
        device = recorder.probe.index
        identity.tell(recorder, device, label, size, rank=rank, local_rank=device)
    end_phase(recorder, call)
    if call.error is None:
        failure.observe(recorder)
        recorder.hooks.self_check("device_ready")


def begin_component(recorder: Recorder, call: Call) -> None:
    """Open the phase with the name of the part of the pipeline that is loaded."""
    if recorder.label is not None:
        name = call.kwargs.get("component_name", call.args[3] if len(call.args) > 3 else None)
        begin_phase(recorder, call, {"name": name} if isinstance(name, str) else None)


def begin_request(recorder: Recorder, call: Call) -> None:
    running = recorder.kept
    if running is not None:
        running.requests.append(call.argument("batch"))
        begin_phase(recorder, call)


def leave_request(recorder: Recorder, call: Call) -> None:
    """End the phase; take off the rows of requests once enough of them were recorded."""
    running = recorder.kept
    if running is None:
        return
    running.requests.clear()
    end_phase(recorder, call)
    running.done += 1
    if running.done >= RECORDED_REQUESTS:
        recorder.worker = lambda: None  # from here on nobody knows whether one is under way
        recorder.hooks.release("first_steps")


def begin_stage(recorder: Recorder, call: Call) -> None:
    """Open the phase with the name of the stage."""
    begin_phase(recorder, call, {"name": type(call.subject).__name__})


def leave_event_loop(recorder: Recorder, call: Call) -> None:
    recorder.hooks.self_check("end")
