"""A comparison through every reporter: equal figures, safe text, any width, any terminal."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import pytest
from rich.cells import cell_len

from tests.support.render import diff_table
from tests.unit.accounting.builders import DATA, recorded
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.compare.diff import Diff, diff_reports
from vllm_memprof.compare.document import WITH_BYTES, diff_document
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.report.json_text import render_result_json
from vllm_memprof.report.markdown import render_markdown
from vllm_memprof.units import GIB

WIDTHS = (60, 80, 120, 200)
PAIRS = [
    ("recorded_013_tp2", "recorded_023_tp2"),
    ("recorded_tp1", "recorded_tp2"),
    ("skewed_tp2", "graph_tp2"),
    ("killed_tp2", "plan_tp2"),
    ("recorded_killed_tp2", "eager_tp2"),
    ("logs#2", "logs#3"),
    ("logs#1", "graph_tp2"),
]


def report_of(name: str) -> Report:
    log, mark, number = name.partition("#")
    if mark:
        return build_report(read_log(str(DATA / log / "two_methods_910b_tp2.md"))[int(number) - 1])
    return build_report(recorded(name))


def diff_of(a: str, b: str) -> Diff:
    return diff_reports(report_of(a), report_of(b))


def texts(diff: Diff) -> dict[str, str]:
    return {
        **{f"table {width}": diff_table(diff, width) for width in WIDTHS},
        "markdown": render_markdown(partial(diff_document, diff)),
    }


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_all_reporters_give_the_same_figures(a: str, b: str) -> None:
    diff = diff_of(a, b)
    data = json.loads(render_result_json(diff))
    assert data["schema"] == "memprof.diff/3"
    for where, text in texts(diff).items():
        if where == "table 60":
            continue  # so narrow that figures are folded
        flat = " ".join(text.split())
        served = data["served"]
        sizes = [cause["bytes"] for cause in served["causes"]]
        sizes += [served[name] for name in ("a_granted", "b_granted", "difference_bytes")]
        tokens = [cause["kv_tokens"] for cause in served["causes"]]
        tokens += [data[name] for name in ("a_kv_tokens", "b_kv_tokens", "difference_tokens")]
        for size in filter(None, sizes):  # bytes where there is room for them
            assert f"{size / GIB:,.4f}" in flat or f"{size:,}" in flat, (where, size)
        for number in filter(None, tokens):
            assert f"{number:,}" in flat, (where, number)


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(a: str, b: str, width: int) -> None:
    for text in (diff_table(diff_of(a, b), width), diff_table(diff_of(a, b), width, "ascii")):
        assert all(cell_len(line) <= width for line in text.splitlines())
        assert "\x1b" not in text


#: A signed whole number.
WHOLE = re.compile(r"[+-][\d,]+")


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_the_page_adds_up_as_it_is_printed(a: str, b: str) -> None:
    """The printed bytes between the two KV caches, added by the reader."""
    diff = diff_of(a, b)
    assert diff.served is not None
    if diff.served.difference_bytes is None:
        assert "no difference of KV cache to explain" in diff_table(diff, 80)
        return
    section = diff_table(diff, WITH_BYTES).split("= KV cache of B")[0]
    before, *steps = section.split("KV cache of A")[1].splitlines()
    whole = next(word for word in before.split() if re.fullmatch(r"-?[\d,]+", word))
    first = int(whole.replace(",", ""))
    priced = any(cause.kv_tokens is not None for cause in diff.served.causes)
    numbers = [[word for word in line.split() if WHOLE.fullmatch(word)] for line in steps]
    # bytes, then tokens; a row of tokens only has one number
    shown = [int(found[0].replace(",", "")) for found in numbers if len(found) > priced]
    assert first + sum(shown) == diff.served.b_granted


def test_a_log_says_how_far_its_digits_reach() -> None:
    for text in texts(diff_of("logs#2", "logs#3")).values():
        flat = " ".join(text.split())
        assert "within the printed digits, ±43,003,368 bytes" in flat
        assert "to the byte" not in flat


def test_brackets_mark_what_no_term_charges() -> None:
    text = diff_table(diff_of("recorded_013_tp2", "recorded_023_tp2"), 120)
    line = next(
        line for line in text.splitlines() if line.lstrip().startswith("torch memory outside")
    )
    assert re.search(r"0\.25\d\d +\(0\.25\d\d\)", line)
    assert "subtracted by E2 only" in line
    assert "in brackets" in text


def test_a_run_over_its_device_is_named_first() -> None:
    lines = diff_table(diff_of("recorded_013_tp2", "recorded_023_tp2"), 120).splitlines()
    careful = next(line for line in lines if line.startswith("CAREFUL"))
    assert careful.endswith("A: 64 MiB over the device at the serving peak")
    assert "CAREFUL" not in diff_table(diff_of("recorded_tp1", "recorded_023_tp2"), 120)


def test_names_of_a_run_cannot_act_as_markup() -> None:
    a = report_of("graph_tp2")
    nasty = "<img src=x onerror=alert(1)> | `a` *b* @all #1 深度求索"
    run = replace(
        a.run, model=nasty, command=["memprof", "--x", nasty], env={"A": nasty}, exit_reason=nasty
    )
    diff = diff_reports(a, replace(a, run=run))
    text = render_markdown(partial(diff_document, diff))
    assert "<img" not in text
    assert "@all" not in text
    assert " `a`" not in text
    assert "深度求索" in text
    for width in WIDTHS:
        drawn = diff_table(diff, width)
        assert "深度求索" in re.sub(r"\s", "", drawn)
        assert all(cell_len(line) <= width for line in drawn.splitlines())


def test_ranks_that_differ_in_other_ways_have_tables_of_their_own() -> None:
    diff = diff_of("skewed_tp2", "graph_tp2")
    text = diff_table(diff, 120)
    assert "KV cache differs by +0.25 GiB (+268,435,456 bytes), TP1 of A, TP0 of B. Causes" in text
    assert re.search(r"KV cache budget differs by .*, TP1\. Causes", text)
    alike = diff_table(diff_of("graph_tp2", "eager_tp2"), 120)
    assert re.search(r"KV cache differs by .*, TP0-TP1\. Causes", alike)
    assert "KV cache budget differs" not in alike


def test_many_groups_of_ranks_are_cut_and_said() -> None:
    report = report_of("graph_tp2")
    first = report.ranks[0]
    granted = first.budget.engine_kv_cache_bytes or 0

    def rank(number: int, less: int) -> object:
        budget = replace(first.budget, engine_kv_cache_bytes=granted - less)
        return replace(first, rank=number, label=f"TP{number}", budget=budget)

    a = replace(report, ranks=[rank(i, 0) for i in range(12)])
    b = replace(report, ranks=[rank(i, i * 1000) for i in range(12)])
    text = diff_table(diff_reports(a, b), 120)
    assert text.count("KV cache budget differs by") == 4
    assert "more groups of ranks are in the JSON" in text
