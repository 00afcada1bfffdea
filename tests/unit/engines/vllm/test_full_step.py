"""The largest batches of an engine: their sizes follow from its limits, and what ran is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_memprof.engines.vllm.batch_limits import Limits
from vllm_memprof.engines.vllm.full_step import LargestSteps, batches

ROOMY = Limits(
    batched_tokens=8192,
    requests=16,
    length=32768,
    cached_tokens=640_000,
    block_size=128,
    shares_prefixes=True,
)
SIZES = st.builds(
    Limits,
    batched_tokens=st.integers(64, 65536),
    requests=st.integers(1, 64),
    length=st.integers(8, 40_000),
    cached_tokens=st.integers(40, 4000).map(lambda blocks: blocks * 128),
    block_size=st.just(128),
    shares_prefixes=st.booleans(),
)


def test_a_long_prompt_fills_a_step() -> None:
    assert ROOMY.prefill() == [32767]


def test_short_prompts_fill_a_step_together() -> None:
    short = replace(ROOMY, length=3000)
    assert short.prefill() == [2999, 2999, 2194]
    assert sum(short.prefill()) == short.batched_tokens


def test_fewer_requests_than_would_fill_a_step_are_not_exceeded() -> None:
    assert replace(ROOMY, length=3000, requests=2).prefill() == [2999, 2999]


def test_a_decode_is_of_full_length_where_its_prompt_is_shared() -> None:
    # the fourth new token is at most the last of the length; one token beyond whole blocks
    assert ROOMY.decode() == (32764 - 1) // 128 * 128 + 1
    # without prefix caching each request holds its own: 640,000 tokens for 16
    assert replace(ROOMY, shares_prefixes=False).decode() == 32764
    assert replace(ROOMY, shares_prefixes=False, requests=64).decode() == 8192
    assert replace(ROOMY, shares_prefixes=False, cached_tokens=32_000).decode() == 2000 - 128


@settings(max_examples=40)
@given(limits=SIZES)
def test_every_batch_is_within_the_limits(limits: Limits) -> None:
    made = list(batches(limits))
    assert len(made) == (3 if limits.shares_prefixes else 2)
    for batch in made:
        assert 1 <= len(batch) <= limits.requests
        for prompt in batch:
            assert prompt.new_tokens >= 1
            assert len(prompt.text) >= 1
            assert len(prompt.text) + prompt.new_tokens <= limits.length or len(prompt.text) == 1
            assert len(prompt.text) <= limits.cached_tokens
            assert prompt.tokens == prompt.text
    assert len(made[-1]) == limits.requests
    assert len({tuple(prompt.text) for prompt in made[-1]}) == 1


def test_prompts_of_one_batch_share_no_block() -> None:
    first, *_ = batches(replace(ROOMY, length=500))
    beginnings = [tuple(prompt.text[:128]) for prompt in first]
    assert len(set(beginnings)) == len(beginnings)
    assert len(beginnings) > 10


def test_what_was_run_is_counted() -> None:
    seen = LargestSteps()
    seen.count({"a": 2048, "b": 10}, {})
    seen.count({"a": 1, "b": 1, "c": 5}, {"a": 4000, "b": 500})  # not a decode: c computes more
    assert (seen.prefill_tokens, seen.decode_requests, seen.steps) == (2058, 0, 2)
    seen.count({"a": 1, "b": 1}, {"a": 4001, "b": 501})
    assert (seen.decode_requests, seen.decode_length) == (2, 502)
    seen.count({"a": 1}, {"a": 9000})
    assert (seen.decode_requests, seen.decode_length) == (2, 502), "fewer requests are no larger"


def test_items_are_counted_in_the_step_that_encodes_most() -> None:
    seen = LargestSteps()
    seen.count_items([], 4096)
    assert (seen.items, seen.encoder_tokens, seen.step_tokens) == (0, 0, 0)
    seen.count_items([1024, 900], 2048)
    seen.count_items([1024], 8192)
    assert (seen.items, seen.encoder_tokens, seen.step_tokens) == (2, 1924, 2048)


@pytest.mark.parametrize("requests", [1, 16])
def test_the_last_batch_runs_some_steps_of_nothing_but_decode(requests: int) -> None:
    *_, last = batches(replace(ROOMY, requests=requests))
    assert [prompt.new_tokens for prompt in last] == [4] * requests
