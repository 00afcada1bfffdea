"""The options of a fit: values to try, and the verdict on a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_memprof.errors import UsageError
from vllm_memprof.plans.knobs import (
    HOLDS,
    KNOBS,
    TOO_LITTLE,
    TOO_MUCH,
    SearchRange,
    find_knob,
    search_request,
    tensor_parallel_sizes,
)
from vllm_memprof.plans.model import TABLES, Miss, PlanRow
from vllm_memprof.plans.wants import misses, parse_wants

GIB = 1 << 30


ROW = PlanRow(
    values={}, status="ok", tokens=500_000, kv_cache_bytes=40 * GIB, max_model_len=32768,
    max_concurrency=15.26,
    concurrency_at={8192: 61.0, 65536: None}, headroom_bytes=2 * GIB, headroom_how="derived",
)  # fmt: skip


SMALL_BATCH = "Value error, max_num_batched_tokens (512) must be greater than or equal to max_num_seqs (1024)."


@pytest.mark.parametrize(
    ("knob", "row", "wants", "verdict"),
    [
        ("gpu-memory-utilization", ROW, ["tokens=500001"], TOO_LITTLE),
        ("max-model-len", ROW, ["tokens=500001"], TOO_MUCH),
        ("max-model-len", ROW, ["concurrency=1@65536"], TOO_LITTLE),
        ("max-num-seqs", ROW, ["tokens=500000"], HOLDS),
        ("gpu-memory-utilization", replace(ROW, headroom_bytes=-1), ["tokens=500001"],
         TOO_MUCH),
        ("gpu-memory-utilization", PlanRow({}, "failed",
         "ValueError: No available memory for the cache blocks. Try "
         "increasing `gpu_memory_utilization` when initializing the engine."), [], TOO_LITTLE),
        ("gpu-memory-utilization", PlanRow({}, "failed",
         "ValueError: Free memory on device is less than desired GPU "
         "memory utilization"), [], TOO_MUCH),
        ("max-model-len", PlanRow({}, "oom", "TP0 ran out of device memory"), [], TOO_MUCH),
        ("max-num-batched-tokens", PlanRow({}, "failed", SMALL_BATCH), [], TOO_LITTLE),
        ("max-num-seqs", PlanRow({}, "failed", SMALL_BATCH), [], TOO_MUCH),
        ("max-num-batched-tokens", PlanRow({}, "oom", "out of device memory"), [], TOO_MUCH),
    ],
)  # fmt: skip
def test_which_way_to_go(knob: str, row: PlanRow, wants: list[str], verdict: int) -> None:
    assert find_knob(knob, None).verdict(misses(row, parse_wants(wants, None))) == verdict


def test_tensor_parallel_sizes_are_those_that_the_heads_allow() -> None:
    heads = {"num_attention_heads": 40, "num_key_value_heads": 8}
    assert tensor_parallel_sizes(heads, 64) == [1, 2, 4, 8, 40]
    assert tensor_parallel_sizes({"text_config": {"num_attention_heads": 64,
        "num_key_value_heads": 4}}, 64) == [
        1, 2, 4, 8, 16, 32, 64,
    ]  # fmt: skip
    assert tensor_parallel_sizes({"num_attention_heads": 14, "num_key_value_heads": 2}, 8) == [1, 2]
    assert tensor_parallel_sizes(None, 16) == [1, 2, 4, 8, 16]


def space(
    name: str,
    between: str | None = None,
    step: str | None = None,
    config: dict[str, int] | None = None,
) -> SearchRange:
    return find_knob(name, between).space(search_request(between, step)._replace(config=config))


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
    assert space("max-num-batched-tokens").values[:2] == ["1024", "2048"]
    assert space("limit-mm-per-prompt.image", "1:4").values == ["1", "2", "3", "4"]
    sizes = space("max-cudagraph-capture-size").values
    assert (sizes[:2], sizes[-3:]) == (["8", "16"], ["480", "496", "512"])
    assert space("max-cudagraph-capture-size", "3:16").values == ["4", "8", "16"]
    assert space("kv-cache-dtype").values == TABLES["kv_cache_dtypes"]


def test_any_numeric_option_with_a_range_and_a_goal() -> None:
    assert space("block-size", "16:64", "16").values == ["16", "32", "48", "64"]
    assert space("swap-space", "0:2").values == ["0", "1", "2"]
    assert space("offload", "0.5:0.6", "0.05").values == ["0.5", "0.55", "0.6"]
    knob = find_knob("compilation_config.max_size", "1:9", "smallest")
    assert (knob.name, knob.option) == (
        "compilation-config.max_size",
        "--compilation-config.max_size",
    )
    assert knob.goal == "smallest"
    assert knob.verdict([Miss("out of memory", "plan")]) == TOO_MUCH


def test_what_the_smallest_utilization_lacks_points_the_other_way() -> None:
    knob = find_knob("gpu-memory-utilization", None, "smallest")
    assert knob.verdict([Miss("KV tokens 1 < 2", "tokens")]) == TOO_MUCH
    assert knob.verdict([Miss("headroom", "headroom")]) == TOO_LITTLE


def test_a_search_that_another_option_leaves_without_effect_is_refused() -> None:
    find_knob("max-cudagraph-capture-size", engine_args=["--max-model-len", "4096"])
    with pytest.raises(UsageError, match="has no effect with --enforce-eager"):
        find_knob("max-cudagraph-capture-size", engine_args=["--enforce-eager"])


@pytest.mark.parametrize(
    ("name", "goal", "message"),
    [
        ("devices", "largest", "--goal largest does not go with --find devices"),
        ("max-num-seqs", "best", "--goal best does not go with --find max-num-seqs"),
    ],
)
def test_a_goal_that_is_none_is_refused(name: str, goal: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_knob(name, None, goal)


@pytest.mark.parametrize(
    ("name", "between", "step", "message"),
    [
        ("speed", None, None, "a numeric option of the engine takes --between LOW:HIGH"),
        ("kv-cache-dtype", "1:9", None, "mean nothing with --find kv-cache-dtype"),
        ("max-model-len", "1024", None, "is not a range"),
        ("max-model-len", "9:1", None, "is not a range"),
        ("max-model-len", "1:x", None, "is not a range"),
        ("max-model-len", "1:9", "0", "'0' is not a number above 0"),
        ("devices", None, "2", "or --step is given"),
        ("devices", "65:70", None, "has none of the sizes that the heads allow"),
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
