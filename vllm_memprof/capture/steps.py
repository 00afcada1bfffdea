"""Actions of serving: functions that the rows of sampled runs name.

They are in the path of a token, so they read the allocator's counters at most.
"""

from __future__ import annotations

from vllm_memprof.capture import device_thread
from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.recorder import Recorder


def enter_execute(recorder: Recorder, call: Call) -> None:
    """Begin a step of requests."""
    sampler = recorder.sampler
    output = call.argument("scheduler_output")
    if sampler is None or not recorder.notes.serving or call.kwargs.get("dummy_run"):
        return  # warming up, with requests of the engine's own
    if not hasattr(output, "num_scheduled_tokens"):
        return
    sampler.begin_step(output, call.subject)
    call.token = sampler
    if output.free_encoder_mm_hashes:
        sampler.cache_evicts(output)


def leave_execute(recorder: Recorder, call: Call) -> None:
    """End the step where the call has its result; else the tokens have yet to be sampled."""
    if call.token is not None:
        call.token.leave_call(call.result is not None, call.error)


def leave_sample(recorder: Recorder, call: Call) -> None:
    sampler = recorder.sampler
    if sampler is not None:
        sampler.end_step() if call.error is None else sampler.fail()


def enter_encoder(recorder: Recorder, call: Call) -> None:
    if recorder.sampler is not None:
        call.token = recorder.sampler.begin_stage("mm_encoder")


def leave_stage(recorder: Recorder, call: Call) -> None:
    if recorder.sampler is not None and call.token is not None:
        recorder.sampler.end_stage(call.token, call.error)


def enter_merge(recorder: Recorder, call: Call) -> None:
    """Open the stage where there is something to merge: the call is made in every step."""
    given = call.kwargs.get("multimodal_embeddings", call.args[2] if len(call.args) > 2 else None)
    if given is not None and len(given) and recorder.is_open("profile_run"):
        recorder.notes.merged_in_profile = True
    if recorder.sampler is not None and given is not None and len(given):
        recorder.sampler.cache_inserted()
        call.token = recorder.sampler.begin_stage("mm_merge")


def leave_core_step(recorder: Recorder, call: Call) -> None:
    if recorder.sampler is not None and call.error is None:
        recorder.sampler.core_stepped(call.subject.scheduler)


def enter_add_request(recorder: Recorder, call: Call) -> None:
    if recorder.sampler is not None:
        config = reach(call.subject, "vllm_config.model_config.hf_config")
        recorder.sampler.request_begins(call.argument("request"), config)


def enter_free_request(recorder: Recorder, call: Call) -> None:
    if recorder.sampler is not None:
        recorder.sampler.request_ends(call.argument("request"))


def leave_ready(recorder: Recorder, call: Call) -> None:
    if call.error is None:
        device_thread.start(recorder)
