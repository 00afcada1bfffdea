"""What a rank read of its start-up: moments, and readings with their reasons."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.accounting.builders import snapshot, span
from vllm_memprof.accounting.readings.startup import Moments, growth
from vllm_memprof.units import GIB


def test_only_quantities_take_the_end_of_the_run_for_the_last_empty_cache() -> None:
    end = snapshot(allocated_bytes=3, device_free_bytes=7)
    whole = span("profile_run", snapshot(), end, 0)
    without = Moments([whole], {})
    assert without.moments["profiled"][:2] == (end, "the end of the profile run")
    assert without.moments["profile_end"].nearest is None
    assert without.own["profile_after_free_bytes"].bytes is None
    assert without.own["profile_after_free_bytes"].reason == "no reading at this edge"
    emptied = replace(end, device_free_bytes=9)
    call = span("empty_cache", end, emptied, 1, parent=0, depth=1)
    read = Moments([whole, call], {})
    assert [read.moments[name].nearest for name in ("profile_end", "profiled")] == [end, emptied]
    found = read.own["profile_after_free_bytes"]
    assert (found.bytes, found.tolerance_bytes, found.how) == (9, 2, "measured")


def test_a_difference_without_one_of_its_sides_names_it() -> None:
    found = Moments([], {}).own["non_torch_increase_bytes"]
    edge = "after the last empty_cache of the profile run"
    assert (found.bytes, found.reason) == (None, f"{edge}: no reading at this edge")


def test_ranks_of_a_replica_agree_on_the_least() -> None:
    def rank(free: int | None) -> Moments:
        at = snapshot(device_free_bytes=free)
        return Moments([span("empty_cache", at, at, 0), span("weight_load", at, at, 1)], {})

    ranks = [rank(60 * GIB), rank(50 * GIB)]
    found = replace(ranks[0], replica=ranks).own["least_free_before_load_bytes"]
    assert (found.bytes, found.tolerance_bytes) == (50 * GIB, 4096)
    unread = replace(ranks[0], replica=[*ranks, rank(None)]).own["least_free_before_load_bytes"]
    assert (unread.bytes, unread.reason) == (None, "another rank has no such reading")


def test_growth_is_unknown_where_one_side_is() -> None:
    start, end = snapshot(reserved_bytes=4), snapshot(reserved_bytes=9)
    assert growth(start, end, "reserved_bytes") == 5
    assert growth(None, end, "reserved_bytes") is None
    assert growth(start, snapshot(), "reserved_bytes") is None
