"""The largest batches that an engine may be given, run through its own scheduler.

A plan that goes on until the engine is ready ends with them: what an engine holds while it serves
is seen and not estimated. Two batches, after each other:

* a prefill of ``max_num_batched_tokens`` in one step, by one long prompt or several;
* a decode of ``max_num_seqs`` requests, each at its full length. They have the same prompt, so that
  with prefix caching they share its blocks and nearly nothing is computed again. Without it, the
  length is what the KV cache holds of so many requests, and what a bounded number of steps can
  compute.

Text alone: a multimodal batch is not among them. The requests sample with temperature, top-k and
top-p, as the generation configurations of most models ask for. Imports vLLM where it runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: New tokens of a decoding request: the one that its prompt ends with, and steps of nothing else.
_NEW_TOKENS = 4
#: Prefill steps that a decode batch without prefix caching may cost.
_PREFILL_STEPS = 64
#: How the requests sample.
SAMPLING = {
    "temperature": 0.7, "top_p": 0.95, "top_k": 20, "ignore_eos": True, "detokenize": False,
}  # fmt: skip
#: Token ids of prompts: below every vocabulary's size, above most special tokens.
_FIRST_ID, _IDS = 100, 800


@dataclass(frozen=True)
class Limits:
    """What bounds a batch, from the engine's configuration."""

    batched_tokens: int  # of a step
    requests: int  # that run at once
    length: int  # tokens of a request, prompt and answer
    cached_tokens: int  # that the KV cache holds
    block_size: int  # tokens
    shares_prefixes: bool

    @classmethod
    def of(cls, vllm_config: Any) -> Limits:
        """Return the limits of an engine whose KV cache is sized."""
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        block = int(cache.block_size)
        return cls(
            batched_tokens=int(scheduler.max_num_batched_tokens),
            requests=int(scheduler.max_num_seqs),
            length=int(vllm_config.model_config.max_model_len),
            cached_tokens=int(cache.num_gpu_blocks or 0) * block,
            block_size=block,
            shares_prefixes=bool(cache.enable_prefix_caching),
        )

    def prefill(self) -> list[int]:
        """Return the lengths of the prompts of the prefill batch.

        Together they fill a step where so many requests of so many tokens may run.
        """
        longest = max(1, min(self.length - 1, self.cached_tokens - self.block_size))
        if longest >= self.batched_tokens:
            return [longest]
        count = max(1, min(self.requests, self.cached_tokens // (longest + self.block_size)))
        lengths: list[int] = []
        left = self.batched_tokens
        while left > 0 and len(lengths) < count:
            lengths.append(min(longest, left))
            left -= lengths[-1]
        return lengths

    def decode(self) -> int:
        """Return the length of the prompt of each request of the decode batch."""
        longest = self.length - _NEW_TOKENS
        if self.shares_prefixes:
            # each request holds the shared blocks and at most two of its own
            held = self.cached_tokens - 2 * self.requests * self.block_size
            longest = min(longest, held)
            # one token beyond whole blocks: the first step of a request computes nothing else
            return max(1, (longest - 1) // self.block_size * self.block_size + 1)
        each = self.cached_tokens // self.requests - self.block_size
        computed = _PREFILL_STEPS * self.batched_tokens // self.requests
        return max(1, min(longest, each, computed))


@dataclass
class Seen:
    """The largest steps that were run, as the scheduler made them."""

    prefill_tokens: int = 0  # of one step
    decode_requests: int = 0  # that were in a step together, each with one token
    decode_length: int = 0  # tokens of the shortest of them, at that step
    steps: int = 0

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


def batches(limits: Limits) -> Iterator[list[tuple[list[int], int]]]:
    """Yield the batches in their order: (token ids of the prompt, new tokens) of each request."""
    lengths = limits.prefill()
    yield [(_tokens(length, index), 1) for index, length in enumerate(lengths)]
    shared = _tokens(limits.decode(), len(lengths))
    if limits.shares_prefixes:
        yield [(shared, 1)]
    yield [(shared, _NEW_TOKENS)] * limits.requests


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
    limits, seen = Limits.of(vllm_config), Seen()
    reason = not_run_because(vllm_config)
    began = time.monotonic()
    if reason is None:
        schedule = core.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            scheduled = dict(output.num_scheduled_tokens)
            if scheduled:
                seen.count(scheduled, dict(_computed(output)))
            return output

        core.scheduler.schedule = counted
        try:
            for number, batch in enumerate(batches(limits)):
                _run(core, number, batch)
        finally:
            core.scheduler.schedule = schedule
    return {
        "prefill_tokens": seen.prefill_tokens or None,
        "decode_requests": seen.decode_requests or None,
        "decode_length": seen.decode_length or None,
        "max_num_batched_tokens": limits.batched_tokens,
        "max_num_seqs": limits.requests,
        "max_model_len": limits.length,
        "multimodal": bool(getattr(vllm_config.model_config, "is_multimodal_model", False)),
        "steps": seen.steps,
        "seconds": round(time.monotonic() - began, 3),
        "not_run": reason,
    }


def _tokens(length: int, first: int) -> list[int]:
    """Return token ids; prompts of different ``first`` share no prefix."""
    return [_FIRST_ID + (first + place) % _IDS for place in range(length)]


def _computed(output: Any) -> Iterator[tuple[str, int]]:
    """Yield (request, tokens computed before this step) of a scheduler's output."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, int(new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, map(int, cached.num_computed_tokens), strict=True)


def _run(core: Any, number: int, batch: list[tuple[list[int], int]]) -> None:
    """Add the requests of a batch at once, and step until all have ended."""
    for place, (prompt, new_tokens) in enumerate(batch):
        request = _request(f"batch-{number}-{place}", prompt, new_tokens)
        core.add_request(*core.preprocess_add_request(request))
    while core.scheduler.has_requests() or core.batch_queue:
        _, executed = core.step_fn()
        core.post_step(executed)


def _request(name: str, prompt: list[int], new_tokens: int) -> Any:
    from vllm.v1.engine import EngineCoreRequest

    from vllm import SamplingParams

    given = {
        "request_id": name,
        "prompt_token_ids": prompt,
        "sampling_params": SamplingParams(**SAMPLING, max_tokens=new_tokens),
        "arrival_time": time.time(),
    }
    names, defaults = EngineCoreRequest.__struct_fields__, EngineCoreRequest.__struct_defaults__
    required = names[: len(names) - len(defaults)]  # other releases have others; None is "without"
    return EngineCoreRequest(**{name: given.get(name) for name in required})
