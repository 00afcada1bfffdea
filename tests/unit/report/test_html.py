"""The page as text: its figures are those of report.json, names stay text, it is one file and not too large."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tests.support.many_ranks import write_many_hosts, write_many_ranks
from tests.support.page import Page
from tests.support.render import render_json
from tests.support.runs import LOGS, RUNS, oom_report, report_of
from tests.unit.accounting.builders import DATA
from tests.unit.accounting.builders import device_memory as device_edges
from tests.unit.report.test_plots import serving
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.model import Finding, Report
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.codec import from_json
from vllm_memprof.record.spans import DeviceMemory
from vllm_memprof.report.documents.first_screen import (
    FirstScreen,
    first_screen_document,
    opening_of,
)
from vllm_memprof.report.documents.report import head, verdict
from vllm_memprof.report.html import render_html, script_json, sort_value
from vllm_memprof.report.sections import sections
from vllm_memprof.report.sections.findings import finding_views

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.mark.parametrize("name", RUNS)
def test_the_figures_are_those_of_the_other_formats(name: str) -> None:
    check_page(report_of(name))


def test_the_figures_of_a_run_out_of_memory() -> None:
    report = oom_report()
    page = check_page(report)
    assert "out of memory: 58.00 of 60.00 GiB reserved, 3.00 GiB of it not allocated" in page.text
    assert [band["phase"] for band in page.data[0]["views"][0]["timeline"]["bands"]] == [
        "weight_load",
        "oom",
    ]


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_the_figures_of_logs(log) -> None:
    for run in read_log(str(log)):
        page = check_page(build_report(run))
        assert "a log names no moments in time: there is no timeline" in page.text


def check_page(report: Report) -> Page:
    """Text, tables and plots against report.json, and against what the other reporters draw."""
    source = render_html(report)
    page = Page(source)
    timed = any(view["timeline"] or view["serving"] for view in page.data[0]["views"])
    assert len(source.encode()) < (1_600_000 if timed else 300_000)
    assert ("Plotly, Inc." in source) == timed
    flat = " ".join(page.text.split())
    for text in [verdict(report), *(line.value for line in head(report))]:
        assert " ".join(text.split()) in flat
    for view in finding_views(report):
        for text in (view.id, view.price, view.title, view.evidence, view.action):
            assert " ".join(text.split()) in flat
    same_opening(flat, report)
    same_tables(page, report)
    same_plots(page.data[0], json.loads(render_json(report)))
    return page


def same_opening(flat: str, report: Report) -> None:
    """The page begins with what the terminal says first; a failed run with its failure."""
    screen = FirstScreen([report])
    opening, terminal = opening_of(screen, 200), first_screen_document(screen, 200)
    answer, todo = (
        " ".join(f"{line.name} {line.value}" for line in lines).split()
        for lines in (opening.answer, opening.todo)
    )
    assert opening.answer == terminal.head[1:]
    blocks = [" ".join(answer), *([" ".join(["What to do", *todo])] if todo else [])]
    if opening.bar is not None:
        (device,) = (each for each in terminal.sections if each.title == opening.bar.title)
        sizes = [[share.title, share.size] for share in opening.bar.shares]
        assert sizes == [row.cells[:2] for row in device.rows]
        blocks.insert(1 if opening.failed else 0, opening.bar.title)
        assert all(" ".join(" ".join(row).split()) in flat for row in sizes)
    places = [flat.index(block) for block in blocks]
    assert places == sorted(places)
    assert places[-1] < flat.index("The run")


def same_tables(page: Page, report: Report) -> None:
    """Every section with every row, in its order, behind the tables of the plots."""
    wanted = [section for section in sections(report, 200) if section.rows]
    found = page.tables[len(page.tables) - len(wanted) :]
    for section, table in zip(wanted, found, strict=True):
        assert table.caption == section.title
        assert table.rows == [[row.first, *row.cells[1:]] for row in section.rows]
        assert [title for title in table.columns if title != "name"] == [
            c.title for c in section.columns if c.title
        ]
    flat = " ".join(page.text.split())
    for section in sections(report, 200):
        assert all(" ".join(note.split()) in flat for note in section.notes)


def same_plots(drawn: dict[str, Any], data: dict[str, Any]) -> None:
    ranks = {rank["label"]: rank for rank in data["ranks"]}
    assert drawn["labels"] == list(ranks)
    for view in drawn["views"]:
        rank = ranks[view["drawn"]]
        assert view["device_total_bytes"] == rank["device_total_bytes"]
        assert view["requested_bytes"] == rank["budget"]["requested_bytes"]
        levels = {
            step["title"]: step["bytes"] for step in view["waterfall"] if step["kind"] == "level"
        }
        if levels:
            granted = rank["budget"]["engine_kv_cache_bytes"]
            assert levels["KV cache"] == (
                rank["budget"]["kv_cache_bytes"] if granted is None else granted
            )
            assert (
                levels.get("KV cache that fits into requested memory")
                == rank["budget"]["fits_request_bytes"]
            )
        if view["timeline"] is None:
            continue
        sizes = [[row["bytes"] for row in moment["owners"]] for moment in device_edges(rank)]
        known = {size for moment in sizes for size in moment}
        known |= {moment["unexplained_bytes"] for moment in device_edges(rank)}
        for owner in view["timeline"]["owners"]:
            if not owner["name"].startswith("tensors"):
                assert set(owner["bytes"]) <= known | {None}
        used = [
            edge["device_total_bytes"] - edge["device_free_bytes"]
            for phase in rank["phases"]
            for edge in (phase["before"], phase["after"])
            if edge is not None
            and None not in (edge["device_total_bytes"], edge["device_free_bytes"])
        ]
        assert sorted(size for size in view["timeline"]["in_use"] if size is not None) == sorted(
            used
        )


def test_report_json_alone_makes_the_same_page() -> None:
    for name in ("recorded_023_tp2", "recorded_killed_tp2", "recorded_oom"):
        report = report_of(name)
        again = Page(render_html(from_json(Report, json.loads(render_json(report)))))
        page = Page(render_html(report))
        assert again.data == page.data
        assert again.outline() == page.outline()
        assert [table.rows for table in again.tables] == [table.rows for table in page.tables]


def test_what_was_not_measured_is_said_and_is_no_figure() -> None:
    page = Page(render_html(report_of("eager_tp2")))
    assert "NOT MEASURED: graph_capture (eager mode" in page.text
    readings = next(table for table in page.tables if table.caption.startswith("Readings"))
    assert "-" in readings.rows[0]


def test_a_log_says_that_it_has_no_timeline() -> None:
    (run,) = read_log(str(DATA / "logs" / "recorded_tp2_0.23.0.log"))
    page = Page(render_html(build_report(run)))
    assert page.data[0]["views"][0]["timeline"] is None
    assert not any(table.caption.startswith("Readings") for table in page.tables)


def test_several_starts_are_one_page_without_a_library() -> None:
    reports = [
        build_report(run) for run in read_log(str(DATA / "logs" / "two_methods_910b_tp2.md"))
    ]
    page = Page(render_html(*reports))
    assert page.count["article"] == len(reports) == len(page.data)
    assert "engine start 5 of 5" in page.text
    assert not any(len(script) > 10**6 for script in page.scripts)
    ids = [attributes["id"] for _, attributes in page.attributes if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.attributes:
        for name in ("aria-labelledby", "for"):
            assert name not in attributes or attributes[name] in ids, (tag, attributes)


# --- names are text


def hostile_report() -> Report:
    """Markup wherever a record holds a name that somebody else chose."""
    report = report_of(
        "skewed_tp2",
        model=HOSTILE,
        command=["memprof", "</script><script>alert(2)</script>", HOSTILE],
    )
    ranks = [
        replace(rank, label=f"TP{i}</script>{HOSTILE}", errors=[HOSTILE])
        for i, rank in enumerate(report.ranks)
    ]
    ranks = [
        replace(rank, phases=[replace(row, error=HOSTILE) for row in rank.phases]) for rank in ranks
    ]

    def renamed(memory: DeviceMemory) -> DeviceMemory:
        rows = [replace(r, component=f"{r.component}{HOSTILE}") for r in memory.rows]
        return replace(memory, rows=rows)

    phases = [
        replace(span, owners={side: renamed(memory) for side, memory in span.owners.items()})
        for span in ranks[1].phases
    ]
    ranks[1] = replace(ranks[1], phases=phases)
    finding = Finding(
        HOSTILE, "info", None, HOSTILE, f'"{HOSTILE}', HOSTILE, action="'><script>alert(3)</script>"
    )
    return replace(report, ranks=ranks, findings=[finding])


def test_markup_in_names_stays_text() -> None:
    page = Page(render_html(hostile_report()))
    clean = Page(render_html(report_of("skewed_tp2")))
    assert page.count["img"] == 0
    assert page.count["script"] == clean.count["script"] == 3
    assert ("h1", HOSTILE) in page.headings
    assert HOSTILE in page.data[0]["labels"][0]
    assert "</script><script>alert(2)</script>" in page.text
    assert not any(
        name.startswith("on") for _, attributes in page.attributes for name in attributes
    )


@pytest.mark.parametrize(
    "text", ["</script>", "<!--<script>", "a\u2028b\u2029c", "&lt;", "通义千问", '"\\']
)
def test_json_stays_within_its_element(text: str) -> None:
    written = script_json({"name": text})
    assert json.loads(written) == {"name": text}
    assert not re.search("[<>&\u2028\u2029]", written)
    with pytest.raises(ValueError, match="JSON"):
        script_json(float("nan"))


def test_chinese_stays_whole() -> None:
    page = Page(render_html(report_of("graph_tp2", model="/模型/通义千问-视觉语言-大模型")))
    assert ("h1", "/模型/通义千问-视觉语言-大模型") in page.headings


def test_nothing_is_loaded_and_no_other_script_runs() -> None:
    source = render_html(report_of("graph_tp2"))
    page = Page(source)
    policy = next(
        a["content"] for t, a in page.attributes if a.get("http-equiv") == "Content-Security-Policy"
    )
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    scripts = [script for script in page.scripts if not script.lstrip().startswith("{")]
    assert [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    ] == allowed
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert not any(
        "src" in attributes or ("href" in attributes and not attributes["href"].startswith("#"))
        for _, attributes in page.attributes
    )
    assert page.count["link"] == 0


# --- it can be read by everybody


def test_what_assistive_programs_need_is_there() -> None:
    page = Page(render_html(report_of("skewed_tp2")))
    assert page.count["h1"] == page.count["main"] == 1
    by_tag: dict[str, list[dict[str, str | None]]] = {}
    for tag, attributes in page.attributes:
        by_tag.setdefault(tag, []).append(attributes)
    assert by_tag["html"][0]["lang"] == "en"
    assert all(column for table in page.tables for column in table.columns)
    assert all(table.caption for table in page.tables)
    assert all("scope" in attributes for attributes in by_tag["th"])
    regions = [a for a in by_tag["div"] if a.get("role") == "region"]
    assert len(regions) == len(page.tables)
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in regions)
    plots = [a for a in by_tag["div"] if "plot" in (a.get("class") or "").split()]
    assert len(plots) == 2
    assert all(a["role"] == "group" for a in plots)
    assert "The same as a table" in page.text
    (control,) = by_tag["select"]
    assert any(a.get("for") == control["id"] for a in by_tag["label"])


def themes() -> dict[str, dict[str, str]]:
    style = files("vllm_memprof.report").joinpath("templates/page.css").read_text()
    light = dict(re.findall(r"--([\w-]+): (#\w{6});", style.split("@media")[0]))
    dark = dict(re.findall(r"--([\w-]+): (#\w{6});", style.split("@media")[1]))
    return {"light": light, "dark": {**light, **dark}}


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_of_texts(theme: str) -> None:
    """At least 4.5 to 1, as WCAG 2 AA asks of text."""
    colours = themes()[theme]
    for ground in ("page", "panel"):
        for text in ("text", "soft", "link", "error", "warning", "info", "good", "budget"):
            dark, light = sorted(luminance(colours[name]) for name in (ground, text))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)


@pytest.mark.parametrize(
    ("cell", "order"),
    [
        ("9.44 → 13.70", "13.70"),
        ("- → 0.26", "0.26"),
        ("9.44 → -", ""),
        ("62,179,508,224", "62179508224"),
        ("-948,628,070", "-948628070"),
        ("+9,400.0", "9400.0"),
        ("9.80x", "9.80"),
        ("-", ""),
        ("?", ""),
        ("", ""),
        ("NOT MEASURED", ""),
        ("weight_load", None),
        ("910B", None),
        ("3 of 4", None),
    ],
)
def test_what_cells_are_sorted_by(cell: str, order: str | None) -> None:
    assert sort_value(cell) == order


# --- sizes


#: Makes the page of a run in a process of its own; prints its CPU time and its peak of memory.
MEASURED = """
import sys, time
from vllm_memprof.cli import main
began = time.process_time()
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code
used = time.process_time() - began
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(used, int(peak.split()[1]) * 1024)
"""


def measured(folder: Path, target: Path) -> tuple[float, float]:
    """Write the page of a folder; return CPU seconds, and bytes at the peak."""
    words = ["report", str(folder), "--format", "html", "-o", str(target)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seconds, peak = (float(word) for word in done.stdout.split())
    return seconds, peak


def peak_of_linear(quarter: Path, whole: Path, target: Path) -> float:
    """Return the peak of memory; the CPU time of four times the ranks is about four times as long.

    It is sixteen times as long where each rank looks at all others. Neither a slow machine nor a
    loaded one changes that; a load that comes and goes is why there are three tries.
    """
    growths = []
    for _ in range(3):
        least, _ = measured(quarter, target)
        most, peak = measured(whole, target)
        growths.append(most / least)
        if growths[-1] < 8:
            return peak
    raise AssertionError(f"CPU time of four times the ranks, by that of one: {growths}")


@pytest.mark.full
def test_512_ranks_from_the_record_to_the_page(tmp_path: Path) -> None:
    run_dir = write_many_ranks(tmp_path / "run", ranks=512, outlier=300)
    target = tmp_path / "page.html"
    quarter = write_many_ranks(tmp_path / "quarter", ranks=128, outlier=100)
    peak = peak_of_linear(quarter, run_dir, target)
    assert peak < 500_000_000
    assert target.stat().st_size < 10_000_000
    page = Page(target.read_text(encoding="utf-8"))
    assert "Between those shown, and in report.json" in page.text
    assert len(page.data[0]["labels"]) == 512
    assert "TP300" in {view["labels"] for view in page.data[0]["views"]}  # outliers are kept
    skew = next(
        table for table in page.tables if table.caption == "Figures by rank: least, most, median"
    )
    headroom = next(row for row in skew.rows if row[0] == "headroom at the serving peak")
    assert headroom[2] == "TP300"


@pytest.mark.full
def test_64_hosts_of_8_ranks_are_one_page(tmp_path: Path) -> None:
    folder = write_many_hosts(tmp_path / "runs", hosts=64, ranks=8)
    target = tmp_path / "page.html"
    quarter = write_many_hosts(tmp_path / "quarter", hosts=16, ranks=8)
    peak = peak_of_linear(quarter, folder, target)
    assert peak < 400_000_000
    assert target.stat().st_size < 8_000_000
    page = Page(target.read_text(encoding="utf-8"))
    hosts = next(table for table in page.tables if table.caption.startswith("Hosts, the one with"))
    assert hosts.rows[0][:2] == ["node32", "DP32 TP0-TP7"]
    assert "48 more in report.json" in page.text


def test_thousands_of_requests_are_one_page_below_2_5_mb() -> None:
    report = report_of("recorded_023_tp2")
    source = render_html(replace(report, ranks=[serving(report.ranks[0], requests=5000)]))
    assert len(source.encode()) < 2_500_000
    assert "more readings are in report.json" in Page(source).text
