"""Steps of SGLang, in sampled runs: its batches enter the sampler in the shape that it takes.

A batch of SGLang lists its requests; what is scheduled of each, which are new and which have
finished follows from them. In the path of a token: nothing of the device but the allocator's
counters is read, and a batch costs a pass over its requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType, SimpleNamespace
from typing import Any

from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.failure import MOST_REQUESTS
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.capture.sampler import clean_id
from vllm_memprof.engines.sglang.items import features_of
from vllm_memprof.engines.sglang.kept import kept


def sampled(request: Any) -> Any:
    """Return a request as the sampler takes it: in its first batch, at its begin and at its end."""
    prompt, output, cached = (
        reach(request, name) for name in ("origin_input_ids", "output_ids", "prefix_indices")
    )
    return SimpleNamespace(
        req_id=request.rid,
        request_id=request.rid,
        prompt_token_ids=prompt,
        num_prompt_tokens=None if prompt is None else len(prompt),
        num_output_tokens=None if output is None else len(output),
        num_computed_tokens=0 if cached is None else len(cached),
        mm_features=features_of(request),
    )


def batch_of(ended: Sequence[Any]) -> Any:
    """Return a batch of no requests, after which these have ended, as vLLM's scheduler output."""
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        finished_req_ids={request.rid for request in ended},
        scheduled_encoder_inputs={},
        free_encoder_mm_hashes=[],
    )


def enter_batch(recorder: Recorder, call: Call) -> None:
    """Begin a step with the requests of a batch."""
    given = call.argument("batch")
    requests = reach(given, "reqs")
    if not recorder.serving or not requests:
        return
    known, batch = recorder.requests, batch_of(take_finished(recorder))
    for request, tokens in zip(requests, extended(given, len(requests)), strict=True):
        name = request.rid
        batch.num_scheduled_tokens[name] = tokens
        batch.total_num_scheduled_tokens += tokens
        if name not in known:
            known[name] = request
            new = sampled(request)
            batch.scheduled_new_reqs.append(new)
            if not kept(recorder).rank:  # the first writes what all of a replica have in common
                # how many pixels a patch has
                config = reach(call.subject, "model_config.hf_config")
                recorder.sampler.core.request_begins(new, config)
        else:
            done = len(request.origin_input_ids) + len(request.output_ids) - tokens
            batch.scheduled_cached_reqs.req_ids.append(name)
            batch.scheduled_cached_reqs.num_computed_tokens.append(max(0, done))
    call.kept = recorder.sampler.begin_step(batch, call.subject)


def leave_batch(recorder: Recorder, call: Call) -> None:
    if call.kept:
        recorder.sampler.leave_call(True, call.error)


def leave_result(recorder: Recorder, call: Call) -> None:
    """End the requests that this result has finished, also where no batch follows."""
    sampler = recorder.sampler
    if not recorder.serving:
        return
    ended = take_finished(recorder)
    if not kept(recorder).rank:
        for request in ended:
            sampler.core.request_ends(sampled(request))
        sampler.core.stepped(scheduler_state(call.subject))
    if ended and sampler.begin_step(batch_of(ended), call.subject):
        sampler.leave_call(True, None)


def take_finished(recorder: Recorder) -> list[Any]:
    """Return the known requests that have finished, which are not known from now on."""
    known = recorder.requests
    return [known.pop(name) for name, request in [*known.items()] if request.finished()]


def scheduler_state(scheduler: Any) -> Any:
    """Return what the sampler reads of a scheduler: requests, and free pages of the KV cache.

    A page that only the prefix cache holds counts as free.
    """
    allocator = reach(scheduler, "token_to_kv_pool_allocator")
    page, size = reach(allocator, "page_size"), reach(allocator, "size")
    pool = None
    if page and size is not None:
        evictable = reach(scheduler, "tree_cache.evictable_size")
        free = int(allocator.available_size()) + (0 if evictable is None else int(evictable()))
        pool = SimpleNamespace(
            num_gpu_blocks=size // page + 1,  # vLLM counts the block that is always empty
            get_num_free_blocks=lambda: free // page,
        )
    return SimpleNamespace(
        running=reach(scheduler, "running_batch.reqs") or (),
        waiting=reach(scheduler, "waiting_queue") or (),
        kv_cache_manager=SimpleNamespace(block_pool=pool),
    )


def extended(batch: Any, count: int) -> list[int]:
    """Return the tokens that a batch computes of each request: one, where it decodes."""
    is_extend, sizes = reach(batch, "forward_mode.is_extend"), reach(batch, "extend_lens") or ()
    extends = is_extend is not None and is_extend() and len(sizes) == count
    return [*map(int, sizes)] if extends else [1] * count


def failed_requests(frames: Sequence[FrameType]) -> list[dict[str, object]] | None:
    """Return the requests of the batch that failed, never a prompt; its items are not read."""
    for frame in frames:
        batch = frame.f_locals.get("batch")
        requests = reach(batch, "reqs")
        if isinstance(requests, list) and all(hasattr(each, "rid") for each in requests):
            scheduled = zip(requests, extended(batch, len(requests)), strict=True)
            return [
                {
                    "id": clean_id(request.rid),
                    "scheduled_tokens": tokens,
                    "prompt_tokens": sampled(request).num_prompt_tokens,
                    "items": [],
                }
                for request, tokens in [*scheduled][:MOST_REQUESTS]
            ]
    return None
