"""Figures of one line: values, units, context, and numbers that are refused."""

from __future__ import annotations

import pytest

from vllm_memprof.logs.figures import figures_in, quantity
from vllm_memprof.logs.lines import strip_markup
from vllm_memprof.units import GIB


def figures(text: str) -> dict[str, int | float]:
    return {figure.name: figure.value for figure in figures_in(strip_markup(text), 1)}


@pytest.mark.parametrize(
    ("text", "unit", "digits", "value", "half"),
    [
        ("9.19", "GiB", 2, 9867687363, 5368710),  # 0.005 GiB = 5,368,709.12
        ("0.6", "GiB", 2, 644245094, 5368710),  # the engine rounds to two digits and drops zeros
        ("9.1948", "GB", 4, 9872841323, 53688),
        ("28.49114990234375", "GiB", 2, 30592139264, 1),
        ("22.00", "MiB", 2, 23068672, 5243),
        ("1,828,800,984", None, 0, 1828800984, 0),
        ("-0.87", "GiB", 2, -934155387, 5368710),
        ("0", "bytes", 2, 0, 0),
        ("0.92", None, 0, 0.92, 0),
    ],
)
def test_units_and_half_units(text, unit, digits, value, half):
    assert quantity(text, unit, digits) == (value, half)


def test_context_changes_the_meaning():
    line = "non_torch_memory after profiling is 1.21 G  # updated: "
    assert [figure.name for figure in figures_in(line, 1)] == ["profile_after_non_torch_bytes"]
    assert [figure.name for figure in figures_in(line, 1, context="real")] == [
        "used_less_allocated_bytes"
    ]


@pytest.mark.parametrize("total", ["6545211392", "65452", "46600395161"])
def test_a_device_total_that_was_cut_is_not_read(total):
    assert figures(f"Available memory: 46600395162, total memory: {total}") == {
        "kv_cache_bytes": 46600395162
    }


@pytest.mark.parametrize("size", ["1" * 400, "1048577", "9" * 30])
def test_a_figure_that_no_device_holds_is_not_read(size):
    assert figures(f"Loading model weights took {size}.0000 GB") == {}
    assert figures("Loading model weights took 1023.0000 GB") == {"weights_bytes": 1023 * GIB}
