"""The split between memprof's options and the engine's: nothing lost, nothing moved, nothing invented."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_memprof.cli.arguments import split_arguments
from vllm_memprof.errors import UsageError

OPTIONS = {
    **dict.fromkeys(("--device", "--run-dir", "--prompt", "-o", "--output"), True),
    **dict.fromkeys(("-q", "--quiet", "-h", "--help"), False),
}


def split(line: str):
    return split_arguments(line.split(), OPTIONS)


@pytest.mark.parametrize(
    ("line", "own", "model", "engine"),
    [
        ("M", "", "M", ""),
        ("M -tp 2 --foo=bar", "", "M", "-tp 2 --foo=bar"),
        ("--device sim:910b M -tp 2", "--device=sim:910b", "M", "-tp 2"),
        ("M -tp 2 --device=cpu -dp 3 --run-dir r", "--device=cpu --run-dir=r", "M", "-tp 2 -dp 3"),
        ("M --max-model-len --device cpu 5", "--device=cpu", "M", "--max-model-len 5"),
        ("M --run_dir r --max_model_len 5", "--run-dir=r", "M", "--max_model_len 5"),
        ("M -- --device npu -q", "", "M", "--device npu -q"),
        ("--quiet -- M --device npu -- x", "--quiet", "M", "--device npu -- x"),
        ("M -q awq", "", "M", "-q awq"),
        ("M -qawq -quiet -O3", "", "M", "-qawq -quiet -O3"),
        ("M -q", "-q", "M", ""),
        ("M -q --seed 1", "-q", "M", "--seed 1"),
        ("-q --device cpu M", "-q --device=cpu", "M", ""),
        ("-tp 2 --model M --seed 1", "", "M", "-tp 2 --seed 1"),
        ("-tp 2 --model=M", "", "M", "-tp 2"),
        ("--device cpu vllm serve M -tp 2", "--device=cpu", "M", "-tp 2"),
        ("vllm serve -tp 2 --model M", "", "M", "-tp 2"),
        ("vllm -tp 2", "", "vllm", "-tp 2"),
        ("M -o d --output=e -o=f", "-od --output=e -of", "M", ""),
        ("M --help=all", "", "M", "--help=all"),
        ("M --seed -1 -", "", "M", "--seed -1 -"),
        ("M --device-ids 0 --devices", "", "M", "--device-ids 0 --devices"),
        ("M --prompt=-x --prompt - --prompt=", "--prompt=-x --prompt=- --prompt=", "M", ""),
        ("-tp 2", "", None, "-tp 2"),
        ("", "", None, ""),
    ],
)
def test_examples(line, own, model, engine):
    found = split(line)
    assert found.own == own.split()
    assert found.model == model
    assert found.engine == engine.split()


def test_values_may_hold_anything():
    found = split_arguments(
        ["M", "--prompt", "a b=c\n--device", "--hf-overrides", '{"a": "--device"}', ""], OPTIONS
    )
    assert found.own == ["--prompt=a b=c\n--device"]
    assert found.engine == ["--hf-overrides", '{"a": "--device"}', ""]


@pytest.mark.parametrize(
    "line", ["M --device", "M --device --seed 1", "M --run-dir -tp 2", "M --device --"]
)
def test_a_missing_value_is_not_taken_from_the_engine(line):
    with pytest.raises(UsageError, match="needs a value"):
        split(line)


def test_a_flag_takes_no_value():
    with pytest.raises(UsageError, match="takes no value"):
        split("M --quiet=yes")


def is_engine_token(token: str) -> bool:
    return token != "--" and token.partition("=")[0].replace("_", "-") not in OPTIONS.keys() | {
        "--model"
    }


engine_tokens = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "-tp",
                "2",
                "--foo=bar",
                "--seed",
                "-1",
                "-dp=2",
                "--device-x",
                "-O3",
                "-cc.mode=3",
                "-",
                "=",
            ]
        ),
        st.text(max_size=8),
    ).filter(is_engine_token),
    max_size=8,
)
own_groups = st.one_of(
    st.sampled_from(
        [
            ["--quiet"],
            ["--device", "cpu"],
            ["--device=sim:910b"],
            ["--run_dir", "x"],
            ["--prompt=-tp 2"],
        ]
    ),
    st.text(max_size=8).map(lambda text: [f"--prompt={text}"]),
)


@given(
    engine_tokens,
    st.lists(st.tuples(own_groups, st.integers(0, 8)), max_size=5),
    engine_tokens | st.none(),
)
def test_the_engine_gets_its_tokens_in_order(engine, groups, verbatim):
    """Options of memprof may stand anywhere between the engine's tokens; after `--` everything is the engine's."""
    tokens: list[list[str]] = [[token] for token in engine]
    for group, place in groups:
        tokens.insert(place % (len(tokens) + 1), group)
    args = ["MODEL", *(token for group in tokens for token in group)]
    if verbatim is not None:
        args += ["--", *verbatim, "--device", "-q", "--", "--quiet"]
    found = split_arguments(args, OPTIONS)
    expected = (
        engine if verbatim is None else [*engine, *verbatim, "--device", "-q", "--", "--quiet"]
    )
    assert found.model == "MODEL"
    assert found.engine == expected
    assert len(found.own) == len(groups)


@given(st.lists(st.text(max_size=6), max_size=8))
def test_no_token_is_lost_or_invented(args):
    try:
        found = split_arguments(args, OPTIONS)
    except UsageError:
        return
    left = list(args)
    for token in found.engine:
        left.remove(token)
    assert len(left) <= 2 * len(found.own) + (2 if found.model is not None else 0) + 1
