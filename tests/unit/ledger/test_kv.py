"""KV arithmetic against figures that engines printed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.ledger.builders import gib
from vllm_memprof.ledger.kv import blocks_per_request, build_kv, tokens_for_bytes, worth_in_tokens
from vllm_memprof.ledger.model import Check, Kv

PAGE, LAYERS = 262_144, 36  # 2 x 128 tokens x 4 KV heads x 128 x 2 bytes
PER_BLOCK = PAGE * LAYERS


def plan(**changes: Any) -> dict[str, Any]:
    blocks = 5040
    group = {"type": "FullAttentionSpec", "layers": LAYERS, "block_size": 128, "page_size_bytes": PAGE}
    values: dict[str, Any] = {
        "blocks": blocks,
        "block_size": 128,
        "tokens": 645_120,
        "max_model_len": 65_536,
        "max_concurrency": blocks / 512,
        "available_bytes": [gib(44.3), gib(44.4)],
        "planned_bytes": [blocks * PER_BLOCK] * 2,
        "bytes_per_token": 73_728,
        "groups": [group | {"bytes_per_token": 73_728, "dtype": "bfloat16"}],
    }
    return {**values, **changes}


def checks(kv: Kv) -> dict[str, Check]:
    return {check.name.split(" ")[0]: check for check in kv.checks}


def test_the_measured_cards() -> None:
    """44.30 GiB are 5,040 blocks or 645,120 tokens; 43.54 GiB 4,953 blocks or 633,984 tokens."""
    kv = build_kv(plan(), 0, None)
    assert kv.bytes_per_block == 9_437_184
    assert tokens_for_bytes(kv, gib(44.30)) == 645_120
    assert tokens_for_bytes(kv, gib(43.54)) == 633_984
    assert blocks_per_request(kv) == 512


def test_cross_checks_hold() -> None:
    padded = 5040 * PER_BLOCK + 72 * 512
    kv = build_kv(plan(), 1, padded)
    assert [check.ok for check in kv.checks] == [True] * 5
    assert kv.available_bytes == gib(44.4)


@pytest.mark.parametrize(
    ("change", "first_word"),
    [
        ({"planned_bytes": [5040 * PER_BLOCK + 5040] * 2, "available_bytes": [0, 0]}, "planned"),
        ({"available_bytes": [gib(50), gib(50)]}, "blocks"),
        ({"tokens": 645_121}, "tokens"),
    ],
)
def test_cross_checks_fail(change: dict[str, Any], first_word: str) -> None:
    kv = build_kv(plan(**change), 0, None)
    failed = [check.name for check in kv.checks if check.ok is False]
    assert any(name.startswith(first_word) for name in failed)


def test_an_allocation_that_is_not_the_plan() -> None:
    kv = build_kv(plan(), 0, 4 * 5040 * PER_BLOCK)
    assert checks(kv)["allocated"].ok is False


def test_the_least_of_all_workers_counts() -> None:
    """With unequal shares of the layers each worker divides by its own bytes per block."""
    uneven = plan(
        planned_bytes=[5040 * 20 * PAGE, 5040 * 16 * PAGE], available_bytes=[5041 * 20 * PAGE, 5040 * 16 * PAGE]
    )
    kv = build_kv(uneven, 0, None)
    assert kv.bytes_per_block == 20 * PAGE
    assert next(check for check in kv.checks if "least" in check.name).ok is True


def test_hybrid_layouts_are_not_recomputed() -> None:
    window = {"type": "SlidingWindowSpec", "layers": 36, "block_size": 128, "page_size_bytes": PAGE}
    kv = build_kv(plan(groups=[*plan()["groups"], window], planned_bytes=[None, None]), 0, None)
    assert checks(kv)["tokens"].ok is None
    assert kv.bytes_per_block == PAGE * 36  # layers of different groups share their pools


def test_no_plan_no_figures() -> None:
    kv = build_kv(None, 0, 5)
    assert kv.tokens is None
    assert worth_in_tokens(kv, 5) is None


def test_a_rank_beyond_the_plan() -> None:
    assert build_kv(plan(), 7, None).available_bytes is None
    assert build_kv(plan(), None, None).available_bytes is None
    assert build_kv(plan(available_bytes=[5]), None, None).available_bytes == 5


@settings(deadline=None)
@given(size=st.integers(0, 2**37))
def test_tokens_are_whole_blocks(size: int) -> None:
    kv = build_kv(plan(), 0, None)
    assert tokens_for_bytes(kv, size) == size // PER_BLOCK * 128
    assert worth_in_tokens(kv, -size) == -(size // PER_BLOCK * 128)
    assert tokens_for_bytes(kv, -size - 1) == 0
