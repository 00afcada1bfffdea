"""The largest batches of an engine: their sizes follow from its limits, and what ran is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_memprof.engines.vllm.batch_limits import Limits
from vllm_memprof.engines.vllm.full_step import Step, largest, most_encoded, text_of

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
    made = list(text_of(limits))
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
    first, *_ = text_of(replace(ROOMY, length=500))
    beginnings = [tuple(prompt.text[:128]) for prompt in first]
    assert len(set(beginnings)) == len(beginnings)
    assert len(beginnings) > 10


def test_what_was_run_is_counted() -> None:
    steps = [Step([2048, 10], [0, 0], []), Step([1, 1, 5], [4000, 500, 0], [])]
    found = largest(steps)  # not a decode: the third request computes more
    assert (found["prefill_tokens"], found["decode_requests"]) == (2058, None)
    steps.append(Step([1, 1], [4001, 501], []))
    assert (largest(steps)["decode_requests"], largest(steps)["decode_length"]) == (2, 502)
    steps.append(Step([1, 1], [4002, 502], []))
    steps.append(Step([1], [9000], []))
    found = largest(steps)
    assert (found["decode_requests"], found["decode_length"]) == (2, 503), "fewer are no larger"
    assert set(largest([]).values()) == {None}


def test_items_are_counted_in_the_step_that_encodes_most() -> None:
    steps = [Step([4096], [0], [])]
    assert set(most_encoded(steps).values()) == {None}
    steps += [Step([2048], [0], [1024, 900]), Step([8192], [0], [1024])]
    assert most_encoded(steps) == {"items": 2, "encoder_tokens": 1924, "step_tokens": 2048}


@pytest.mark.parametrize("requests", [1, 16])
def test_the_last_batch_runs_some_steps_of_nothing_but_decode(requests: int) -> None:
    *_, last = text_of(replace(ROOMY, requests=requests))
    assert [prompt.new_tokens for prompt in last] == [4] * requests
