"""The table of line formats: each release's lines give their figures, other lines none."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.support.names import KV_PLAN, LOG_FIGURES
from vllm_memprof.logs.figures import figures_in
from vllm_memprof.logs.formats import FORMATS, LOGS
from vllm_memprof.logs.lines import NEEDLES, strip_markup
from vllm_memprof.record.schema import FIGURES
from vllm_memprof.units import GIB, MIB

from .samples import OTHERS, SAMPLES


def amount(figure: object) -> int | float:
    if isinstance(figure, str):
        number, unit = figure.split()
        return round(Fraction(number) * {"GiB": GIB, "MiB": MIB}[unit])
    assert isinstance(figure, (int, float))
    return figure


def figures(text: str) -> dict[str, int | float]:
    return {figure.name: figure.value for figure in figures_in(strip_markup(text), 1)}


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
    names = [figure.name for figure in figures_in(strip_markup(line), 1)]
    assert len(names) == len(set(names))


def test_names_are_known_and_all_are_used():
    names = {place.name for row in FORMATS for place in row.placeholders} | {
        name for row in FORMATS for name in (*row.sets, *row.clears)
    }
    assert names <= {*FIGURES, *KV_PLAN, *LOG_FIGURES}
    assert LOG_FIGURES - set(LOGS["vllm"].draft.values()) <= names


def test_every_row_is_exercised():
    seen = {figure.format for _, line, _ in SAMPLES for figure in figures_in(strip_markup(line), 1)}
    seen |= {
        figure.format
        for line in (
            "peak_memory after profiling is 13.30 G",
            "non_torch_memory after profiling is 1.21 G",
        )
        for figure in figures_in(line, 1, context="real")
    }
    untested = [
        row.regex.pattern
        for row in FORMATS
        if row.placeholders and row not in seen and "torch_" not in row.anchor
    ]
    assert len(untested) <= 8, untested


@pytest.mark.parametrize(
    ("release", "line", "expected"),
    [s for s in SAMPLES if "by hand" not in s[0] and "a value a line" not in s[0]],
)
def test_a_needle_finds_every_line_of_an_engine(release, line, expected):
    assert any(needle in line.encode() for needle in NEEDLES), line
