"""The last steps of a budget, as newer releases take them: figures where a step changed something."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_memprof.capture import figures
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.hooks.table import HOOKS
from vllm_memprof.record.schema import FIGURES

HOOK = HOOKS[0]


@pytest.fixture
def recorder() -> Any:
    return SimpleNamespace(figures=dict.fromkeys(FIGURES), kv_groups=None)


def group(*pages: int) -> Any:
    """A KV cache group of layers with pages of their own, as vLLM's UniformTypeKVCacheSpecs."""
    layers = {
        f"layers.{index}": SimpleNamespace(page_size_bytes=page) for index, page in enumerate(pages)
    }
    return SimpleNamespace(
        layer_names=list(layers), kv_cache_spec=SimpleNamespace(kv_cache_specs=layers)
    )


def alike(layers: int, page: int) -> Any:
    spec = SimpleNamespace(page_size_bytes=page)
    return SimpleNamespace(layer_names=[str(index) for index in range(layers)], kv_cache_spec=spec)


def scale(recorder: Any, groups: list[Any], before: int, after: int) -> dict[str, Any]:
    figures.keep_groups(recorder, Call(HOOK, "get_kv_cache_groups", (), {}, result=groups))
    call = Call(HOOK, "_scale", (object(), before), {}, result=after)
    figures.leave_multi_group(recorder, call)
    return {name: value for name, value in recorder.figures.items() if value is not None}


def test_pages_of_a_block_by_group(recorder: Any) -> None:
    found = scale(recorder, [alike(12, 4096), alike(12, 4096)], 1000, 500)
    assert found == {"kv_largest_group_page_bytes": 12 * 4096, "kv_all_page_bytes": 24 * 4096}


def test_layers_of_a_group_may_differ(recorder: Any) -> None:
    found = scale(recorder, [group(100, 200), alike(1, 50)], 1000, 857)
    assert found == {"kv_largest_group_page_bytes": 300, "kv_all_page_bytes": 350}


def test_an_engine_that_did_not_scale_leaves_no_figures(recorder: Any) -> None:
    assert scale(recorder, [alike(12, 4096), alike(12, 4096)], 1000, 1000) == {}
    assert recorder.kv_groups is None


def worker(size: int | None) -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=size))


@pytest.mark.parametrize(
    ("before", "after", "expected"), [(None, 40, 40), (None, None, None), (30, 30, None)]
)
def test_a_start_up_plan_is_told_from_an_argument(
    recorder: Any, before: int | None, after: int | None, expected: int | None
) -> None:
    subject = worker(before)
    call = Call(HOOK, "maybe_apply_startup_plan", (subject,), {})
    figures.enter_startup_plan(recorder, call)
    subject.cache_config.kv_cache_memory_bytes = after
    figures.leave_startup_plan(recorder, call)
    assert recorder.figures["startup_plan_bytes"] == expected


def test_planners_in_a_row_keep_the_first_input_and_the_last_result(recorder: Any) -> None:
    for given, returned in ((100, 300), (300, 300), (300, 450)):
        call = Call(HOOK, "_apply", (object(), given), {}, result=returned)
        figures.leave_planner(recorder, call)
    assert recorder.figures["kv_planner_input_bytes"] == 100
    assert recorder.figures["kv_planner_bytes"] == 450


def test_a_planner_without_effect_leaves_no_figures(recorder: Any) -> None:
    call = Call(HOOK, "_apply", (object(),), {"available_bytes": 7.5}, result=7)
    figures.leave_planner(recorder, call)
    assert recorder.figures["kv_planner_bytes"] is None
