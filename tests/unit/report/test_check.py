"""A check through every reporter: equal figures, any width, valid XML, and nothing of a run acts as a command."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import partial

import pytest
from rich.cells import cell_len

from tests.golden.update import CHECKS
from tests.support.render import check_table
from tests.support.runs import check_result
from tests.unit.accounting.builders import recorded
from vllm_memprof.accounting import build_report
from vllm_memprof.check.budget_file import parse_budget
from vllm_memprof.check.ci import render_check_github, render_check_junit
from vllm_memprof.check.document import check_document, sentences
from vllm_memprof.check.outcomes import CheckResult, check_report
from vllm_memprof.report.json_text import render_result_json
from vllm_memprof.report.markdown import render_markdown

WIDTHS = (60, 80, 120, 200)
CASES = sorted({case for case, _ in CHECKS.values()}, key=str)
NASTY = (
    "<img src=x onerror=alert(1)> ]]> 100% | `a` @all #1\n::error::planted\r\n::set-output name=x::y "
    "\x00\x1b[31m\ud800 深度求索"
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_all_reporters_give_the_same_figures(case: tuple[str, str, str | None]) -> None:
    result = check_result(*case)
    data = json.loads(render_result_json(result))
    assert (data["schema"], data["ok"], data["failed"]) == (
        "memprof.check/2",
        result.ok,
        len(result.failures),
    )
    texts = [check_table(result, width) for width in WIDTHS[1:]] + [
        render_markdown(partial(check_document, result))
    ]
    for limit in data["limits"]:
        for text in texts:
            plain = text.replace("\\", "")
            assert all(word in plain for word in limit["key"].split())
            for reading in limit["readings"]:
                if not reading["ok"] and reading["margin"] is not None:
                    assert f"{reading['margin']:+,}" in plain
                    assert f"{reading['value']:,}" in " ".join(plain.split())
    failed = {outcome.key for outcome in result.failures}
    cases = ET.fromstring(render_check_junit(result)).findall(".//testcase")
    assert {row.get("name") for row in cases if row.find("failure") is not None} == failed
    commands = render_check_github(result, "b.toml")
    assert (
        set(re.findall(r"^::error title=memprof check%3A ([^,:]+)", commands, re.MULTILINE))
        == failed
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(case: tuple[str, str, str | None], width: int) -> None:
    result = check_result(*case)
    for text in (check_table(result, width), check_table(result, width, "ascii")):
        assert all(cell_len(line) <= width for line in text.splitlines())
        assert "\x1b" not in text


def test_a_failure_says_measured_limit_margin_and_rank() -> None:
    result = check_result("skewed_tp2", "budgets/guard.toml", "eager_tp2")
    texts = {text for outcome in result.failures for text in sentences(outcome)}
    assert (
        "max_non_torch: 0.8100 GiB (869,730,816 bytes) (m) on TP1, allowed is at most 0.6519 GiB (700,000,000 bytes): "
        "missed by 0.1581 GiB (169,730,816 bytes)"
    ) in texts
    assert "max_graph: NOT MEASURED on TP0-TP1: graph_capture: eager mode" in texts


def nasty() -> CheckResult:
    """A run whose every name is hostile, and that fails in words of its own."""
    report = build_report(recorded("graph_tp2"))
    run = replace(report.run, model=NASTY, device=NASTY, status="failed", exit_reason=NASTY)
    ranks = [replace(rank, label=NASTY) for rank in report.ranks]
    findings = [
        replace(finding, title=NASTY, evidence=NASTY, label=NASTY) for finding in report.findings
    ]
    text = "[budget]\nmax_weights = 1\nfail_on = ['graph-not-charged']\n"
    return check_report(
        replace(report, run=run, ranks=ranks, findings=findings),
        parse_budget(text, f"b,:%{NASTY}.toml"),
    )


def test_github_commands_hold_what_a_run_says_as_text() -> None:
    lines = render_check_github(nasty(), "a,b:c%\nd.toml").split("\n")
    assert lines.pop() == ""
    assert all(
        re.fullmatch(r"::(error|notice) title=memprof check[^:]*::[^\r]*", line) for line in lines
    ), lines
    assert sum("file=a%2Cb%3Ac%25%0Ad.toml,line=2::" in line for line in lines) == 1
    assert (
        sum(line.startswith("::error") for line in lines) == 4
    )  # status, weights, the finding, the verdict
    assert any("100%25 | `a` @all #1%0A::error::planted%0A::set-output" in line for line in lines)


def test_junit_is_valid_whatever_a_run_says() -> None:
    text = render_check_junit(nasty())
    root = ET.fromstring(text.encode())
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", text)
    validate_junit(root)
    assert "深度求索" in text
    assert "<img" not in text


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_junit_has_a_case_per_limit(case: tuple[str, str, str | None]) -> None:
    result = check_result(*case)
    root = ET.fromstring(render_check_junit(result))
    validate_junit(root)
    cases = root.findall("testsuite/testcase")
    assert [row.get("name") for row in cases] == [outcome.key for outcome in result.limits]
    for row, outcome in zip(cases, result.limits, strict=True):
        kinds = [failure.get("type") for failure in row.findall("failure")]
        assert kinds == (
            [] if outcome.ok else ["not measured" if outcome.unmeasured else "over budget"]
        )


#: element -> (attributes it must have, attributes it may have, elements it may hold), as Jenkins and GitLab read it.
SCHEMA: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": (set(), {"name", "tests", "failures", "errors", "time"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors"},
        {"skipped", "time", "timestamp", "hostname", "id", "package"},
        {"properties", "testcase", "system-out", "system-err"},
    ),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, set(), set()),
    "testcase": (
        {"name", "classname"},
        {"time", "assertions", "status"},
        {"skipped", "error", "failure"},
    ),
    "failure": (set(), {"type", "message"}, set()),
}


def validate_junit(root: ET.Element) -> None:
    assert root.tag == "testsuites"
    for element in root.iter():
        required, optional, children = SCHEMA[element.tag]
        assert required <= set(element.keys()) <= required | optional
        assert {child.tag for child in element} <= children
    for suite in [root, *root.iter("testsuite")]:
        assert int(suite.get("tests", "")) == len(list(suite.iter("testcase")))
        assert int(suite.get("failures", "")) == len(list(suite.iter("failure")))


def test_markdown_is_text() -> None:
    text = render_markdown(partial(check_document, nasty()))
    assert "<img" not in text
    assert "@all" not in text
    assert not re.search(r"^::", text, re.MULTILINE)
