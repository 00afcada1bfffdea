"""Engine arguments: one normal form for all spellings, options replaced in their place, devices
counted.
"""

from __future__ import annotations

import pytest

from vllm_memprof.engines import ENGINES, VLLM
from vllm_memprof.errors import UsageError
from vllm_memprof.options import (
    devices_of,
    is_expandable,
    normal_form,
    read_options,
    refused_beside_expandable,
    setting,
    value_of,
    with_option,
)

SAME = [
    ["--max-model-len", "4096", "--enforce-eager", "-tp", "2"],
    ["--max-model-len=4096", "--enforce-eager", "--tensor-parallel-size=2"],
    ["--tensor_parallel_size", "2", "--max_model_len", "4096", "--enforce_eager"],
    ["--enforce-eager", "--tensor-parallel-size", "2", "--max_model_len=4096"],
]


@pytest.mark.parametrize("tokens", SAME)
def test_one_normal_form_for_what_says_the_same(tokens: list[str]) -> None:
    assert normal_form(tokens) == normal_form(SAME[0])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (["--max-model-len", "4096"], ["--max-model-len", "8192"]),
        (["--enforce-eager"], ["--no-enforce-eager"]),
        (["--enforce-eager"], []),
        (
            ["--enforce-eager", "--no-enforce-eager"],
            ["--no-enforce-eager", "--enforce-eager"],
        ),  # the later one wins
        (["--x", "1", "--x", "2"], ["--x", "2", "--x", "1"]),
        (["--names", "a", "b"], ["--names", "a b"]),
        (["--config", '{"a": 1}'], ["--config", '{"a": 2}']),
    ],
)
def test_what_says_something_else_has_another_form(a: list[str], b: list[str]) -> None:
    assert normal_form(a) != normal_form(b)


def test_json_is_compared_by_content() -> None:
    assert normal_form(["--cc", '{"b": 1,"a":[1, 2]}']) == normal_form(
        ["--cc", '{"a":[1,2],  "b":1}']
    )


def test_negative_numbers_are_values() -> None:
    assert normal_form(["--seed", "-1", "--x"]) == [["--seed", "-1"], ["--x"]]


@pytest.mark.parametrize(
    ("tokens", "name", "value", "wanted"),
    [
        ([], "max-model-len", "1", ["--max-model-len", "1"]),
        (["-tp", "2", "--x"], "tensor-parallel-size", "4", ["--tensor-parallel-size", "4", "--x"]),
        (
            ["--a", "--max_num_seqs=8", "--b", "c"],
            "max-num-seqs",
            "9",
            ["--a", "--max-num-seqs", "9", "--b", "c"],
        ),
        (["--x=1", "--y", "--x", "2"], "x", "3", ["--x", "3", "--y"]),
        (["--enforce-eager"], "enforce-eager", "false", ["--no-enforce-eager"]),
        (["--no-enforce-eager"], "enforce_eager", "true", ["--enforce-eager"]),
        ([], "seed", "-1", ["--seed=-1"]),
    ],
)
def test_an_option_is_replaced_in_its_place(
    tokens: list[str], name: str, value: str, wanted: list[str]
) -> None:
    assert with_option(tokens, name, value) == wanted


def test_values_are_found_by_any_spelling_and_the_last_counts() -> None:
    tokens = ["--max_model_len=1", "-tp", "2", "--max-model-len", "3", "--flag"]
    assert [value_of(tokens, name) for name in ("max-model-len", "tensor-parallel-size", "flag",
        "pp")] == [
        "3", "2", "", None,
    ]  # fmt: skip


def test_devices_are_the_product_of_the_parallel_sizes() -> None:
    assert devices_of([], VLLM.devices) == 1
    assert (
        devices_of(
            ["-tp", "8", "--pipeline_parallel_size=2", "-dp", "4", "--max-num-seqs", "9"],
            VLLM.devices,
        )
        == 64
    )
    with pytest.raises(UsageError, match="--tensor-parallel-size 'two' is not a number of devices"):
        devices_of(["-tp", "two"], VLLM.devices)


