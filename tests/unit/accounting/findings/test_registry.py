"""Rules of findings: all of them are listed, explained, translated, and filled in alike."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from string import Formatter

import pytest

import vllm_memprof
from tests.support.write_findings_docs import SECTIONS, sections_of
from tests.unit.accounting.builders import gib, process, recorded, run_of
from vllm_memprof.accounting import build_report, findings
from vllm_memprof.accounting.budget.kv import worth_in_tokens
from vllm_memprof.accounting.findings.needs import HOOKS, NOTHING
from vllm_memprof.accounting.findings.registry import (
    WARNING_BYTES,
    Context,
    FindingRule,
    Found,
    RankContext,
    by_bytes,
    finding,
    finding_of_run,
)
from vllm_memprof.accounting.findings.table import FINDINGS, blind_ranks
from vllm_memprof.engines import ENGINES
from vllm_memprof.text import Text, text, translate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(vllm_memprof.__file__).parents[1]
ZH = tomllib.loads((ROOT / "vllm_memprof/report/lang/zh/findings.toml").read_text())


def rules() -> list[FindingRule]:
    """All rules of the modules, wherever they are listed."""
    found = []
    names = [info.name for info in pkgutil.iter_modules(findings.__path__, f"{findings.__name__}.")]
    for name in [*names, *(row.findings for row in ENGINES.values() if row.findings)]:
        module = importlib.import_module(name)
        found += [value for value in vars(module).values() if isinstance(value, FindingRule)]
    return found


def test_every_rule_is_listed_once() -> None:
    assert sorted(rule.id for rule in rules()) == sorted(FINDINGS)
    assert {rule.source for rule in rules()} == {rule.source for rule in FINDINGS.values()}


@pytest.mark.parametrize("rule_id", sorted(FINDINGS))
def test_a_rule_has_a_page_a_translation_and_needs(rule_id: str) -> None:
    rule = FINDINGS[rule_id]
    assert (ROOT / "docs" / "findings" / f"{rule_id}.md").exists()
    assert isinstance(rule.title, Text)
    assert translate(rule.title, ZH) != rule.title
    assert rule.needs.said
    assert set(sections_of(rule)) == set(SECTIONS)
    path, _, symbol = rule.source.partition("::")
    assert symbol == rule_id.replace("-", "_")
    assert f"def {symbol}(" in (ROOT / path).read_text()


def test_places_that_explanations_name_are_there() -> None:
    named = {
        place
        for rule in FINDINGS.values()
        for place in re.findall(r"`(vllm_memprof/[\w/]+\.py)::(\w+)`", rule.explained)
    }
    assert len(named) > 10
    for path, symbol in named:
        lines = (ROOT / path).read_text()
        assert re.search(rf"^\s*(def |class )?{symbol}\b", lines, re.MULTILINE), (path, symbol)


def literals() -> set[str]:
    """Templates of ``text`` and ``join`` in the modules of the findings."""
    folder = Path(inspect.getfile(findings)).parent
    calls = (
        node
        for path in (*folder.glob("*.py"), *(ROOT / "vllm_memprof").glob("engines/*/findings.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("text", "join")
    )
    values = (call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant))
    of_rows = {what for row in ENGINES.values() for *_, what in row.observing}
    return {value for value in values if isinstance(value, str)} | of_rows


def parameters(template: str) -> set[tuple[str, str | None]]:
    return {(name, spec) for _, name, spec, _ in Formatter().parse(template) if name is not None}


def test_every_sentence_has_a_translation_with_its_parameters() -> None:
    assert literals() == set(ZH)
    assert {key for key in ZH if parameters(key) != parameters(ZH[key])} == set()


def test_no_module_is_long() -> None:
    folder = Path(inspect.getfile(findings)).parent
    assert max(len(path.read_text().splitlines()) for path in folder.glob("*.py")) <= 250


@finding("of-a-rank", severity=by_bytes, title=text("A title"), needs=HOOKS)
def of_a_rank(context: RankContext) -> Iterator[Found]:
    yield Found("evidence", WARNING_BYTES)
    yield Found("evidence", WARNING_BYTES - 1, "action", text("Another title"))


@finding_of_run("of-the-run", severity="info", title=text("A title"), needs=NOTHING)
def of_the_run(context: Context) -> Iterator[Found]:
    yield Found("evidence", 1, severity="error")
    yield Found("evidence", 1, about=context.ranks[-1])


def test_rank_label_tokens_and_severity_are_filled_in() -> None:
    run = recorded("graph_tp2")
    ranks = build_report(run).ranks
    first, second, *others = of_a_rank.findings(run, ranks)
    assert (first.rank, first.label, first.severity, first.title) == (
        0,
        "TP0",
        "warning",
        "A title",
    )
    assert first.kv_tokens == worth_in_tokens(ranks[0].kv, WARNING_BYTES)
    assert first.kv_tokens
    assert (second.severity, second.title, second.action) == ("info", "Another title", "action")
    assert [(one.rank, one.label) for one in others] == [(1, "TP1"), (1, "TP1")]
    whole, last = of_the_run.findings(run, ranks)
    assert (whole.rank, whole.label, whole.severity, whole.kv_tokens) == (None, None, "error", None)
    assert (last.rank, last.label, last.severity) == (1, "TP1", "info")


def test_the_gravest_and_the_largest_come_first() -> None:
    figures = {
        "device_total_bytes": gib(64),
        "initial_free_bytes": gib(60),
        "requested_bytes": gib(60),
        "kv_cache_bytes": 0,
        "weights_bytes": gib(50),
    }
    crowded = {**figures, "initial_free_bytes": gib(40)}
    run = run_of(process([], figures), process([], crowded, rank=1, label="TP1", pid=2))
    found = [(one.id, one.label) for one in build_report(run).findings]
    assert found == [
        ("negative-kv", "TP0"),
        ("negative-kv", "TP1"),
        ("co-tenant", "TP1"),
        ("co-tenant", "TP0"),
    ]


def test_what_a_run_lacks_makes_it_blind() -> None:
    report = build_report(recorded("graph_tp2"))
    assert blind_ranks(report, "hook-not-bound") == []
    log = replace(report, run=replace(report.run, source="log"))
    assert blind_ranks(log, "hook-not-bound") == [
        (rank, "a log does not tell") for rank in report.ranks
    ]
