"""What releases from 0.26 on make of a budget before they return it: stages of the equation."""

from __future__ import annotations

import math

import pytest

from vllm_memprof.accounting.budget.equations import counted_per_byte, evaluate, select
from vllm_memprof.engines.equation import Equation
from vllm_memprof.units import GIB


def _row(release: str, device: str = "Ascend910B3") -> Equation:
    row, _ = select("vllm-ascend", release, device=device)
    assert row is not None
    return row


#: requested 54 GiB less 10 GiB of terms.
_BUDGET = 44 * GIB
_NEWER = {
    "device_total_bytes": 60 * GIB,
    "gpu_memory_utilization": 0.9,
    "requested_bytes": 54.0 * GIB,
    "weights_bytes": 8 * GIB,
    "peak_activation_bytes": GIB,
    "non_torch_increase_bytes": GIB,
}


@pytest.mark.parametrize(
    ("release", "figures", "expected"),
    [
        ("0.30.0rc2", {}, _BUDGET),
        # 12 layers of 4,096 bytes in one group, 24 layers of them in all
        (
            "0.30.0rc2",
            {"kv_largest_group_page_bytes": 12 << 12, "kv_all_page_bytes": 24 << 12},
            _BUDGET // 2,
        ),
        (
            "0.29.0rc1",
            {"kv_largest_group_page_bytes": 10, "kv_all_page_bytes": 30},
            int(_BUDGET * (10 / 30)),
        ),
        ("0.26.0rc1", {"kv_layer_reuse": 15.25}, int(_BUDGET * 15.25)),
        (
            "0.30.0rc2",
            {
                "kv_largest_group_page_bytes": 1,
                "kv_all_page_bytes": 4,
                "kv_layer_reuse": 2.0,
                "kv_planner_input_bytes": _BUDGET // 2,
                "kv_planner_bytes": 90 * GIB,
            },
            90 * GIB,
        ),
    ],
)
def test_stages_come_after_the_terms(
    release: str, figures: dict[str, float], expected: int
) -> None:
    row = _row(release)
    found = evaluate(row, {**_NEWER, **figures})
    assert found.kv_cache_bytes == expected
    # the rows of a table still add up to what the engine returns
    assert 54 * GIB - sum(term.bytes for term in found.terms if term.subtracted) == expected


def test_a_release_without_stages_ignores_their_figures() -> None:
    figures = {**_NEWER, "kv_layer_reuse": 2.0, "kv_all_page_bytes": 2}
    assert evaluate(_row("0.25.1rc1"), figures).kv_cache_bytes == _BUDGET
    assert counted_per_byte(_row("0.25.1rc1"), figures) == 1.0


def test_bytes_counted_per_byte_of_the_device() -> None:
    row = _row("0.30.0rc2")
    figures = {"kv_largest_group_page_bytes": 1, "kv_all_page_bytes": 2, "kv_layer_reuse": 4.0}
    assert counted_per_byte(row, figures) == 2.0
    planned = {"kv_planner_input_bytes": GIB, "kv_planner_bytes": 3 * GIB}
    assert counted_per_byte(row, planned) == 3.0
    # a given size goes through the planner and through no factor: it is what the engine counts
    assert counted_per_byte(row, planned, fixed_size=True) == 1.0
    assert counted_per_byte(row, figures, fixed_size=True) == 2.0


def test_a_start_up_plan_is_told_from_a_size_of_the_user() -> None:
    row = _row("0.30.0rc2")
    given = {**_NEWER, "kv_cache_memory_bytes_arg": 40 * GIB}
    assert evaluate(row, given).override == "kv_cache_memory_bytes"
    found = evaluate(row, {**given, "startup_plan_bytes": 40 * GIB})
    assert (found.override, found.kv_cache_bytes) == ("startup_plan", 40 * GIB)


def test_310p_scales_its_half() -> None:
    row = _row("0.30.0rc2", "Ascend310P3")
    figures = {**_NEWER, "profile_before_allocated_peak_bytes": 0, "cleared_bytes": 0}
    pages = {"kv_largest_group_page_bytes": 1, "kv_all_page_bytes": 4}
    assert row.id == "E4p"
    assert evaluate(row, {**figures, **pages}).kv_cache_bytes == _BUDGET // 8


def test_a_factor_read_from_text_has_its_rounding() -> None:
    row = _row("0.30.0rc2")
    figures = {**_NEWER, "kv_layer_reuse": 15.25}
    exact = evaluate(row, figures)
    read = evaluate(row, figures, {"weights_bytes": 1000, "kv_cache_bytes": 7})
    assert exact.tolerance_bytes == 0
    assert read.tolerance_bytes == 15250 + math.ceil(_BUDGET * 0.0005) + 7
