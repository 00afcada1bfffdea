"""How calls of empty_cache, experiments and cycles read: narrow, wide, markdown."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from tests.unit.accounting.builders import process, run_of
from tests.unit.accounting.test_empty_cache import at, call, phase, report_of, sleeps
from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import Report
from vllm_memprof.document import Section
from vllm_memprof.report.markdown import render_markdown
from vllm_memprof.report.sections import sections
from vllm_memprof.report.table import render_table

SPANS = [
    phase("warm_up", 10, at(10, 100, 120), at(15, 100, 228), 0),
    call(20, (100, 228), (100, 128), 1, by="memprof", at="warm_up", function=None),
    call(200, (100, 228, 470), (100, 128, 400), 2, requests=2, in_step=True, thread="Decode"),
    call(210, (100, 228, 470), (100, 128, 400), 3, requests=1, in_step=True, thread="Decode"),
    phase("shutdown", 400, at(400, 100, 228, 470), at(405, 0, 0), 4),
]


def section(report: Report, title: str, width: int = 80) -> Section:
    [one] = [s for s in sections(report, width) if s.title.startswith(title)]
    return one


def drawn(report: Report, width: int) -> str:
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(render_table(report))
    return captured.get()


def test_calls_of_one_place_are_added_up_and_own_ones_stand_apart() -> None:
    table = section(report_of(SPANS), "Calls of empty_cache")
    rows = [row.cells for row in table.rows]
    assert rows[0][0] == "after warm_up\n  memprof"
    place = "in a step\n  runner.py:7"
    assert rows[1] == [place, "2", "2", "4.00", "0.20", "0.00", "0.14", "0.20"]
    assert [column.title for column in table.columns][1:4] == ["Calls", "Requests", "ms"]


def test_no_place_of_a_call_is_torn_at_80_characters() -> None:
    place = "gpu_model_runner.py:6546"
    long = [
        replace(span, detail={**span.detail, "site": place}) if "site" in span.detail else span
        for span in SPANS
    ]
    assert place in drawn(report_of(long), 80)


def test_a_wide_table_names_functions_and_threads() -> None:
    table = section(report_of(SPANS), "Calls of empty_cache", width=120)
    assert table.rows[1].cells[2:4] == ["Runner.step", "Decode"]
    calm = [replace(span, detail={**span.detail, "thread": "MainThread"}) for span in SPANS]
    titles = [
        column.title
        for column in section(report_of(calm), "Calls of empty_cache", width=120).columns
    ]
    assert "Function" in titles
    assert "Thread" not in titles


def test_the_answers_carry_this_run_s_figures() -> None:
    answers = {
        row.cells[0]: row.cells[1]
        for row in section(report_of(SPANS), "Effect of empty_cache").rows
    }
    assert answers["Released"].startswith(
        "reserved, not allocated: 0.1953 GiB; operator workspace: 0.0000"
    )
    left = answers["Releasable after warm-up"]
    assert "after warm_up: reserved, not allocated: 0.1250 GiB" in left
    assert "released 0.0977 GiB, measured by the experiment" in left
    assert answers["Cost"].startswith("2 call(s) while requests ran: waited 4.00 ms")


def test_an_experiment_says_what_it_changed_and_what_it_missed() -> None:
    run = run_of(
        replace(process(SPANS), ready_t_ns={"model": 100}), empty_cache_at=["warm_up", "sleep"]
    )
    report = build_report(run)
    table = section(report, "Experiment")
    assert table.rows[0].cells == ["warm_up", "TP0", "2.00", "0.0977", "0.0000", "the next call"]
    assert "never reached: sleep" in table.notes
    assert "memprof itself called empty_cache" in drawn(report, 80)
    assert not [s for s in sections(report_of(SPANS[2:]), 80) if s.title.startswith("Experiment")]


def test_cycles_by_what_they_left() -> None:
    table = section(sleeps(4, leak=240), "Sleep and wake-up cycles")
    assert [row.cells[4] for row in table.rows] == ["+240.0"] * 4
    assert table.rows[0].cells[-1] == "yes"
    many = section(sleeps(30), "Sleep and wake-up cycles")
    assert [row.cells[0] for row in many.rows] == ["1", "2", "3", "4", "5", "6", "7", "8", "30"]
    assert "21 more in report.json" in many.notes


def test_no_line_is_wider_than_asked_for() -> None:
    for report in (report_of(SPANS), sleeps(5, leak=240)):
        for width in (80, 120):
            assert max(len(line) for line in drawn(report, width).splitlines()) <= width


def test_markdown_has_the_same_cells() -> None:
    text = render_markdown(report_of(SPANS))
    assert "| in a step | runner.py:7 |" in text
    assert "Effect of empty\\_cache" in text
