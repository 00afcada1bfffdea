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
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import takewhile
from traceback import walk_tb
from types import FrameType
from typing import Any

from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.callsite import chain_of, is_left_out, outwards, site_of
from vllm_memprof.capture.empty_cache import worker_of
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.items import describe_one
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.capture.sampler import clean_id
from vllm_memprof.engines import ENGINES
from vllm_memprof.record.failures import asked_for, is_out_of_memory
from vllm_memprof.redact import redact_text

#: Loggers of the engine's modules that catch a failed step and log it with its exception.
LOGGERS = ("vllm.v1.executor.multiproc_executor", "vllm.v1.engine.core")
#: Variables of the allocator, by torch_npu and torch; the engine may have set one itself.
_SETTINGS = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: Readings of one process: an engine that goes on after a failure may fail many times.
MOST_READINGS = 8
#: Requests and multimodal items of a step that are listed.
MOST_REQUESTS, _MOST_ITEMS = 32, 64
_MOST_CAUSES = 16
_MESSAGE_LENGTH = 500
_SCHEDULED = "num_scheduled_tokens"
#: Frames that a call chain lists: from a layer of a model out to the engine's step.
_CHAIN_LENGTH = 32


class Watch(logging.Filter):
    """A filter that lets every record pass, and reads the failure that one of them carries."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.exc_info, tuple):
            read(self._recorder, record.exc_info[1])
        return True


def watch_logs(recorder: Recorder) -> None:
    """Read failures that the engine's processes log before they discard the exception."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, Watch) for each in logger.filters):
            logger.addFilter(Watch(recorder))


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
        cause = out_of_memory_of(error)
        read_already = recorder.notes.failures
        if cause is None or id(cause) in read_already or len(read_already) >= MOST_READINGS:
            return
        if not recorder.probe.is_ready():
            return  # an engine core hears of its workers' failures
        read_already.add(id(cause))
        recorder.emit("failure", **_describe(recorder, error, cause))
    except Exception as exc:
        recorder.error("reading after a failed allocation", exc)


def out_of_memory_of(error: BaseException | None) -> BaseException | None:
    """Return the exception at the origin that says out of memory; None where there is none."""
    said = [each for each in _causes(error) if is_out_of_memory(type(each).__name__, str(each))]
    return said[-1] if said else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_MOST_CAUSES):
        if error is not None:
            yield error
            error = error.__cause__ or error.__context__


def _describe(
    recorder: Recorder, error: BaseException | None, cause: BaseException
) -> dict[str, object]:
    frames = _frames(error, cause)
    snapshot, reason = recorder.probe.snapshot(workspace=True)
    message = " ".join(redact_text(f"{type(cause).__name__}: {cause}").split())[:_MESSAGE_LENGTH]
    observed, recorder.notes.oom = recorder.notes.oom, None
    if observed is None:  # of an allocator that tells no observer, or of the runtime
        asked = asked_for(" ".join(str(cause).split()))  # its end may tell
        device = {name: snapshot[name] for name in ("device_total_bytes", "device_free_bytes")}
        number = recorder.mark("oom", "oom.raised", snapshot, {**asked, **device})
        requested = asked["requested_bytes"]
    else:
        number, requested = observed
    return {
        "message": message,
        "oom": number,
        "site": next((site_of(frame) for frame in frames if not is_left_out(frame)), None),
        "chain": chain_of(frames, _CHAIN_LENGTH),
        "requests": _requests(recorder, frames),
        "allocator_settings": next(filter(None, map(os.environ.get, _SETTINGS)), ""),
        "snapshot": snapshot,
        "snapshot_reason": reason,
        "pools": recorder.probe.pools(snapshot["reserved_bytes"], requested),
    }


def _frames(error: BaseException | None, cause: BaseException) -> list[FrameType]:
    """Return the frames that the exceptions passed through and those around, innermost first."""
    chain = [cause, *reversed(list(takewhile(lambda each: each is not cause, _causes(error))))]
    frames: list[FrameType] = []
    for each in chain:
        frames += reversed([frame for frame, _ in walk_tb(each.__traceback__)])
    frames += outwards(sys._getframe(1))
    return list({id(frame): frame for frame in frames}.values())


def _requests(recorder: Recorder, frames: Sequence[FrameType]) -> list[dict[str, object]] | None:
    """Return the requests of the step that failed, never a prompt; None outside a step."""
    named = [frame for frame in frames if "scheduler_output" in frame.f_code.co_varnames]
    outputs = (frame.f_locals.get("scheduler_output") for frame in named)
    has = (each for each in outputs if isinstance(getattr(each, _SCHEDULED, None), dict))
    if (scheduled := next(has, None)) is None:
        module, _, name = (ENGINES[recorder.engine].failed_requests or "").partition(":")
        return getattr(import_module(module), name)(frames) if module else None
    runner = reach(worker_of(recorder), "model_runner")
    states: Any = reach(runner, "requests")
    states = states if isinstance(states, Mapping) else {}
    encoded = getattr(scheduled, "scheduled_encoder_inputs", None) or {}
    config = reach(runner, "model_config.hf_config")
    found: list[dict[str, object]] = []
    for name, tokens in list(scheduled.num_scheduled_tokens.items())[:MOST_REQUESTS]:
        state = states.get(name)
        prompt = getattr(state, "prompt_token_ids", None)
        features = getattr(state, "mm_features", None) or []
        now = set(encoded.get(name, ()))
        found.append(
            {
                "id": clean_id(name),
                "scheduled_tokens": int(tokens),
                "prompt_tokens": None if prompt is None else len(prompt),
                "items": [
                    {**describe_one(feature, config), "encoded": at in now}
                    for at, feature in enumerate(features[:_MOST_ITEMS])
                ],
            }
        )
    return found
