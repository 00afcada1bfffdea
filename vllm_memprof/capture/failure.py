"""An allocation that failed, read after the engine's exception: where it was asked for, for which
requests, and what the allocator's segments looked like.

Runs in worker processes. The allocator's own observer (observer.py) reads counters only. What is
read here is host-side bookkeeping, once the failure was raised: the traceback, the scheduler's
output that a frame of it holds, the allocator's list of segments. A failed step of a server is seen
where the engine logs it, so that nothing lies in the path of a step that succeeds.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from traceback import walk_tb
from types import FrameType
from typing import Any

from vllm_memprof.capture.attributes import NAMES, Fields, reach
from vllm_memprof.capture.callsite import chain_of, find_site, outwards
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.items import describe
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.capture.sampler import clean_id
from vllm_memprof.engines import ENGINES
from vllm_memprof.record.failures import asked_for, is_out_of_memory
from vllm_memprof.redact import redact_text
from vllm_memprof.units import one_line

#: Loggers of the engine's modules that catch a failed step and log it with its exception.
LOGGERS = ("vllm.v1.executor.multiproc_executor", "vllm.v1.engine.core")
#: Readings of one process: an engine that goes on after a failure may fail many times.
MOST_READINGS = 8
#: Requests and multimodal items of a step that are listed.
MOST_REQUESTS, _MOST_ITEMS = 32, 64
_MOST_CAUSES = 16
#: Frames that a call chain lists: from a layer of a model out to the engine's step.
_CHAIN_LENGTH = 32


def allocator_settings() -> str:
    """Return what the allocator's variable says in this process."""
    return next(filter(None, map(os.environ.get, NAMES["allocator_settings"])), "")


def observe(recorder: Recorder) -> None:
    """Attach to failed allocations, once, and to the logs in which an engine discards them."""
    if recorder.observes_oom:
        return
    recorder.observes_oom = True

    def note(device: int, requested: int, total: int, free: int) -> None:
        """Write a failed allocation from inside it: counters only."""
        try:
            detail: Fields = {
                "device": device,
                "requested_bytes": requested,
                "device_total_bytes": total,
                "device_free_bytes": free,
                "moment": recorder.sampler.moment(),
            }
            snapshot = recorder.probe.snapshot(free=False)
            recorder.oom = recorder.mark("oom", "oom.observer", snapshot, detail), requested
        except Exception as error:
            recorder.error("oom observer", error)

    # where the allocator takes a function that it calls when an allocation has failed
    attach = recorder.probe.function("attach_out_of_memory_observer")
    if attach is not None:
        attach(note)

    def read_failure(record: logging.LogRecord) -> bool:
        if isinstance(record.exc_info, tuple):
            read(recorder, record.exc_info[1])
        return True  # every record passes

    for name in LOGGERS:
        logging.getLogger(name).addFilter(read_failure)


def enter_failed_step(recorder: Recorder, call: Call) -> None:
    """Read the failure that the engine core is about to describe in its log."""
    read(recorder, sys.exc_info()[1])


def read(recorder: Recorder, error: BaseException | None) -> None:
    """Record a failed allocation once; an error that is none is left alone.

    Args:
        recorder: of this process.
        error: as it arrives at a hook or at the engine's log.
    """
    try:
        chain: list[BaseException] = []
        while error is not None and len(chain) < _MOST_CAUSES:
            chain.insert(0, error)
            error = error.__cause__ or error.__context__
        said = [each for each in chain if is_out_of_memory(type(each).__name__, str(each))]
        seen = recorder.failures
        # an engine core hears of its workers' failures, and has no device itself
        if not said or len(seen) >= MOST_READINGS or not recorder.probe.is_ready():
            return
        cause = said[0]  # at the origin
        if id(cause) not in seen:
            seen.add(id(cause))
            frames: list[FrameType] = []  # through which they passed, and those around
            for each in chain[chain.index(cause) :]:
                frames += [frame for frame, _ in walk_tb(each.__traceback__)][::-1]
            frames += outwards(sys._getframe(1))
            recorder.emit("failure", **_describe(recorder, cause, list(dict.fromkeys(frames))))
    except Exception as exc:
        recorder.error("reading after a failed allocation", exc)


def _describe(recorder: Recorder, cause: BaseException, frames: Sequence[FrameType]) -> Fields:
    """Return the fields of the event; frames are those of the failure, innermost first."""
    snapshot = recorder.probe.snapshot(workspace=True)
    observed, recorder.oom = recorder.oom, None
    if observed is None:  # of an allocator that tells no observer, or of the runtime
        asked = asked_for(" ".join(str(cause).split()))  # its end may tell
        device = {name: snapshot[name] for name in ("device_total_bytes", "device_free_bytes")}
        number = recorder.mark("oom", "oom.raised", snapshot, {**asked, **device})
        observed = number, asked["requested_bytes"]
    return {
        "message": one_line(redact_text(f"{type(cause).__name__}: {cause}")),
        "oom": observed[0],
        "site": find_site(frames)[0],
        "chain": chain_of(frames, _CHAIN_LENGTH),
        "requests": _requests(recorder, frames),
        "allocator_settings": allocator_settings(),
        "snapshot": snapshot,
        "pools": recorder.probe.pools(snapshot["reserved_bytes"], observed[1]),
    }


def _requests(recorder: Recorder, frames: Sequence[FrameType]) -> list[Fields] | None:
    """Return the requests of the step that failed, never a prompt; None outside a step."""
    named = [frame for frame in frames if "scheduler_output" in frame.f_code.co_varnames]
    outputs: list[Any] = [frame.f_locals.get("scheduler_output") for frame in named]
    steps = [each for each in outputs if isinstance(reach(each, "num_scheduled_tokens"), dict)]
    if not steps:
        module, _, name = (ENGINES[recorder.engine].failed_requests or "").partition(":")
        return getattr(import_module(module), name)(frames) if module else None
    runner: Any = reach(recorder.worker(), "model_runner")
    states = reach(runner, "requests")
    states = states if isinstance(states, Mapping) else {}
    encoded = reach(steps[0], "scheduled_encoder_inputs") or {}
    config = reach(runner, "model_config.hf_config")
    found: list[Fields] = []
    for name, tokens in list(steps[0].num_scheduled_tokens.items())[:MOST_REQUESTS]:
        prompt = reach(states.get(name), "prompt_token_ids")
        features = reach(states.get(name), "mm_features") or []
        now = set(encoded.get(name, ()))
        found.append(
            {
                "id": clean_id(name),
                "scheduled_tokens": tokens,
                "prompt_tokens": None if prompt is None else len(prompt),
                "items": [
                    {**describe(feature, config), "encoded": at in now}
                    for at, feature in enumerate(features[:_MOST_ITEMS])
                ],
            }
        )
    return found
