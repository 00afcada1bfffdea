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


class SampledRequest:
    """A request as the sampler takes it: in its first batch, at its begin and at its end."""

    status = None

    def __init__(self, request: Any) -> None:
        self.req_id = self.request_id = request.rid
        self.prompt_token_ids = prompt = getattr(request, "origin_input_ids", None)
        self.num_prompt_tokens = None if prompt is None else len(prompt)
        output = getattr(request, "output_ids", None)
        self.num_output_tokens = None if output is None else len(output)
        self.num_computed_tokens = len(getattr(request, "prefix_indices", None) or ())
        self.mm_features = features_of(request)


class SchedulerBatch:
    """A batch in the shape of vLLM's scheduler output, as far as the sampler reads it."""

    def __init__(self, finished: set[str]) -> None:
        self.scheduled_new_reqs: list[SampledRequest] = []
        #: Requests that were in a batch before.
        self.scheduled_cached_reqs: Any = SimpleNamespace(req_ids=[], num_computed_tokens=[])
        self.num_scheduled_tokens: dict[str, int] = {}
        self.total_num_scheduled_tokens = 0
        self.finished_req_ids = finished
        self.scheduled_encoder_inputs: dict[str, list[int]] = {}
        self.free_encoder_mm_hashes: list[str] = []


def enter_batch(recorder: Recorder, call: Call) -> None:
    """Begin a step with the requests of a batch."""
    sampler = recorder.sampler
    requests = getattr(call.argument("batch"), "reqs", None)
    if not recorder.serving or not requests:
        return
    known = recorder.requests
    batch = SchedulerBatch({name for name, request in known.items() if request.finished()})
    for name in batch.finished_req_ids:
        del known[name]
    extends = extended(call.argument("batch"), len(requests))
    for request, tokens in zip(requests, extends, strict=False):
        name = request.rid
        batch.num_scheduled_tokens[name] = tokens
        batch.total_num_scheduled_tokens += tokens
        if name not in known:
            known[name] = request
            new = SampledRequest(request)
            batch.scheduled_new_reqs.append(new)
            if _is_first_rank(recorder):
                # how many pixels a patch has
                sampler.core.request_begins(new, reach(call.subject, "model_config.hf_config"))
        else:
            done = len(request.origin_input_ids) + len(request.output_ids) - tokens
            batch.scheduled_cached_reqs.req_ids.append(name)
            batch.scheduled_cached_reqs.num_computed_tokens.append(max(0, done))
    call.token = sampler.begin_step(batch, call.subject)


def leave_batch(recorder: Recorder, call: Call) -> None:
    if call.token:
        recorder.sampler.leave_call(True, call.error)


def leave_result(recorder: Recorder, call: Call) -> None:
    """End the requests that this result has finished, also where no batch follows."""
    sampler = recorder.sampler
    if call.error is not None or not recorder.serving:
        return
    known = recorder.requests
    ended = {name for name, request in known.items() if request.finished()}
    if _is_first_rank(recorder):
        for name in ended:
            sampler.core.request_ends(SampledRequest(known[name]))
        sampler.core.stepped(scheduler_state(call.subject))
    if not ended:
        return
    for name in ended:
        del known[name]
    if sampler.begin_step(SchedulerBatch(ended), call.subject):
        sampler.leave_call(True, None)


def scheduler_state(scheduler: Any) -> Any:
    """Return what the sampler reads of a scheduler: requests, and free pages of the KV cache.

    A page that only the prefix cache holds counts as free.
    """
    allocator: Any = getattr(scheduler, "token_to_kv_pool_allocator", None)
    page, size = getattr(allocator, "page_size", None), getattr(allocator, "size", None)
    pool = None
    if isinstance(page, int) and isinstance(size, int) and page > 0:
        free = int(allocator.available_size())
        evictable = reach(scheduler, "tree_cache.evictable_size")
        free += int(evictable()) if callable(evictable) else 0
        pool = SimpleNamespace(
            num_gpu_blocks=size // page + 1,  # vLLM counts the block that is always empty
            get_num_free_blocks=lambda: free // page,
        )
    return SimpleNamespace(
        running=reach(scheduler, "running_batch.reqs") or (),
        waiting=getattr(scheduler, "waiting_queue", None) or (),
        kv_cache_manager=SimpleNamespace(block_pool=pool),
    )


def _is_first_rank(recorder: Recorder) -> bool:
    """Return whether this process writes what all ranks of a replica have in common."""
    return kept(recorder).rank in (0, None)


def extended(batch: Any, count: int) -> list[int]:
    """Return the tokens that a batch computes of each request: one, where it decodes."""
    test = getattr(getattr(batch, "forward_mode", None), "is_extend", None)
    sizes = getattr(batch, "extend_lens", None)
    if callable(test) and test() and isinstance(sizes, list) and len(sizes) == count:
        return [int(size) for size in sizes]
    return [1] * count


def failed_requests(frames: Sequence[FrameType]) -> list[dict[str, object]] | None:
    """Return the requests of the batch that failed, never a prompt; its items are not read."""
    for frame in frames:
        if "batch" not in frame.f_code.co_varnames:
            continue
        batch = frame.f_locals.get("batch")
        requests = getattr(batch, "reqs", None)
        if not isinstance(requests, list) or not all(hasattr(each, "rid") for each in requests):
            continue
        prompts = [getattr(request, "origin_input_ids", None) for request in requests]
        return [
            {
                "id": clean_id(request.rid),
                "scheduled_tokens": tokens,
                "prompt_tokens": None if prompt is None else len(prompt),
                "items": [],
            }
            for request, prompt, tokens in zip(
                requests[:MOST_REQUESTS], prompts, extended(batch, len(requests)), strict=False
            )
        ]
    return None
