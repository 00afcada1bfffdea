"""Sweeps and searches as tables, csv and a page: the same figures everywhere, nothing of a name executed."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.browser import Browser
from tests.support.page import Page
from tests.unit.report.test_schemas import assert_obeys, problems, schema_of
from vllm_memprof.document import Layout
from vllm_memprof.plans.curves import FIGURES, MOST_NAMED, curves
from vllm_memprof.plans.documents import CSV_COLUMNS, fit_document, render_sweep_csv, sweep_document
from vllm_memprof.plans.model import FirstFailure, Fit, Knob, Miss, OwnerChange, PlanRow, Sweep, Try
from vllm_memprof.record.codec import from_json
from vllm_memprof.report.html import render_html
from vllm_memprof.report.json_text import render_result_json
from vllm_memprof.report.markdown import render_markdown
from vllm_memprof.report.table import render_table
from vllm_memprof.text import text

GIB = 1 << 30
HOSTILE = "</script><img src=x onerror=alert(1)>"


def row(size: str, length: str, tokens: int | None, reason: str | None = None) -> PlanRow:
    held = None if tokens is None else tokens * 65536
    return PlanRow(
        values={"tensor-parallel-size": size, "max-model-len": length},
        status="ok" if reason is None else "oom", reason=reason, devices=int(size), run_id=f"id{size}{length}",
        run=f"plans/{size}-{length}", seconds=9.5, device_total_bytes=64 * GIB, tokens=tokens, kv_cache_bytes=held,
        fits_request_bytes=None if held is None else held - GIB, fits_request_tokens=tokens,
        max_model_len=int(length), max_concurrency=None if tokens is None else tokens / int(length), simulated=True,
        fits_device_bytes=None if held is None else held + 5 * GIB - held // 8, fits_device_tokens=tokens,
        headroom_bytes=None if held is None else 5 * GIB - held // 8,
        headroom_how=None if held is None else "modelled",
        weights_bytes=30 * GIB // int(size), peak_activation_bytes=GIB, balanced=True,
    )  # fmt: skip


SWEEP = Sweep(
    model="some/model",
    command=["memprof", "sweep", "some/model"],
    knobs=[Knob("tensor-parallel-size", ["1", "2", "4"]), Knob("max-model-len", ["8192", "16384"])],
    rows=[
        row("1", "8192", None, "TP0 ran out of device memory in weight_load"),
        row("1", "16384", None, "TP0 ran out of device memory in weight_load"),
        row("2", "8192", 200_000),
        row("2", "16384", 180_000),
        row("4", "8192", 500_000),
        row("4", "16384", 480_000),
    ],
    seconds=60.0,
)
LACKING = text("{name} {found} < {least}", name=text("KV tokens"), found="200,000", least="300,000")
FIT = Fit(
    model="some/model", command=["memprof", "plan"], knob="devices", option="--tensor-parallel-size", goal="smallest",
    wanted=["KV tokens >= 300,000", "headroom >= 0 GiB"], low="1", high="4",
    step="the sizes that the heads allow: 1, 2, 4",
    tries=[
        Try("1", SWEEP.rows[0], [Miss("TP0 ran out of device memory in weight_load", "plan")]),
        Try("2", SWEEP.rows[2], [Miss(LACKING, "tokens")]),
        Try("4", SWEEP.rows[4], []),
    ],
    answer="4", ordered=True, seconds=31.0, notes=["a note"], flag="--tensor-parallel-size 4", until="ready",
    beyond=FirstFailure(
        "2", "want", LACKING,
        label="TP0", owners=[
            OwnerChange("weights", text("weights"), 8 * GIB, 15 * GIB, "measured"),
            OwnerChange("beside", text("non-torch, and what came after profiling"), GIB,
                        2 * GIB, "modelled"),
        ],
    ),
)  # fmt: skip


def layout(found: Sweep | Fit) -> Layout:
    if isinstance(found, Fit):
        return partial(fit_document, found)
    return partial(sweep_document, found)


def drawn(found: Sweep | Fit, width: int) -> str:
    console = Console(width=width, no_color=True, file=io.StringIO())
    with console.capture() as capture:
        console.print(render_table(layout(found)))
    return capture.get()


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_and_have_a_line_for_each_plan(width: int) -> None:
    text = drawn(SWEEP, width)
    assert max(map(len, text.splitlines())) <= width
    assert [
        line.split()[0:2] for line in text.splitlines() if line.rstrip().endswith((" ok", " oom"))
    ] == [[row.values["tensor-parallel-size"], row.values["max-model-len"]] for row in SWEEP.rows]
    assert "500,000" in text
    joined = " ".join(text.split())
    assert (
        "tensor-parallel-size=1, max-model-len=8192 and 1 more: TP0 ran out of device memory in weight_load"
        in joined
    )
    text = drawn(FIT, width)
    assert max(map(len, text.splitlines())) <= width
    joined = " ".join(text.split())
    assert "answer smallest devices 4 (the sizes that the heads allow: 1, 2, 4)" in joined
    assert "use --tensor-parallel-size 4" in joined
    assert "KV tokens 200,000 < 300,000" in joined
    assert "fails at 2: KV tokens 200,000 < 300,000" in joined
    grown = "weights +7.0000 GiB to 15.0000; non-torch, and what came after profiling (m) +1.0000"
    assert f"grew most {grown} GiB to 2.0000" in joined


def test_what_is_said_of_a_search_is_said_in_chinese() -> None:
    page = render_markdown(layout(FIT), lang="zh")
    assert "不通过" in page
    assert "KV token 数 200,000 &lt; 300,000" in page


def test_what_several_tries_lack_is_said_once() -> None:
    missing = [Miss("no such option", "refused")]
    refused = [replace(each, missing=missing) for each in FIT.tries[:2]]
    text = " ".join(drawn(replace(FIT, tries=[*refused, FIT.tries[2]], beyond=None), 200).split())
    assert "max-model-len=8192 and 1 more: no such option" in text
    assert text.count("no such option") == 1


def test_no_answer_has_no_flag() -> None:
    nothing = replace(FIT, answer=None, tries=FIT.tries[:2], flag=None)
    text = drawn(nothing, 100)
    assert re.search(r"^answer +none", text, re.MULTILINE)
    assert "use" not in text.split("answer")[1]
    assert json.loads(render_result_json(nothing))["flag"] is None


def test_the_csv_is_tidy_and_unknown_is_empty() -> None:
    rows = list(csv.DictReader(io.StringIO(render_sweep_csv(SWEEP))))
    assert list(rows[0]) == ["tensor-parallel-size", "max-model-len", *CSV_COLUMNS]
    assert [line["tokens"] for line in rows] == ["", "", "200000", "180000", "500000", "480000"]
    assert rows[2]["weights_bytes"] == str(15 * GIB)
    assert {line["non_torch_bytes"] for line in rows} == {""}
    assert [line["headroom_bytes"] for line in rows] == [
        "" if row.headroom_bytes is None else str(row.headroom_bytes) for row in SWEEP.rows
    ]
    assert (rows[2]["simulated"], rows[2]["cached"]) == ("true", "false")


def test_the_columns_are_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "concepts" / "plans.md").read_text()
    assert [name for name in CSV_COLUMNS if f"`{name}`" not in page] == []


def test_json_obeys_its_schema() -> None:
    for name, found in (
        ("sweep", SWEEP),
        ("fit", FIT),
        ("fit", replace(FIT, answer=None, beyond=None)),
    ):
        assert_obeys(name, render_result_json(found))
    bent = json.loads(render_result_json(SWEEP))
    bent["rows"][0]["tokens"] = "many"
    assert list(problems(schema_of("sweep"), bent)) != []


def test_json_has_the_rows_whole() -> None:
    data = json.loads(render_result_json(SWEEP))
    assert data["schema"] == "memprof.sweep/3"
    assert [from_json(PlanRow, row) for row in data["rows"]] == SWEEP.rows
    assert json.loads(render_result_json(FIT))["flag"] == "--tensor-parallel-size 4"


def test_curves_are_the_rows() -> None:
    by_size, by_length = curves(SWEEP).curves
    assert [(line.name, line.places, line.figures["tokens"]) for line in by_size.lines] == [
        ("max-model-len 8192", [1, 2, 4], [None, 200_000, 500_000]),
        ("max-model-len 16384", [1, 2, 4], [None, 180_000, 480_000]),
    ]
    assert by_size.failed.places == [1, 1]
    assert "ran out of device memory" in by_size.failed.texts[0]
    assert [line.figures["tokens"] for line in by_length.lines] == [
        [None, None],
        [200_000, 180_000],
        [500_000, 480_000],
    ]


def test_values_that_are_no_numbers_stand_in_their_order() -> None:
    rows = [
        PlanRow({"kv-cache-dtype": name}, "ok", tokens=i) for i, name in enumerate(["auto", "fp8"])
    ]
    (curve,) = curves(Sweep("m", [Knob("kv-cache-dtype", ["auto", "fp8"])], rows)).curves
    assert curve.ticks == [(0.0, "auto"), (1.0, "fp8")]
    assert curve.lines[0].figures["tokens"] == [0, 1]


def many(*counts: int) -> Sweep:
    """A sweep of so many values of each option."""
    knobs = [
        Knob(f"option-{at}", [str(value) for value in range(count)])
        for at, count in enumerate(counts)
    ]
    products = itertools.product(*(knob.values for knob in knobs))
    rows = [
        PlanRow(dict(zip((knob.name for knob in knobs), values, strict=True)), "ok", tokens=place)
        for place, values in enumerate(products)
    ]
    return Sweep("m", knobs, rows)


def test_so_many_lines_have_no_legend() -> None:
    few, lots = curves(many(MOST_NAMED, MOST_NAMED + 1)).curves
    assert [few.named, lots.named] == [False, True]
    assert "no legend" in few.text
    assert "no legend" not in lots.text


def hostile() -> Sweep:
    rows = [PlanRow({HOSTILE: value}, "failed", f"{HOSTILE} {value}") for value in (HOSTILE, "x")]
    return Sweep(HOSTILE, [Knob(HOSTILE, [HOSTILE, "x"])], rows, command=[HOSTILE])


@pytest.mark.parametrize("sweep", [SWEEP, hostile()], ids=["sweep", "hostile"])
def test_the_page_holds_every_plan_and_nothing_that_runs(sweep: Sweep) -> None:
    text = render_html(layout(sweep))
    page = Page(text)
    assert len(page.tables) == 1
    assert len(page.tables[0].rows) == len(sweep.rows)
    assert "<img" not in text.split("<script>")[0]
    assert page.count["img"] == 0
    assert page.count["script"] == 3
    assert "http" not in "".join(
        value or "" for _, found in page.attributes for value in found.values()
    )
    assert [len(curve["lines"]) for curve in page.data[0]["curves"]] == (
        [2, 3] if sweep is SWEEP else [1]
    )


@pytest.mark.parametrize(
    ("sweep", "width", "dark"),
    [(SWEEP, 1280, False), (SWEEP, 390, True), (hostile(), 390, False)],
    ids=["light", "dark", "hostile"],
)
def test_the_page_in_a_browser(
    chromium: Browser, tmp_path: Path, sweep: Sweep, width: int, dark: bool
) -> None:
    chromium.complaints.clear()
    (tmp_path / "sweep.html").write_text(render_html(layout(sweep)), encoding="utf-8")
    chromium.size(width, 900, dark)
    chromium.open(tmp_path / "sweep.html")
    assert chromium.value("document.documentElement.scrollWidth") <= width
    heights = "[...document.querySelectorAll('.plot.curve')].map(p => p.data.map(t => [...t.y]))"
    before = chromium.value(heights)
    assert len(before) == len(curves(sweep).curves)
    if sweep is SWEEP:
        assert before[0][0] == [None, 200_000, 500_000]
        chromium.value("document.querySelector('select.figure').focus()")
        for _ in range([figure.name for figure in FIGURES].index("kv_cache_bytes")):
            chromium.page.keyboard.press("ArrowDown")
        chromium.wait(lambda: chromium.value(heights) != before)
        title = chromium.value("document.querySelector('.figure-title').textContent")
        assert title == "KV cache, GiB"
        wanted = [
            None if row.kv_cache_bytes is None else row.kv_cache_bytes / GIB
            for row in SWEEP.rows[::2]
        ]
        assert wanted[0] is chromium.value(heights)[0][0][0] is None
        assert chromium.value(heights)[0][0][1:] == pytest.approx(
            [size for size in wanted if size is not None]
        )
    assert chromium.complaints == []


@pytest.mark.parametrize("counts", [(500, 2), (40, 25), (10, 5, 5, 4)])
def test_a_page_of_1000_plans_is_soon_written_and_open(
    chromium: Browser, tmp_path: Path, counts: tuple[int, ...]
) -> None:
    """By what a browser has to do, which no other process changes. (scripts/bench_sweep.py: time)"""
    sweep, seconds = many(*counts), list[float]()
    for _ in range(3):
        begin = time.process_time()
        text = render_html(layout(sweep))
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 2, seconds
    assert len(text) - len(render_html(layout(SWEEP))) < 1_500_000
    chromium.complaints.clear()
    (tmp_path / "sweep.html").write_text(text, encoding="utf-8")
    chromium.size(1280, 900)
    chromium.open(tmp_path / "sweep.html")
    traces = chromium.value("[...document.querySelectorAll('.plot.curve')].map(p => p.data.length)")
    assert len(traces) == len(counts)
    assert max(traces) <= MOST_NAMED
    points = chromium.value(
        "[...document.querySelectorAll('.plot.curve')].map("
        "p => p.data.flatMap(t => t.y).filter(y => y !== null).length)"
    )
    assert points == [1000] * len(counts)
    assert chromium.value("document.querySelectorAll('svg *').length") < 12_000
    assert chromium.complaints == []
