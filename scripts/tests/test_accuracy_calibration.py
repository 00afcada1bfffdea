"""Leave one out: how another row's non-torch increase changes the error of a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scripts.accuracy_calibration import Pair, pairs, section
from scripts.accuracy_errors import PlannedRow
from scripts.accuracy_runs import PublishedFigure, PublishedRun
from vllm_memprof.units import GIB, MIB

#: On hardware 96 MiB more lie outside torch than the simulated device has.
MORE = 96 * MIB
A = PublishedRun(
    id="a", source="s", release="0.23.0", device="910b", model="Qwen/Qwen3-8B",
    published={"non_torch": PublishedFigure(500 * MIB + MORE), "weights": PublishedFigure(15 * GIB),
               "kv_cache": PublishedFigure(40 * GIB - MORE)},
)  # fmt: skip
B = replace(A, id="b", published={"kv_cache": PublishedFigure(30 * GIB - MORE)})
FIGURES = {"weights": 15.0 * GIB, "non_torch": 500.0 * MIB, "kv_cache": 40.0 * GIB}
KEPT = {
    "a": PlannedRow("ok", 1.0, equation="E4", figures=FIGURES),
    "b": PlannedRow("ok", 1.0, equation="E4", figures={**FIGURES, "kv_cache": 30.0 * GIB}),
}


def pair(target: str, *runs: PublishedRun) -> Pair | None:
    return next((each for each in pairs(runs, KEPT) if each.target.id == target), None)


def test_another_run_of_the_same_memory_takes_the_error_away() -> None:
    found = pair("b", A, B)
    assert found is not None
    assert found.before == pytest.approx(MORE / (30 * GIB - MORE))
    assert (found.moved, found.after, found.better) == (MORE, 0.0, True)
    assert found.same_family
    assert pair("a", A, B) is None, "b tells nothing but its KV cache"
    assert "1 | 0.31% | 0.00% | 1 | 0 | 0 |" in section([A, B], KEPT)


def test_a_run_without_that_memory_becomes_worse() -> None:
    right = replace(B, published={"kv_cache": PublishedFigure(30.0 * GIB)})
    found = pair("b", A, right)
    assert found is not None
    assert (found.before, found.better) == (0.0, False)
    assert found.after == pytest.approx(-MORE / (30 * GIB))
    assert "| 0 | 1 | 0 |" in section([A, right], KEPT)


@pytest.mark.parametrize("other", [
    {"device": "a3"}, {"release": "of 2025 (E2)"}, {"inexact": True},
])  # fmt: skip
def test_other_devices_equations_and_inexact_rows_calibrate_nothing(other: dict[str, Any]) -> None:
    assert pair("b", replace(A, **other), B) is None
