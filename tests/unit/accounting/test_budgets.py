"""The KV cache that fits into requested memory: each item from a measurement on hardware."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.accounting.builders import gib, recorded, snapshot, span
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.budget.budgets import fits_request, items_not_subtracted
from vllm_memprof.accounting.budget.equations import select
from vllm_memprof.accounting.model import Reading
from vllm_memprof.accounting.readings.quantities import StartupReadings
from vllm_memprof.record.spans import Span
from vllm_memprof.units import GIB

SEED = json.loads((Path(__file__).parents[2] / "data" / "hardware_910b_tp2.json").read_text())[
    "new_method"
]
E4, _ = select("vllm-ascend", "0.23.0")
assert E4 is not None
NAMES = E4.not_subtracted


def reading(moment: str, allocated: float) -> Any:
    """A line of the measurement's phase table; what was allocated then is 9.45 throughout."""
    row = SEED["phases"][moment]
    return snapshot(
        allocated_bytes=gib(allocated),
        allocated_peak_bytes=gib(row["torch_peak"]),
        reserved_bytes=gib(row["torch_memory"]),
        non_torch_bytes=gib(row["non_torch"]),
    )


def profile_spans() -> list[Span]:
    before = reading("after_profile_run_before_empty_cache", 9.45)
    after = reading("after_profile_run_after_empty_cache", 9.45)
    first = reading("before_profile_run", 9.45)
    return [
        span("profile_run", first, after, 0),
        span("empty_cache", first, first, 1, parent=0, depth=1),
        span("empty_cache", before, after, 2, parent=0, depth=1),
    ]


def figures(**changes: Any) -> dict[str, Any]:
    phases = SEED["phases"]
    values: dict[str, Any] = {
        "weights_bytes": gib(SEED["weights"]),
        "profile_before_allocated_peak_bytes": gib(phases["before_profile_run"]["torch_peak"]),
        "initial_non_torch_bytes": gib(phases["before_hccl_init"]["non_torch"]),
        "graph_bytes": None,
    }
    return {**values, **changes}


def items(
    spans: list[Span] | None = None, simulated: bool = False, **changes: Any
) -> dict[str, Reading]:
    phases = profile_spans() if spans is None else spans
    readings = StartupReadings(phases, figures(**changes), simulated)
    return {item.name: item for item in items_not_subtracted(NAMES, readings)}


def test_the_decomposition_of_the_measured_cards() -> None:
    """The two profiling methods differ by 0.90 GiB: 0.35 + 0.26 + 0.30, as printed."""
    found = items()
    printed = {
        name: f"{(found[name].bytes or 0) / GIB:.2f}"
        for name in ("initial_non_torch", "persistent_torch")
    }
    assert printed == {"initial_non_torch": "0.35", "persistent_torch": "0.26"}
    assert found["reserved_not_allocated"].bytes == gib(9.75) - gib(9.45)  # 0.30
    assert found["non_torch_cleared"].bytes == gib(1.07) - gib(
        0.91
    )  # 0.16, subtracted by neither method
    total = sum(
        found[name].bytes or 0
        for name in ("initial_non_torch", "persistent_torch", "reserved_not_allocated")
    )
    assert total / GIB == pytest.approx(44.30 - 43.40, abs=0.02)


def test_the_authors_own_correction() -> None:
    """Less the context, what empty_cache freed, and tensors outside the weights: 43.54 of 44.30."""
    found = items()
    charged = [
        found[name] for name in ("persistent_torch", "initial_non_torch", "non_torch_cleared")
    ]
    corrected = fits_request(gib(SEED["kv_cache"]), charged)
    assert corrected is not None
    assert corrected / GIB == pytest.approx(SEED["corrected_by_author"]["kv_cache"][1], abs=0.02)


def test_without_a_graph_the_item_does_not_apply() -> None:
    item = items()["graph"]
    assert (item.bytes, item.required) == (None, False)
    assert item.reason


def test_a_captured_graph_is_charged() -> None:
    plain, captured = items(), items(graph_bytes=gib(0.3))
    budget = gib(44.3)
    assert fits_request(budget, list(captured.values())) == (
        fits_request(budget, list(plain.values())) or 0
    ) - gib(0.3)


def test_every_item_has_a_formula_and_a_source() -> None:
    for item in items(graph_bytes=5).values():
        assert item.formula
        assert item.source
        assert item.how in ("measured", "derived")


