"""Actions of serving: functions that the rows of sampled runs name, and a thread beside them.

Actions are in the path of a token, so they read the allocator's counters at most. What no step
reads (the device as a whole, the runtime's counters, host memory) the thread reads, in every
process of a sampled run, at a low rate. While a phase is under way (a graph may be captured, a pool
put to sleep), it reads only host memory.
"""

from __future__ import annotations

import threading
import time

from vllm_memprof.capture.attributes import Fields, reach
from vllm_memprof.capture.connectors import held_now
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.probe import host_memory
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.record.schema import DEVICE_SAMPLE_FIGURES

#: Seconds between two readings of the thread.
PERIOD_S = 2.0


def enter_execute(recorder: Recorder, call: Call) -> None:
    """Begin a step of requests."""
    output = call.argument("scheduler_output")
    if not recorder.serving or call.kwargs.get("dummy_run"):
        return  # warming up, with requests of the engine's own
    if hasattr(output, "num_scheduled_tokens"):
        call.token = recorder.sampler.begin_step(output, call.subject)


def leave_execute(recorder: Recorder, call: Call) -> None:
    """End the step where the call has its result; else the tokens have yet to be sampled."""
    if call.token:
        recorder.sampler.leave_call(call.result is not None, call.error)


def leave_sample(recorder: Recorder, call: Call) -> None:
    recorder.sampler.end_step() if call.error is None else recorder.sampler.fail()


def enter_encoder(recorder: Recorder, call: Call) -> None:
    call.token = recorder.sampler.begin_stage("mm_encoder")


def leave_stage(recorder: Recorder, call: Call) -> None:
    if call.token is not None:
        recorder.sampler.end_stage(call.token, call.error)


def enter_merge(recorder: Recorder, call: Call) -> None:
    """Open the stage where there is something to merge: the call is made in every step."""
    given = call.argument("multimodal_embeddings", 2)
    if given is not None and len(given):
        if recorder.is_open("profile_run"):
            recorder.merged_in_profile = True
        recorder.sampler.note_cache()
        call.token = recorder.sampler.begin_stage("mm_merge")


def leave_core_step(recorder: Recorder, call: Call) -> None:
    recorder.sampler.core.stepped(call.subject.scheduler)


def enter_add_request(recorder: Recorder, call: Call) -> None:
    config = reach(call.subject, "vllm_config.model_config.hf_config")
    recorder.sampler.core.request_begins(call.argument("request"), config)


def enter_free_request(recorder: Recorder, call: Call) -> None:
    recorder.sampler.core.request_ends(call.argument("request"))


def leave_ready(recorder: Recorder, call: Call) -> None:
    start_thread(recorder)


def start_thread(recorder: Recorder) -> None:
    """Start the thread of this process, once."""
    if recorder.sampled and not recorder.has_thread:
        recorder.has_thread = True
        threading.Thread(target=_read_on, args=(recorder,), daemon=True).start()


def _read_on(recorder: Recorder) -> None:
    """Write a reading in each period."""
    try:
        while True:
            time.sleep(PERIOD_S)
            figures: Fields = dict.fromkeys(DEVICE_SAMPLE_FIGURES)
            if not recorder.is_in_phase and recorder.serving:
                snapshot = recorder.probe.snapshot()
                figures = {name: snapshot.get(name) for name in figures}
                for module, component in (snapshot["components"] or {}).items():
                    figures[f"runtime.{module}"] = component["bytes"]
                figures |= held_now(recorder)
            figures["host_rss_bytes"], figures["host_shared_bytes"] = host_memory()
            recorder.sampler.files.sample("device_sample", time.monotonic_ns(), None, 0, figures)
    except Exception as error:
        recorder.error("device thread", error)
