"""What bounds the batches of an engine, and the lengths of prompts that follow from it.

Plain arithmetic, from the engine's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

#: New tokens of a decoding request: the one that its prompt ends with, and steps of nothing else.
NEW_TOKENS = 4
#: Prefill steps that a decode batch without prefix caching may cost.
_PREFILL_STEPS = 64
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

    def longest(self) -> int:
        """Return the most tokens that a prompt may have."""
        return max(1, min(self.length - 1, self.cached_tokens - self.block_size))

    def in_blocks(self, tokens: int) -> int:
        """Return tokens rounded up to whole blocks of the KV cache."""
        return -(-tokens // self.block_size) * self.block_size

    def without(self, tokens: int) -> Limits:
        """Return what a request with a prompt of so many tokens leaves of a step."""
        return replace(
            self,
            batched_tokens=self.batched_tokens - tokens,
            requests=self.requests - 1,
            cached_tokens=self.cached_tokens - self.in_blocks(tokens + 1),
        )

    def prefill(self) -> list[int]:
        """Return the lengths of the prompts of the prefill batch.

        Together they fill a step where so many requests of so many tokens may run.
        """
        longest = self.longest()
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
        longest = self.length - NEW_TOKENS
        if self.shares_prefixes:
            # each request holds the shared blocks and at most two of its own
            held = self.cached_tokens - 2 * self.requests * self.block_size
            longest = min(longest, held)
            # one token beyond whole blocks: the first step of a request computes nothing else
            return max(1, (longest - 1) // self.block_size * self.block_size + 1)
        each = self.cached_tokens // self.requests - self.block_size
        computed = _PREFILL_STEPS * self.batched_tokens // self.requests
        return max(1, min(longest, each, computed))


def token_ids(length: int, first: int) -> list[int]:
    """Return a prompt; those of different ``first`` share no prefix."""
    return [_FIRST_ID + (first + place) % _IDS for place in range(length)]
