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
from vllm_memprof.engines.vllm.batch_limits import NEW_TOKENS, Limits
from vllm_memprof.engines.vllm.multimodal_batch import MediaItem

#: How the requests sample.
SAMPLING = {
    "temperature": 0.7, "top_p": 0.95, "top_k": 20, "ignore_eos": True, "detokenize": False,
}  # fmt: skip
#: Token ids of prompts: below every vocabulary's size, above most special tokens.
_FIRST_ID, _IDS = 100, 800


@dataclass(frozen=True)
class Prompt:
    """A request of a batch."""

    text: list[int]  # token ids, after its items
    new_tokens: int
    items: tuple[MediaItem, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """Token ids of the whole prompt."""
        return multimodal_batch.prompt_of(self.items) + self.text


@dataclass
class LargestSteps:
    """The largest steps that were run, as the scheduler made them."""

    prefill_tokens: int = 0  # of one step
    decode_requests: int = 0  # that were in a step together, each with one token
    decode_length: int = 0  # tokens of the shortest of them, at that step
    steps: int = 0
    items: int = 0  # that were encoded in a step together
    encoder_tokens: int = 0  # that the encoder gave in that step
    step_tokens: int = 0  # of that step

    def count(self, scheduled: dict[str, int], lengths: dict[str, int]) -> None:
        """Take one step in.

        Args:
            scheduled: tokens of the step, by request.
            lengths: tokens of a request before its step, by request.
        """
        self.steps += 1
        self.prefill_tokens = max(self.prefill_tokens, sum(scheduled.values()))
        ones = [lengths.get(name, 0) + 1 for name, tokens in scheduled.items() if tokens == 1]
        if len(ones) == len(scheduled) and len(ones) >= max(1, self.decode_requests):
            self.decode_requests, self.decode_length = len(ones), min(ones)

    def count_items(self, embeds: Sequence[int], step_tokens: int) -> None:
        """Take the items of one step in.

        Args:
            embeds: tokens that the encoder gives of each.
            step_tokens: of the step.
        """
        if (sum(embeds), step_tokens) > (self.encoder_tokens, self.step_tokens) and embeds:
            self.items, self.encoder_tokens = len(embeds), sum(embeds)
            self.step_tokens = step_tokens


def batches(limits: Limits) -> Iterator[list[Prompt]]:
    """Yield the batches of text in their order."""
    lengths = limits.prefill()
    yield [Prompt(_tokens(length, index), 1) for index, length in enumerate(lengths)]
    shared = _tokens(limits.decode(), len(lengths))
    if limits.shares_prefixes:
        yield [Prompt(shared, 1)]
    yield [Prompt(shared, NEW_TOKENS)] * limits.requests


def with_items(requests: Sequence[multimodal_batch.Request]) -> list[Prompt]:
    """Return the prompts of a batch of one modality."""
    return [Prompt(_tokens(text, 0), 1, items) for items, text in requests]


def not_run_because(vllm_config: Any) -> str | None:
    """Return why an engine's largest batches are not run; None where they are."""
    if vllm_config.model_config.runner_type != "generate":
        return "the model generates no tokens"
    if vllm_config.kv_transfer_config is not None:
        return "its KV cache is exchanged with another engine"
    return None


def drive(core: Any, vllm_config: Any) -> dict[str, Any]:
    """Run the largest batches; returns the keys of a ``full_step`` event.

    Args:
        core: an ``EngineCore`` of this process that is ready.
        vllm_config: its configuration.

    Raises:
        Exception: what the engine raises, an allocation that failed among others.
    """
    limits = Limits.of(vllm_config)
    reason = not_run_because(vllm_config)
    began = time.monotonic()
    modalities: list[dict[str, Any]] = []
    driver = _Driver(core)
    if reason is None:
        found = list(multimodal_batch.largest(vllm_config, core.scheduler, limits))
        for batch in sorted(found, key=multimodal_batch.Batch.largest_item, reverse=True):
            seen = driver.run(with_items(batch.requests)) if batch.requests else LargestSteps()
            modalities.append(
                {
                    "modality": batch.modality,
                    "items": seen.items or None,
                    "encoder_tokens": seen.encoder_tokens or None,
                    "encoder_budget": batch.encoder_tokens,
                    "step_tokens": seen.step_tokens or None,
                    "not_run": batch.not_run,
                }
            )
        for texts in batches(limits):
            driver.run(texts)
    seen = driver.seen
    return {
        "prefill_tokens": seen.prefill_tokens or None,
        "decode_requests": seen.decode_requests or None,
        "decode_length": seen.decode_length or None,
        "max_num_batched_tokens": limits.batched_tokens,
        "max_num_seqs": limits.requests,
        "max_model_len": limits.length,
        "multimodal": bool(getattr(vllm_config.model_config, "is_multimodal_model", False)),
        "modalities": modalities,
        "steps": seen.steps,
        "seconds": round(time.monotonic() - began, 3),
        "not_run": reason,
    }


def _tokens(length: int, first: int) -> list[int]:
    """Return token ids; prompts of different ``first`` share no prefix."""
    return [_FIRST_ID + (first + place) % _IDS for place in range(length)]


class _Driver:
    """Runs batches after each other, and counts their steps."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._batches = 0
        self.seen = LargestSteps()  # of all batches

    def run(self, batch: Sequence[Prompt]) -> LargestSteps:
        """Add the requests of a batch at once, and step until all have ended."""
        core, here = self._core, LargestSteps()
        requests = {f"batch-{self._batches}-{at}": prompt for at, prompt in enumerate(batch)}
        self._batches += 1
        schedule = core.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            scheduled = dict(output.num_scheduled_tokens)
            if scheduled:
                cached = output.scheduled_cached_reqs
                lengths = {  # tokens computed before this step
                    **{
                        new.req_id: int(new.num_computed_tokens)
                        for new in output.scheduled_new_reqs
                    },
                    **dict(zip(cached.req_ids, map(int, cached.num_computed_tokens), strict=True)),
                }
                embeds = [
                    requests[name].items[place].embeds
                    for name, places in output.scheduled_encoder_inputs.items()
                    for place in places
                ]
                for seen in (self.seen, here):
                    seen.count(scheduled, lengths)
                    seen.count_items(embeds, sum(scheduled.values()))
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
        return here


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
