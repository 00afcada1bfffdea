"""The options of a fit: values to try, and the verdict on a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_memprof.errors import UsageError
from vllm_memprof.plans.bisection import HOLDS, TOO_LITTLE, TOO_MUCH
from vllm_memprof.plans.knobs import (
    KNOBS,
    find_knob,
    parse_range,
    parse_step,
    tensor_parallel_sizes,
)
from vllm_memprof.plans.rows import PlanRow
from vllm_memprof.plans.wants import misses, parse_wants

GIB = 1 << 30


ROW = PlanRow(
    values={}, status="ok", tokens=500_000, kv_cache_bytes=40 * GIB, max_model_len=32768,
    max_concurrency=15.26,
    concurrency_at={8192: 61.0, 65536: None}, spare_bytes=2 * GIB, spare_how="derived",
)  # fmt: skip


@pytest.mark.parametrize(
    ("knob", "row", "wants", "verdict"),
    [
        ("gpu-memory-utilization", ROW, ["tokens=500001"], TOO_LITTLE),
        ("max-model-len", ROW, ["tokens=500001"], TOO_MUCH),
        ("max-model-len", ROW, ["concurrency=1@65536"], TOO_LITTLE),
        ("max-num-seqs", ROW, ["tokens=500000"], HOLDS),
        ("gpu-memory-utilization", replace(ROW, spare_bytes=-1), ["tokens=500001"],
         TOO_MUCH),
        ("gpu-memory-utilization", PlanRow({}, "failed",
         "ValueError: No available memory for the cache blocks. Try "
         "increasing `gpu_memory_utilization` when initializing the engine."), [], TOO_LITTLE),
        ("gpu-memory-utilization", PlanRow({}, "failed",
         "ValueError: Free memory on device is less than desired GPU "
         "memory utilization"), [], TOO_MUCH),
        ("max-model-len", PlanRow({}, "oom", "TP0 ran out of device memory"), [], TOO_MUCH),
    ],
)  # fmt: skip
def test_which_way_to_go(knob: str, row: PlanRow, wants: list[str], verdict: int) -> None:
    assert find_knob(knob).verdict(misses(row, parse_wants(wants, None))) == verdict


def test_tensor_parallel_sizes_are_those_that_the_heads_allow() -> None:
    heads = {"num_attention_heads": 40, "num_key_value_heads": 8}
    assert tensor_parallel_sizes(heads) == [1, 2, 4, 8, 40]
    assert tensor_parallel_sizes({"text_config": {"num_attention_heads": 64,
        "num_key_value_heads": 4}}) == [
        1, 2, 4, 8, 16, 32, 64,
    ]  # fmt: skip
    assert tensor_parallel_sizes({"num_attention_heads": 14, "num_key_value_heads": 2}, 8) == [1, 2]
    assert tensor_parallel_sizes(None, 16) == [1, 2, 4, 8, 16]


def space(
    name: str,
    between: str | None = None,
    step: str | None = None,
    config: dict[str, int] | None = None,
):
    return find_knob(name).space(config, *parse_range(between), parse_step(step))


def test_the_values_that_are_searched() -> None:
    assert space("max-model-len", config={"max_position_embeddings": 4096}).values[:2] == [
        "128",
        "256",
    ]
    assert space("max-model-len", "1000:4000", "1024").values == ["1000", "2024", "3048", "4000"]
    assert space("max-num-seqs").values[:2] == ["8", "16"]
    wanted = [f"0.{i:02d}".rstrip("0") for i in range(10, 100)]
    assert space("gpu-memory-utilization").values == wanted
    assert space("devices", "2:4", config={"num_attention_heads": 8}).values == ["2", "4"]


@pytest.mark.parametrize(
    ("name", "between", "step", "message"),
    [
        ("speed", None, None, "--fit 'speed' is not known"),
        ("max-model-len", "1024", None, "is not a range"),
        ("max-model-len", "9:1", None, "is not a range"),
        ("max-model-len", "1:x", None, "is not a range"),
        ("max-model-len", "1:9", "0", "'0' is not a number above 0"),
        ("max-model-len", "1.5:9", "1", "take whole numbers here"),
        ("max-model-len", "1:9000000", "0.000001", "take whole numbers here"),
        ("gpu-memory-utilization", "0.5:1.5", None, "is at most 1"),
        ("devices", None, "2", "--step means nothing with --fit devices"),
        ("devices", "65:70", None, "has no tensor-parallel size"),
    ],
)
def test_a_search_that_is_none_is_refused(
    name: str, between: str | None, step: str | None, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        space(name, between, step)
    assert message in str(error.value)


def test_every_knob_has_values() -> None:
    assert [len(space(knob.name).values) > 1 for knob in KNOBS] == [True] * len(KNOBS)