@pytest.mark.parametrize(
    ("tokens", "devices"),
    [
        ([], 1),
        (["--tp-size", "2", "--pp-size=2", "--dp-size", "2"], 8),
        (["--tp", "4", "--tensor-parallel-size", "2"], 2),
        (["--tp-size", "8", "--dp-size", "4", "--enable-dp-attention"], 8),
        (["--dp-size", "4", "--attn-dp-size", "2"], 4),
    ],
)
def test_devices_of_sglang_are_those_of_its_own_options(tokens: list[str], devices: int) -> None:
    assert devices_of(tokens, ENGINES["sglang"].devices) == devices
    assert devices_of(["--tp-size", "8"], VLLM.devices) == 1, "no option of vLLM"


def test_a_size_of_sglang_that_is_no_number() -> None:
    with pytest.raises(UsageError, match="'two' is not a number of devices"):
        devices_of(["--tp-size", "two"], ENGINES["sglang"].devices)


def test_an_option_of_sglang_is_switched_off_by_leaving_it_out() -> None:
    tokens = ["--tp-size", "2", "--disable-cuda-graph"]
    assert with_option(tokens, "disable-cuda-graph", "false", negatable=False) == ["--tp-size", "2"]
    assert with_option(["--tp-size", "2"], "disable-cuda-graph", "on", negatable=False) == tokens


@pytest.mark.parametrize(
    ("tokens", "made"),
    [
        ([], ["--limit-mm-per-prompt.image", "8"]),
        (["--limit_mm_per_prompt.image=2"], ["--limit-mm-per-prompt.image", "8"]),
        (
            ["--limit-mm-per-prompt.video", "1"],
            ["--limit-mm-per-prompt.video", "1", "--limit-mm-per-prompt.image", "8"],
        ),
        (
            ["--limit-mm-per-prompt", '{"image": 2, "video": 0}', "--enforce-eager"],
            ["--limit-mm-per-prompt", '{"image": 8, "video": 0}', "--enforce-eager"],
        ),
    ],
)
def test_a_key_of_a_json_option(tokens: list[str], made: list[str]) -> None:
    assert with_option(tokens, "limit-mm-per-prompt.image", "8") == made


def test_a_key_within_a_key_keeps_its_underscores() -> None:
    given = ["--compilation_config.pass_config.size", "1"]
    assert with_option(given, "compilation-config.pass_config.size", "2") == [
        "--compilation-config.pass_config.size", "2",
    ]  # fmt: skip
    given = ["--cc", '{"a": {"b": 1}, "c": 2}']
    assert with_option(given, "cc.a.b", "[1, 2]") == ["--cc", '{"a": {"b": [1, 2]}, "c": 2}']
    assert setting([], "offset", "-1") == ["--offset=-1"]
    with pytest.raises(UsageError, match="is no JSON object to set image in"):
        with_option(["--limit", "image=2"], "limit.image", "8")


@pytest.mark.parametrize(
    ("command", "share"),
    [
        (["memprof", "plan", "m", "--gpu-memory-utilization", "0.95"], 0.95),
        (["vllm", "serve", "--gpu_memory_utilization=0.5"], 0.5),
        (["--gpu-memory-utilization", "0.5", "--gpu-memory-utilization=0.6"], 0.6),
        (["--gpu-memory-utilization", "half"], None),
        (["--gpu-memory-utilization"], None),
        ([], None),
    ],
)
def test_the_utilization_of_a_command(command: list[str], share: float | None) -> None:
    found = read_options(command, VLLM.set_up)
    assert found.get("gpu_memory_utilization") == share


@pytest.mark.parametrize(
    ("variable", "grows", "refused"),
    [
        (None, False, []),
        ("", False, []),
        ("expandable_segments:True", True, []),
        ("Expandable_segments: true", True, []),
        ("max_split_size_mb:256,expandable_segments:False", False, []),
        ("max_split_size_mb : 256, expandable_segments: True", True, ["max_split_size_mb"]),
    ],
)
def test_the_allocators_variable_is_read_as_torch_does(
    variable: str | None, grows: bool, refused: list[str]
) -> None:
    assert is_expandable(variable) is grows
    assert refused_beside_expandable(variable or "") == refused
