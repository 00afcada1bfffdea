"""The table of line formats: every release's lines give their figures, and other lines give none."""

from __future__ import annotations

from fractions import Fraction

import pytest

from vllm_memprof.logs.clean import NEEDLES, plain
from vllm_memprof.logs.formats import FORMATS, GIB, LOG_FIGURES, MIB
from vllm_memprof.logs.parse import facts_of, quantity
from vllm_memprof.record.schema import FIGURES, KV_PLAN

from .samples import OTHERS, SAMPLES


def amount(figure: object) -> int | float:
    if isinstance(figure, str):
        number, unit = figure.split()
        return round(Fraction(number) * {"GiB": GIB, "MiB": MIB}[unit])
    assert isinstance(figure, (int, float))
    return figure


def figures(text: str) -> dict[str, int | float]:
    return {fact.name: fact.value for fact in facts_of(plain(text), 1)}


@pytest.mark.parametrize(
    ("release", "line", "expected"), SAMPLES, ids=[f"{i}: {s[0]}" for i, s in enumerate(SAMPLES)]
)
def test_lines_of_engines(release, line, expected):
    assert figures(line) == {name: amount(figure) for name, figure in expected.items()}


@pytest.mark.parametrize("line", OTHERS)
def test_other_lines(line):
    assert figures(line) == {}


@pytest.mark.parametrize(("release", "line", "expected"), SAMPLES)
def test_no_line_says_two_things_about_one_figure(release, line, expected):
    names = [fact.name for fact in facts_of(plain(line), 1)]
    assert len(names) == len(set(names))


def test_names_are_known_and_all_are_used():
    names = {hole.name for row in FORMATS for hole in row.holes} | {
        name for row in FORMATS for name in (*row.says, *row.denies)
    }
    assert names <= {*FIGURES, *KV_PLAN, *LOG_FIGURES}
    assert set(LOG_FIGURES) <= names


def test_every_row_is_exercised():
    seen = {fact.format for _, line, _ in SAMPLES for fact in facts_of(plain(line), 1)}
    seen |= {
        fact.format
        for line in (
            "peak_memory after profiling is 13.30 G",
            "non_torch_memory after profiling is 1.21 G",
        )
        for fact in facts_of(line, 1, context="real")
    }
    untested = [
        row.regex.pattern
        for row in FORMATS
        if row.holes and row not in seen and "torch_" not in row.anchor
    ]
    assert len(untested) <= 8, untested


@pytest.mark.parametrize(
    ("release", "line", "expected"),
    [s for s in SAMPLES if "by hand" not in s[0] and "a value a line" not in s[0]],
)
def test_a_needle_finds_every_line_of_an_engine(release, line, expected):
    assert any(needle in line.encode() for needle in NEEDLES), line


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
    assert [fact.name for fact in facts_of(line, 1)] == ["profile_after_non_torch_bytes"]
    assert [fact.name for fact in facts_of(line, 1, context="real")] == [
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
