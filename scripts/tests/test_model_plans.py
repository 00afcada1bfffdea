"""The list of models: arguments of its cases, rows that are kept, and the page made from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.model_cases import CASES, DEVICES, STACKS, Case
from scripts.model_plans import (
    Row,
    constants_of,
    is_current,
    keep_row,
    list_plans,
    load_rows,
    share_of,
    write_page,
)
from vllm_memprof.sim.presets import find_preset, list_presets

FIGURES = {
    "weights_bytes": 3 << 30,
    "kv_cache_bytes": 5 << 30,
    "tokens": 1234,
    "max_concurrency": 1.5,
}


def row_of(index: int, **figures: object) -> Row:
    model, stack, device, arguments = list_plans()[index].key
    row = {"model": model, "stack": stack, "device": device, "arguments": arguments}
    return {**row, "constants": constants_of(device, arguments), **(figures or FIGURES)}


def test_arguments_of_a_case() -> None:
    case = Case("org/model", {"910b": "DP4 TP8 EP", "a3": "TP16"}, quantized=True)
    assert case.arguments("910b") == (
        "--data-parallel-size 4 --tensor-parallel-size 8 --enable-expert-parallel "
        "--max-model-len 32768 --enforce-eager --quantization ascend"
    )
    assert case.arguments("a3").startswith("--tensor-parallel-size 16 --max-model-len")


def test_plans_are_told_apart() -> None:
    keys = [plan.key for plan in list_plans()]
    assert len(keys) == len(set(keys))
    assert {stack for _, stack, _, _ in keys} == set(STACKS)
    assert all(next(iter(DEVICES)) in case.parallel for case in CASES)


def test_rows_are_kept_in_order_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    stale = {**row_of(0), "arguments": "--as-it-was-before"}
    path.write_text(json.dumps([stale, row_of(5)]))
    assert keep_row(row_of(2), path) == [row_of(2), row_of(5)]
    assert keep_row(row_of(5, error="no"), path) == [row_of(2), row_of(5, error="no")]
    assert [*load_rows(path).values()] == [row_of(2), row_of(5, error="no")]


def told_of(page: str, case: Case) -> list[str]:
    [line] = [line for line in page.splitlines() if line.startswith(f"| {case.name} |")]
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_the_page_tells_what_does_not_start_and_what_was_not_planned() -> None:
    case = CASES[0]
    assert told_of(write_page([row_of(0)]), case)[3:] == ["3.00", "5.00", "1,234"]
    page = write_page([row_of(0, error="an error of the engine")])
    assert told_of(page, case)[3:] == ["", "", "does not start"]
    assert f"- {case.name} does not start: an error of the engine" in page
    assert page.count("| not planned |") == len(CASES) - 1


def test_a_row_planned_with_other_constants_is_marked() -> None:
    page = write_page([{**row_of(0), "constants": "another"}])
    assert told_of(page, CASES[0])[-1] == "1,234\\*"


def test_the_share_of_a_rank() -> None:
    """Of Qwen3-30B-A3B, 30.53 billion parameters."""
    alone = Case("Qwen/Qwen3-30B-A3B", {"910b": "TP1"})
    assert share_of(alone, "910b") == 2 * 30_532_122_624
    parts = Case("Qwen/Qwen3-30B-A3B", {"910b": "DP2 TP2 EP"}, quantized=True)
    experts, embedded = 48 * 128 * 3 * 768 * 2048, 2 * 151_936 * 2048
    attention = 48 * 2048 * 128 * (2 * 32 + 2 * 4)
    rest = 30_532_122_624 - experts - attention
    assert rest > embedded
    assert share_of(parts, "910b") == experts // 4 + attention // 2 + rest * 2 // 2


def test_every_preset_has_its_row() -> None:
    """Presets with one configuration share theirs; one may have several, of its names too."""
    named = {find_preset(name).name for case in CASES for name in (case.model, *case.also)}
    assert named == {p.name for p in list_presets() if not p.name.startswith("memprof/")}
    told = [(name, case.quantized) for case in CASES for name in (case.model, *case.also)]
    assert len(told) == len(set(told))
    for case in CASES:
        config = find_preset(case.model).files
        assert all(find_preset(name).files == config for name in case.also)


def test_rows_of_models_are_those_of_the_cases() -> None:
    plans = {plan.key for plan in list_plans()}
    rows = load_rows()
    assert set(rows) <= plans
    for row in rows.values():
        figures = {"weights_bytes", "kv_cache_bytes", "tokens", "max_concurrency"}
        told = set(row) - {"model", "stack", "device", "arguments", "constants"}
        assert told in ({"error"}, figures)


@pytest.mark.full
def test_the_list_of_models_has_a_row_for_every_plan() -> None:
    """Every preset on both stacks and devices, with the constants of today's device profiles."""
    rows = {key: row for key, row in load_rows().items() if is_current(row)}
    assert [each.key for each in list_plans() if each.key not in rows] == []
