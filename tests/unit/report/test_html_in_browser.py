"""The page in a headless Chromium, loaded from the disk with the network off. Skipped where there is no browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Browser
from tests.support.host_runs import write_hosts
from tests.support.runs import oom_report, report_of
from tests.unit.accounting.builders import DATA
from tests.unit.report.test_html import HOSTILE, hostile_report
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.deployment.report import build_deployment
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.deployment import load_parts
from vllm_memprof.report.html import render_html


@pytest.fixture
def show(chromium: Browser, tmp_path: Path) -> Any:
    """Opens the page of a report; what the browser complains of fails the test at its end."""
    chromium.complaints.clear()

    def show(
        *reports: Report,
        width: int = 1280,
        dark: bool = False,
        folded: bool = False,
        lang: str = "en",
    ) -> Browser:
        (tmp_path / "page.html").write_text(render_html(*reports, lang=lang), encoding="utf-8")
        chromium.size(width, 900, dark)
        chromium.open(tmp_path / "page.html")
        if not folded:
            chromium.value("document.querySelectorAll('details').forEach(d => { d.open = true; })")
            drawn = "[...document.querySelectorAll('.plot')].every(plot => plot.data)"
            chromium.wait(lambda: bool(chromium.value(drawn)))
        return chromium

    yield show
    assert chromium.complaints == []


def drawn(browser: Browser, name: str) -> Any:
    """What Plotly drew: names of the traces that are in the legend, and a height of each."""
    return browser.value(
        f"document.querySelector('.plot.{name}').data?.map(t => [t.name, t.y?.at(-1)])"
    )


@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)]
)
def test_it_loads_from_the_disk_and_fits(show: Any, width: int, dark: bool) -> None:
    browser = show(report_of("recorded_023_tp2"), width=width, dark=dark)
    names = [name for name, _ in drawn(browser, "timeline")]
    assert {"tensors: weights", "tensors: KV cache", "context (m)", "in use, as read"} <= set(names)
    assert browser.value("document.querySelectorAll('.view:not([hidden]) td.bar i').length") > 4
    assert browser.value("document.documentElement.scrollWidth") <= width
    plot = "document.querySelector('.plot.timeline svg').getBoundingClientRect().width"
    assert browser.value(plot) <= width
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
    assert browser.value("document.querySelector('.plot.timeline').layout.paper_bgcolor") == (
        "#14181d" if dark else "#ffffff"
    )


def test_the_browser_hears_of_complaints(chromium: Browser, tmp_path: Path) -> None:
    """The other tests rest on it: an exception, a request and a dialog are each seen."""
    chromium.complaints.clear()
    (tmp_path / "bad.html").write_text(
        "<img src='http://example.invalid/x.png'><script>nothing.at.all</script>"
    )
    chromium.open(tmp_path / "bad.html")
    found = " ".join(chromium.complaints)
    assert "nothing is not defined" in found
    assert "request: http://example.invalid/x.png" in found
    chromium.complaints.clear()


def test_the_rank_selector_works_from_the_keyboard(show: Any) -> None:
    report = report_of("skewed_tp2")
    browser = show(report)
    granted = [rank.budget.engine_kv_cache_bytes for rank in report.ranks]
    steps = "[...document.querySelectorAll('.view:not([hidden]) tr:has(td.bar)')]"
    shown = f"{steps}.map(row => row.textContent).join(' ')"
    assert f"{granted[0]:,}" in browser.value(shown)
    browser.value("document.querySelector('select.ranks').focus()")
    browser.page.keyboard.press("ArrowDown")
    browser.wait(lambda: browser.value("document.querySelector('select.ranks').value") == "1")
    assert f"{granted[1]:,}" in browser.value(shown)
    visible = (
        "[...document.querySelectorAll('.view')].filter(v => !v.hidden).map(v => v.dataset.view)"
    )
    assert browser.value(visible) == ["1", "1"]
    assert (
        browser.value("document.querySelector('.controls [role=status]').textContent")
        == "Showing TP1"
    )
    label = browser.value("document.querySelector('.plot.timeline').getAttribute('aria-label')")
    assert label.startswith("TP1: ")


def test_equal_widths_from_the_keyboard(show: Any) -> None:
    browser = show(report_of("recorded_023_tp2"))
    places = "[...document.querySelector('.plot.timeline').data[0].x]"
    before = browser.value(places)
    browser.value("document.querySelector('.by-reading').focus()")
    browser.page.keyboard.press(" ")
    browser.wait(lambda: bool(browser.value("document.querySelector('.by-reading').checked")))
    assert before != browser.value(places) == list(range(len(before)))


def test_tables_sort_up_down_and_back(show: Any) -> None:
    browser = show(report_of("killed_tp2"))
    table = "[...document.querySelectorAll('table')].find(t => t.caption.textContent.startsWith('Phases'))"
    column = f"[...({table}).querySelectorAll('thead th')].findIndex(h => h.textContent.startsWith('Free'))"
    values = f"[...({table}).tBodies[0].rows].map(row => row.cells[{column}].dataset.v)"
    press = f"({table}).querySelectorAll('thead th')[{column}].querySelector('button').click()"
    original = browser.value(values)
    orders = []
    for _ in range(3):
        browser.value(press)
        orders.append(
            (
                browser.value(f"({table}).querySelectorAll('thead th')[{column}].ariaSort"),
                browser.value(values),
            )
        )
    known = sorted(float(value) for value in original if value)
    assert [state for state, _ in orders] == ["ascending", "descending", "none"]
    assert [float(value) for value in orders[0][1] if value] == known
    assert [float(value) for value in orders[1][1] if value] == known[::-1]
    for _, order in orders[:2]:  # what is unknown is last, whichever way
        assert order[len(known) :] == [""] * (len(original) - len(known))
    assert orders[2][1] == original
    assert "" in original


def test_markup_in_names_does_nothing(show: Any) -> None:
    browser = show(hostile_report())
    browser.value("document.querySelector('select.ranks').value = '1'")
    browser.value("document.querySelector('select.ranks').dispatchEvent(new Event('change'))")
    assert browser.value("document.querySelector('h1').textContent") == HOSTILE
    assert (
        browser.value("document.images.length + document.querySelectorAll('image[href^=x]').length")
        == 0
    )
    assert browser.value("document.scripts.length") == 3
    assert browser.value(
        "document.querySelector('.plot.timeline').textContent.includes('<img src=x')"
    )


@pytest.mark.parametrize("name", ["recorded_killed_tp2", "killed_tp2", "plan_tp2"])
def test_runs_that_did_not_get_far_are_drawn(show: Any, name: str) -> None:
    assert drawn(show(report_of(name)), "timeline")


@pytest.mark.parametrize(
    "report", [oom_report(), report_of("recorded_oom")], ids=["by hand", "recorded"]
)
def test_out_of_memory_is_marked(show: Any, report: Report) -> None:
    browser = show(report)
    assert "out of memory" in browser.value("document.querySelector('.plot.timeline').textContent")


def test_logs_have_no_timeline_and_no_empty_frame(show: Any) -> None:
    browser = show(
        *(build_report(run) for run in read_log(str(DATA / "logs" / "two_methods_910b_tp2.md")))
    )
    assert browser.value("document.querySelectorAll('.plot').length") == 0
    assert browser.value("document.querySelectorAll('td.bar i').length") > 0


def test_every_control_and_table_has_a_name(show: Any) -> None:
    """As a screen reader sees it: the browser's own accessibility tree."""
    browser = show(report_of("skewed_tp2"))
    tree = browser.page.context.new_cdp_session(browser.page)
    nodes = [
        node for node in tree.send("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]
    ]
    roles: dict[str, list[str]] = {}
    for node in nodes:
        roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("button", "combobox", "checkbox", "table", "region", "columnheader"):
        assert roles.get(role), role
        assert all(roles[role]), role
    assert "Ranks" in roles["combobox"]
    assert sum(name.startswith("TP0: ") for name in roles["group"]) == 1
    assert "image" not in roles  # what is drawn is in words and in a table


def test_the_answer_comes_first_and_the_rest_is_folded(show: Any) -> None:
    browser = show(report_of("recorded_tp1"), folded=True)
    order = "[...document.querySelectorAll('.device, .answer, .contents, .part')].map(e => e.classList[0])"
    found = browser.value(order)
    assert found[:3] == ["device", "answer", "contents"]
    assert len(found) > 6
    assert set(found[3:]) == {"part"}
    assert browser.value("document.querySelectorAll('.part > details[open]').length") == 0


#: Left, top, right and bottom of each block of the opening that is there.
BLOCKS = """Object.fromEntries(['answer', 'device', 'legend', 'actions', 'contents'].map(name => {
  const box = document.querySelector('.' + name)?.getBoundingClientRect();
  return [name, box && [box.left, box.top, box.right, box.bottom]];
}))"""


def kinds_of_runs(folder: Path) -> dict[str, Report]:
    """A run, failed ones, one without a device, a log, a plan, and a deployment on two hosts."""
    names = "recorded_023_tp2", "recorded_oom", "recorded_oom_image", "killed_tp2", "plan_tp2"
    (log,) = read_log(str(DATA / "logs" / "recorded_tp2_0.23.0.log"))
    hosts = build_deployment(load_parts(write_hosts(folder / "hosts", ahead_s=3.0)))
    return {name: report_of(name) for name in names} | {"log": build_report(log), "hosts": hosts}


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("width", [390, 800, 1280])
def test_the_legend_stands_at_its_bar(show: Any, tmp_path: Path, width: int, lang: str) -> None:
    for name, report in kinds_of_runs(tmp_path).items():
        browser = show(report, width=width, folded=True, lang=lang)
        assert browser.value("document.documentElement.scrollWidth") <= width, name
        found = browser.value(BLOCKS)
        if found.get("device") is None:
            assert found.get("legend") is None, name
            continue
        assert 0 <= found["legend"][1] - found["device"][3] <= 24, name  # right below it
        failed = found["answer"][1] < found["device"][1]
        if besides := found.get("actions" if failed else "answer"):
            beside, below = found["legend"][0] > besides[2], besides[1] > found["legend"][3]
            assert beside if width == 1280 else below, name
        named = """[...document.querySelectorAll('.device i')].filter(share =>
          share.querySelector('b')?.offsetWidth && !share.querySelector('span').offsetWidth)"""
        assert browser.value(f"{named}.length") == 0, name


def test_a_failed_run_begins_with_the_failure(show: Any) -> None:
    """Then the device at that moment, and what to change."""
    for name in ("recorded_oom", "recorded_oom_image"):
        found = show(report_of(name), width=390, folded=True).value(BLOCKS)
        tops = [found[block][1] for block in ("answer", "device", "legend", "actions", "contents")]
        assert tops == sorted(tops), name


def test_what_is_allocated_of_an_available_kv_cache_is_said(show: Any) -> None:
    """The bar has whole blocks, the answer what the engine may use."""
    browser = show(report_of("recorded_oom"), folded=True)
    legend = browser.value("document.querySelector('.legend').innerText").split()
    assert " ".join(legend).startswith("KV cache 32.54 53 % of 32.55 available")
    assert "KV cache 32.55 GiB" in browser.value("document.querySelector('.answer').innerText")


def test_nothing_is_wider_than_a_sheet_of_a4(show: Any, tmp_path: Path) -> None:
    """210 mm less a margin of 12 mm on either side."""
    sheet = 703
    wider = f"""[...document.querySelectorAll('table, .plot svg, .opening *, dd')].filter(
      each => each.getBoundingClientRect().right > {sheet}).map(
      each => each.caption?.textContent ?? each.outerHTML.slice(0, 80))"""
    try:
        for name, report in kinds_of_runs(tmp_path).items():
            browser = show(report, width=sheet)
            browser.page.emulate_media(media="print")
            browser.value("dispatchEvent(new Event('beforeprint'))")
            assert browser.value(wider) == [], name
    finally:
        browser.page.emulate_media(media="null")


def test_a_link_of_the_contents_opens_its_section(show: Any) -> None:
    browser = show(report_of("recorded_tp1"), folded=True)
    browser.value("document.querySelectorAll('.contents a')[2].click()")
    opened = "[...document.querySelectorAll('.part > details')].map(part => part.open)"
    browser.wait(lambda: True in browser.value(opened))
    assert browser.value(opened).index(True) == 2


def test_paper_is_light_and_nothing_is_folded(show: Any) -> None:
    browser = show(report_of("recorded_tp1"), dark=True, folded=True)
    background = "document.querySelector('.plot.timeline').layout.paper_bgcolor"
    browser.value("dispatchEvent(new Event('beforeprint'))")
    assert browser.value("document.querySelectorAll('details:not([open])').length") == 0
    assert browser.value(background) == "#ffffff"
    browser.value("dispatchEvent(new Event('afterprint'))")
    assert browser.value("document.querySelectorAll('details[open]').length") == 0
    browser.value("document.querySelector('details:has(.timeline)').open = true")
    browser.wait(lambda: bool(browser.value(background) == "#14181d"))
