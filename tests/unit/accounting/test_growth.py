"""Growth of memory by owner, within phases and between them."""

from __future__ import annotations

from tests.unit.accounting.findings.test_outside_torch import LEAK, report, start_up
from vllm_memprof.accounting.owners.growth import growth_by_owner
from vllm_memprof.units import MIB


def test_growth_has_gaps_and_adds_up() -> None:
    [rank] = report(start_up(profile=20 * MIB, gap=LEAK, warm_up=30 * MIB)).ranks
    table = growth_by_owner(rank)
    assert [(row.place, row.remainders["other"]) for row in table if row.remainders["other"]] == [
        ("profile_run", 20 * MIB),
        ("mm_profile", 20 * MIB),
        ("between profile_run and kv_cache_alloc", LEAK),
        ("warm_up", 30 * MIB),
        ("shutdown", -(50 * MIB + LEAK)),
    ]
    outermost = [row.remainders["other"] or 0 for row in table if row.depth == 0]
    assert sum(outermost) == 0
