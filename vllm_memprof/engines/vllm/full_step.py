"""The largest batches that an engine may be given, run through its own scheduler.

A plan that goes on until the engine is ready ends with them: what an engine holds while it serves
is seen and not estimated. These batches, after each other:

* of a model that takes images, video or audio, the largest batch of each (``multimodal_batch``);
  they go first, so that the encoder's cache is as full in the others as in a server;
* a prefill of ``max_num_batched_tokens`` in one step, by one long prompt or several;
* a decode of ``max_num_seqs`` requests, each at its full length. They have the same prompt, so that
  with prefix caching they share its blocks and nearly nothing is computed again. Without it, the
  length is what the KV cache holds of so many requests, and what a bounded number of steps can
  compute.

The requests sample with temperature, top-k and
top-p, as the generation configurations of most models ask for. Imports vLLM where it runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_memprof.engines.vllm import multimodal_batch
from vllm_memprof.engines.vllm.batch_limits import NEW_TOKENS, Limits, token_ids
from vllm_memprof.engines.vllm.multimodal_batch import Prompt

#: How the requests sample.
SAMPLING = {
    "temperature": 0.7, "top_p": 0.95, "top_k": 20, "ignore_eos": True, "detokenize": False,
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A step as the scheduler made it."""

    scheduled: list[int]  # tokens of each of its requests
    lengths: list[int]  # tokens of each before it
    embeds: list[int]  # tokens that the encoder gives of each item that it encodes


def text_of(limits: Limits) -> Iterator[list[Prompt]]:
    """Yield the batches of text in their order."""
    lengths = limits.prefill()
    yield [Prompt(token_ids(length, index)) for index, length in enumerate(lengths)]
    shared = token_ids(limits.decode(), len(lengths))
    if limits.shares_prefixes:
        yield [Prompt(shared)]
    yield [Prompt(shared, new_tokens=NEW_TOKENS)] * limits.requests


def drive(core: Any, vllm_config: Any) -> dict[str, Any]:
    """Run the largest batches; returns the keys of a ``full_step`` event.

    Args:
        core: an ``EngineCore`` of this process that is ready.
        vllm_config: its configuration.

    Raises:
        Exception: what the engine raises, an allocation that failed among others.
    """
    limits, model = Limits.of(vllm_config), vllm_config.model_config
    not_run = None
    if model.runner_type != "generate":
        not_run = "the model generates no tokens"
    elif vllm_config.kv_transfer_config is not None:
        not_run = "its KV cache is exchanged with another engine"
    began = time.monotonic()
    modalities: list[dict[str, Any]] = []
    steps: list[Step] = []
    if not_run is None:
        found = list(multimodal_batch.largest(vllm_config, core.scheduler, limits))
        for batch in sorted(found, key=multimodal_batch.Batch.largest_item, reverse=True):
            of_items = run(core, batch.modality, batch.prompts)
            steps += of_items
            modalities.append(
                {
                    "modality": batch.modality,
                    **most_encoded(of_items),
                    "encoder_budget": batch.encoder_tokens,
                    "not_run": batch.not_run,
                }
            )
        for number, texts in enumerate(text_of(limits)):
            steps += run(core, str(number), texts)
    return {
        **largest(steps),
        "max_num_batched_tokens": limits.batched_tokens,
        "max_num_seqs": limits.requests,
        "max_model_len": limits.length,
        "multimodal": bool(getattr(model, "is_multimodal_model", False)),
        "modalities": modalities,
        "steps": len(steps),
        "seconds": round(time.monotonic() - began, 3),
        "not_run": not_run,
    }


def largest(steps: Sequence[Step]) -> dict[str, int | None]:
    """Return the tokens of the largest step, and the requests that decoded together in one.

    Of steps that decode as many the last counts: its requests are the longest.
    """
    decodes = [
        (len(step.scheduled), min(step.lengths) + 1)
        for step in reversed(steps)
        if {*step.scheduled} == {1}
    ]
    requests, length = max(decodes, key=lambda decode: decode[0], default=(None, None))
    return {
        "prefill_tokens": max((sum(step.scheduled) for step in steps), default=None),
        "decode_requests": requests,
        "decode_length": length,
    }


def most_encoded(steps: Sequence[Step]) -> dict[str, int | None]:
    """Return the items and tokens of the step that encodes most; None where none encodes any."""
    sizes = [
        (sum(step.embeds), sum(step.scheduled), len(step.embeds)) for step in steps if step.embeds
    ]
    encoded, tokens, items = max(sizes, default=(None, None, None))
    return {"items": items, "encoder_tokens": encoded, "step_tokens": tokens}


def run(core: Any, batch: str, prompts: Sequence[Prompt]) -> list[Step]:
    """Add the requests of a batch at once, and step until all have ended; returns its steps."""
    steps: list[Step] = []
    requests = {f"batch-{batch}-{at}": prompt for at, prompt in enumerate(prompts)}
    schedule = core.scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        if scheduled:
            cached = output.scheduled_cached_reqs
            computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            embeds = [
                requests[name].items[place].embeds
                for name, places in output.scheduled_encoder_inputs.items()
                for place in places
            ]
            lengths = [int(computed.get(name, 0)) for name in scheduled]
            steps.append(Step([*scheduled.values()], lengths, embeds))
        return output

    core.scheduler.schedule = counted
    try:
        for name, prompt in requests.items():
            core.add_request(*core.preprocess_add_request(_request(name, prompt)))
        while core.scheduler.has_requests() or core.batch_queue:
            _, executed = core.step_fn()
            core.post_step(executed)
    finally:
        core.scheduler.schedule = schedule
    return steps


def _request(name: str, prompt: Prompt) -> Any:
    from vllm.v1.engine import EngineCoreRequest

    from vllm import SamplingParams

    given = {
        "request_id": name,
        "prompt_token_ids": prompt.tokens,
        "mm_features": multimodal_batch.features_of(name, prompt.items) if prompt.items else None,
        "sampling_params": SamplingParams(**SAMPLING, max_tokens=prompt.new_tokens),
        "arrival_time": time.time(),
    }
    names, defaults = EngineCoreRequest.__struct_fields__, EngineCoreRequest.__struct_defaults__
    required = names[: len(names) - len(defaults)]  # other releases have others; None is "without"
    return EngineCoreRequest(**{name: given.get(name) for name in required})
