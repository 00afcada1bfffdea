"""Tables and plot of requests, from records written down by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.cells import cell_len

from tests.support.render import table
from tests.unit.accounting.test_requests import memory, served, vision
from vllm_memprof.accounting import Report
from vllm_memprof.accounting.model import RequestRow
from vllm_memprof.record.failures import Item
from vllm_memprof.record.samples import RequestRecord
from vllm_memprof.report.html import render_html
from vllm_memprof.report.plots import MOST_BARS, serving_of
from vllm_memprof.report.sections import sections
from vllm_memprof.report.sections.serving import SHOWN_REQUESTS
from vllm_memprof.units import GIB, MIB


def many(count: int) -> Report:
    items = (Item("image", 900, (4096, 4096)),)
    return served(
        *(
            memory(
                i,
                allocated_before_bytes=GIB,
                allocated_peak_bytes=GIB + i * MIB,
                peak_exact=i % 2 == 0,
                peak_stage="mm_merge",
                left_allocated_bytes=-i * MIB,
                left_reserved_bytes=0,
                others=i % 3,
            )
            for i in range(count)
        ),
        core=[
            RequestRecord(f"r{i}", 1000 + i, 16, items, i, i + 1, "FINISHED_STOPPED")
            for i in range(count)
        ],
    )


def rows_of(report: Report, title: str, wide: bool = False) -> list[list[str]]:
    [section] = [
        each
        for each in sections(report, 120 if wide else 80, ["requests"])
        if title in str(each.title)
    ]
    return [row.cells for row in section.rows]


def test_a_peak_that_is_a_reading_is_marked() -> None:
    rows = rows_of(many(3), "Requests", wide=True)
    assert [row[4] for row in rows] == ["1.00", "≥ 1.00", "1.00"]
    assert rows[1][5].startswith("≥ ")
    assert [row[6:8] for row in rows][1] == ["-1.0", "0"]


def test_of_many_the_ten_largest_by_each_are_shown_and_the_note_says_so() -> None:
    report = many(60)
    [section] = [
        each for each in sections(report, 80, ["requests"]) if "Requests" in str(each.title)
    ]
    names = [row.cells[0] for row in section.rows]
    assert {f"r{i}" for i in range(50, 60)} <= set(names)  # the highest peaks
    assert {f"r{i}" for i in range(10)} <= set(names)  # that left most
    assert SHOWN_REQUESTS < len(names) < 60
    assert f"{len(names)} of 60 requests" in str(section.notes[0])
    assert any("40 request(s) ran with others" in str(note) for note in section.notes)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_no_line_is_longer_than_the_terminal(width: int, lang: str) -> None:
    for report in (many(60), vision(16384)):
        for line in table(report, width, lang=lang).splitlines():
            assert cell_len(line) <= width, line


def test_a_request_that_did_not_end_is_said() -> None:
    report = served(memory(1, finished=False))
    [section] = [
        each for each in sections(report, 80, ["requests"]) if "Requests" in str(each.title)
    ]
    assert any("did not end" in str(note) for note in section.notes)


def test_what_the_files_no_longer_hold_is_said() -> None:
    report = many(2)
    rank = replace(report.ranks[0], dropped={"request_memory": 1234}, thinned=True)
    [section] = sections(replace(report, ranks=[rank]), 80, ["requests"])
    notes = " ".join(map(str, section.notes))
    assert "1,234 older requests" in notes
    assert "thinned" in notes


def test_bars_of_requests_that_overlap_are_in_lanes_of_their_own() -> None:
    def row(name: str, begin: float, end: float) -> RequestRow:
        return RequestRow(
            name, 1, output_tokens=1, allocated_peak_bytes=1, left_allocated_bytes=0,
            left_reserved_bytes=0, peak_stage="step", begin_seconds=begin, end_seconds=end,
        )  # fmt: skip

    rank = replace(
        many(1).ranks[0],
        requests=[row("a", 0, 10), row("b", 1, 2), row("c", 3, 4), row("d", 10, 11)],
    )
    plot = serving_of(rank)
    assert plot is not None
    assert [bar.lane for bar in plot.bars] == [0, 1, 1, 0]


def test_of_thousands_the_highest_peaks_have_bars() -> None:
    plot = serving_of(many(MOST_BARS + 50).ranks[0])
    assert plot is not None
    assert len(plot.bars) == MOST_BARS
    assert plot.left_out == 50
    assert "r0" not in {bar.id for bar in plot.bars}


def test_the_page_has_the_plot_where_the_run_was_sampled() -> None:
    page = render_html(many(3))
    assert "Memory while serving" in page
    data = page.partition('class="data">')[2].partition("</script>")[0]
    assert [bar["id"] for bar in json.loads(data)["views"][0]["serving"]["bars"]] == [
        "r0",
        "r1",
        "r2",
    ]
    unsampled = replace(many(3).ranks[0], samples=[], requests=[])
    assert "plot serving" not in render_html(replace(many(3), ranks=[unsampled]))