def test_on_a_simulated_device_non_torch_is_modelled() -> None:
    found = items(simulated=True)
    assert {name for name, item in found.items() if item.how == "modelled"} == {
        "initial_non_torch",
        "non_torch_cleared",
        "graph",
        "late_non_torch",
    }


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"weights_bytes": None}, "persistent_torch"),
        ({"initial_non_torch_bytes": None}, "initial_non_torch"),
    ],
)
def test_a_missing_ingredient_makes_the_budget_unknown(change: dict[str, Any], name: str) -> None:
    found = items(**change)
    assert found[name].bytes is None
    assert found[name].reason
    assert fits_request(gib(44.3), list(found.values())) is None


def test_without_snapshots_of_the_profile_run() -> None:
    found = items(spans=[])
    assert found["reserved_not_allocated"].bytes is None
    assert found["non_torch_cleared"].bytes is None
    assert fits_request(gib(44.3), list(found.values())) is None


def test_an_empty_cache_elsewhere_is_not_the_profile_run_s() -> None:
    outside = span("empty_cache", snapshot(non_torch_bytes=9), snapshot(non_torch_bytes=1), 3)
    assert items(spans=[*profile_spans(), outside])["non_torch_cleared"].bytes == gib(1.07) - gib(
        0.91
    )


def test_a_neighbour_s_memory_is_not_taken_for_the_context() -> None:
    item = items(initial_non_torch_bytes=gib(12))["initial_non_torch"]
    assert item.bytes is None
    assert item.reason is not None
    assert "other processes" in item.reason


def test_non_torch_that_came_after_profiling() -> None:
    """1.30 at the end, 1.07 at the peak of profiling, 0.07 came with the graphs: 0.16 is late."""
    capture = span(
        "graph_capture", snapshot(non_torch_bytes=gib(0.91)), snapshot(non_torch_bytes=gib(0.98)), 3
    )
    warm_up = span(
        "warm_up", snapshot(non_torch_bytes=gib(0.91)), snapshot(non_torch_bytes=gib(1.30)), 4
    )
    item = items(spans=[*profile_spans(), capture, warm_up])["late_non_torch"]
    assert item.bytes == gib(1.30) - gib(1.07) - (gib(0.98) - gib(0.91))


def test_a_warm_up_that_failed_says_nothing_about_late_memory() -> None:
    high = snapshot(non_torch_bytes=gib(1.30))
    spans = [
        *profile_spans(),
        span("graph_capture", high, high, 3, error="E"),
        span("warm_up", high, high, 4, error="E"),
    ]
    found = items(spans=spans)
    assert found["late_non_torch"].bytes is None
    assert found["graph"].reason == "graph_capture failed"


def test_no_warm_up_no_late_memory_and_still_a_budget() -> None:
    found = items()
    assert (found["late_non_torch"].bytes, found["late_non_torch"].required) == (None, False)
    assert fits_request(gib(44.3), list(found.values())) is not None


def test_an_unknown_budget_fits_nothing() -> None:
    assert fits_request(None, list(items().values())) is None


@given(
    granted=st.integers(-(2**40), 2**40),
    sizes=st.lists(st.one_of(st.none(), st.integers(0, 2**38)), max_size=6),
    change=st.integers(1, 2**36),
    data=st.data(),
)
def test_what_fits_is_the_equation_s_less_every_item(
    granted: int, sizes: list[int | None], change: int, data: st.DataObject
) -> None:
    """To the byte; an item that grows takes as much; a required one that is unknown leaves None."""
    given_items = [Reading(size, required=size is not None) for n, size in enumerate(sizes)]
    fitting = fits_request(granted, given_items)
    assert fitting == granted - sum(size for size in sizes if size is not None)
    known = [n for n, size in enumerate(sizes) if size is not None]
    if known:
        n = data.draw(st.sampled_from(known))
        grown = [
            replace(item, bytes=(item.bytes or 0) + change) if i == n else item
            for i, item in enumerate(given_items)
        ]
        assert fits_request(granted, grown) == fitting - change
        lost = [replace(item, bytes=None) if i == n else item for i, item in enumerate(given_items)]
        assert fits_request(granted, lost) is None


def test_what_fits_of_a_run_is_the_sum_of_its_rows() -> None:
    for rank in build_report(recorded("recorded_tp2")).ranks:
        budget = rank.budget
        assert budget.kv_cache_bytes is not None
        known = [item.bytes for item in budget.not_subtracted if item.bytes is not None]
        assert len(known) >= 4
        assert budget.fits_request_bytes == budget.kv_cache_bytes - sum(known)
