"""Arguments that answer a finding: to the byte, and none where no argument does it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.unit.accounting.builders import gib, recorded
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.findings.advice import (
    device_total,
    higher_share,
    least_granted,
    leave_a_kv_cache,
    leave_room,
    most_accepted,
)
from vllm_memprof.accounting.model import RankReport


@pytest.fixture(scope="module")
def ranks() -> list[RankReport]:
    return build_report(recorded("skewed_tp2")).ranks


def test_the_smallest_kv_cache_of_all_ranks_sets_the_size(ranks: list[RankReport]) -> None:
    grants = [rank.budget.engine_kv_cache_bytes or 0 for rank in ranks]
    size = min(grants) - gib(1)
    assert grants[0] != grants[1]
    for rank in ranks:
        said = leave_room(rank, gib(1), least_granted(ranks))
        assert said == {"argument": f"--kv-cache-memory-bytes {size}"}
        both = leave_room(rank, gib(1), least_granted(ranks), by_utilization=True)
        assert both["argument"] == said["argument"]
        assert both["other"].startswith("--gpu-memory-utilization 0.9")


def test_more_than_there_is_leaves_no_room(ranks: list[RankReport]) -> None:
    assert leave_room(ranks[0], gib(64), least_granted(ranks)) == {}
    ignored = replace(ranks[0], budget=replace(ranks[0].budget, takes_fixed_size=False))
    assert leave_room(ignored, gib(1), least_granted(ranks)) == {}


def test_a_utilization_of_1_or_more_makes_up_for_nothing(ranks: list[RankReport]) -> None:
    share, total = ranks[0].budget.gpu_memory_utilization or 0, device_total(ranks[0]) or 0
    assert 0.9 < float(str(higher_share(ranks[0], gib(1), ranks)["share"])) < 1
    assert higher_share(ranks[0], round((1 - share) * total), ranks) == {"none": True}


def test_a_total_that_was_not_recorded_is_the_request_over_its_share(
    ranks: list[RankReport],
) -> None:
    budget = replace(
        ranks[0].budget, device_total_bytes=None, requested=gib(30), gpu_memory_utilization=0.5
    )
    bare = replace(ranks[0], device_total_bytes=None, budget=budget)
    assert device_total(bare) == gib(60)
    assert device_total(replace(bare, budget=replace(budget, requested=None))) is None


def test_how_much_more_a_kv_cache_takes(ranks: list[RankReport]) -> None:
    assert leave_a_kv_cache(ranks[0], 0, ranks) == {"unknown": True}
    budget = replace(ranks[0].budget, gpu_memory_utilization=0.5)
    half = replace(ranks[0], device_total_bytes=gib(60), budget=budget)

    def said(rank: RankReport, missing: int) -> dict[str, object]:
        return leave_a_kv_cache(rank, missing, [rank])

    assert said(half, gib(6)) == {"share": 0.6}
    assert said(half, gib(31)) == {"none": True}
    unknown = replace(budget, device_total_bytes=None, requested=None)
    bare = replace(half, device_total_bytes=None, budget=unknown)
    assert said(bare, gib(6)) == {"more": gib(6)}
    e4p = replace(half, budget=replace(budget, equation="E4p"))
    assert said(e4p, gib(6)) == {"share": 0.7}
    printed = replace(half, half_units={"kv_cache_bytes": gib(0.005)})
    assert said(printed, gib(6)) == {"share": 0.6001}


def test_no_suggestion_asks_for_more_than_is_free(ranks: list[RankReport]) -> None:
    """Engines that check raise where less is free than wanted x total, on any of their ranks."""
    budget = replace(ranks[0].budget, gpu_memory_utilization=0.5, equation="E3")
    crowded = replace(
        ranks[0], device_total_bytes=gib(60), initial_free_bytes=gib(40), budget=budget
    )
    roomy = replace(crowded, initial_free_bytes=gib(59))
    assert higher_share(crowded, gib(6), [crowded]) == {"share": 0.6}
    refused = {"most": 0.6666, "gain": int((0.6666 - 0.5) * gib(60))}
    assert higher_share(crowded, gib(12), [crowded]) == refused
    assert higher_share(roomy, gib(12), [roomy, crowded]) == refused
    assert higher_share(roomy, gib(12), [roomy]) == {"share": 0.7}
    assert leave_a_kv_cache(crowded, gib(12), [crowded]) == refused
    assert leave_a_kv_cache(roomy, gib(12), [roomy]) == {"share": 0.7}
    unknown = replace(crowded, initial_free_bytes=None)
    assert higher_share(unknown, gib(12), [unknown]) == {"share": 0.7, "start": gib(42)}
    e2 = replace(crowded, budget=replace(budget, equation="E2"))  # does not check
    assert higher_share(e2, gib(12), [e2]) == {"share": 0.7}


@pytest.mark.parametrize(("free", "total"), [(52.63, 79.32), (19.77, 22.05), (50.0, 60.96)])
def test_the_largest_share_is_accepted_whatever_was_rounded(
    ranks: list[RankReport], free: float, total: float
) -> None:
    half = gib(0.005)
    printed = replace(
        ranks[0],
        device_total_bytes=gib(total),
        initial_free_bytes=gib(free),
        half_units={"initial_free_bytes": half, "device_total_bytes": half},
    )
    share = most_accepted([printed])
    assert share is not None
    assert math.ceil((gib(total) + half) * share) <= gib(free) - half
    assert (share + 0.0001) * (gib(total) + half) > gib(free) - half
