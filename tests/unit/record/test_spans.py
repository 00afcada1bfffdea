"""Spans, their edges, and the walk to the phases around a span."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.accounting.builders import SECOND, snapshot, span
from vllm_memprof.record.spans import (
    DeviceMemory,
    ancestors,
    device_after,
    edges_of,
    first_of,
    is_within,
    last_of,
)

FIRST, SECOND_READING = snapshot(allocated_bytes=1), snapshot(allocated_bytes=2)
SPANS = [
    span("profile_run", FIRST, SECOND_READING),
    span("mm_profile", FIRST, None, 1, parent=0, depth=1, end_t_ns=None),
    span("empty_cache", None, SECOND_READING, 2, parent=1, depth=2, start_t_ns=None),
    span("empty_cache", None, None, 3),
]


def test_a_span_has_the_snapshots_of_its_edges() -> None:
    whole, left_open, ended, bare = SPANS
    assert (whole.before, whole.after) == (FIRST, SECOND_READING)
    assert (left_open.before, left_open.after) == (FIRST, None)
    assert (ended.before, ended.after) == (None, SECOND_READING)
    assert bare.edges == []
    read = [(each.order, edge.side) for each, edge in edges_of(SPANS)]
    assert read == [(0, "before"), (0, "after"), (1, "before"), (2, "after")]


def test_a_span_without_an_end_is_open() -> None:
    assert [each.open for each in SPANS] == [False, True, False, False]
    assert [each.seconds for each in SPANS] == [1.0, None, None, 1.0]
    assert SPANS[0].end_t_ns == SECOND


def test_details_are_read_by_their_kind() -> None:
    detailed = span("communicator", None, None, detail={"bytes": 5, "group": "tp:0", "ranks": [0]})
    assert (detailed.integer("bytes"), detailed.integer("group")) == (5, None)
    assert (detailed.string("group"), detailed.string("missing")) == ("tp:0", None)


def test_ancestors_are_the_phases_around_the_innermost_first() -> None:
    assert [each.phase for each in ancestors(SPANS, SPANS[2])] == ["mm_profile", "profile_run"]
    assert list(ancestors(SPANS, SPANS[0])) == []
    assert [each.order for each in ancestors([SPANS[0], SPANS[2]], SPANS[2])] == []
    assert [each.order for each in ancestors([SPANS[1], SPANS[2]], SPANS[2])] == [1]


def test_a_span_lies_within_a_phase_or_a_passage() -> None:
    assert is_within(SPANS, SPANS[2], "profile_run")
    assert is_within(SPANS, SPANS[2], 1)
    assert not is_within(SPANS, SPANS[0], "profile_run")
    assert not is_within(SPANS, SPANS[3], "profile_run")


def test_first_and_last_passage() -> None:
    assert first_of(SPANS, "empty_cache") is SPANS[2]
    assert last_of(SPANS, "empty_cache") is SPANS[3]
    assert first_of(SPANS, "warm_up") is last_of(SPANS, "warm_up") is None


def test_the_device_after_a_phase_is_that_of_its_last_edge_with_a_total() -> None:
    def ending(order: int, rest: int | None, side: str = "after"):  # type: ignore[no-untyped-def]
        owners = DeviceMemory([], rest)
        whole = span("request", None, None, order)
        return replace(whole, **{side: FIRST}, owners={side: owners})

    spans = [ending(0, 7), ending(1, 8), ending(2, None), ending(3, 9, "before")]
    found = device_after(spans, "request")
    assert found is not None
    assert found.unexplained_bytes == 8
    assert device_after(spans, "sleep") is None
    assert device_after(SPANS, "profile_run") is None
