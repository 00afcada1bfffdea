"""Causes: their order, and whole tokens that keep the sum of their shares."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from vllm_memprof.accounting.model import Kv
from vllm_memprof.compare.causes import (
    BLOCKS,
    ROUNDING,
    STATE,
    UNKNOWN,
    Cause,
    apportion,
    in_order,
    in_tokens,
)


@given(st.lists(st.fractions(min_value=-(10**6), max_value=10**6), max_size=12))
def test_shares_are_next_to_their_worth_and_keep_the_sum(worth: list[Fraction]) -> None:
    whole = [*worth, -sum(worth, Fraction(0)) + 5]
    shares = apportion(whole)
    assert sum(shares) == 5
    assert all(abs(share - value) < 1 for share, value in zip(shares, whole, strict=True))


def test_the_largest_comes_first_and_roundings_last() -> None:
    sizes = [(STATE, 3), (ROUNDING, -9), (UNKNOWN, None), (STATE, -7), (BLOCKS, 0)]
    causes = [Cause((str(n),), "t", kind, size) for n, (kind, size) in enumerate(sizes)]
    assert [cause.bytes for cause in in_order(causes)] == [-7, 3, None, -9, 0]


def test_a_smaller_block_is_a_cause_of_tokens_alone() -> None:
    """A: 10 blocks of 128 tokens and 1,280 bytes; B: the same bytes, 5 bytes per token."""
    a = Kv(tokens=1_280, blocks=10, bytes_per_block=1_280)
    b = Kv(tokens=2_560, blocks=20, bytes_per_block=640)
    same = [Cause(("weights",), "weights", STATE, 0)]
    found = in_tokens(same, 12_800, a, 12_800, b, rounded=False)
    assert [(cause.names, cause.kv_tokens) for cause in found] == [
        (("weights",), 0),
        (("bytes_per_token",), 1_280),
    ]
    assert in_tokens(same, 12_800, Kv(), 12_800, b, rounded=False) == same
