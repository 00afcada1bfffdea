"""Rules of findings: all are explained and translated, and filled in alike."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import vllm_memprof
from tests.support.write_findings_docs import SECTIONS
from tests.unit.accounting.builders import gib, process, recorded, run_of
from vllm_memprof.accounting import build_report, findings
from vllm_memprof.accounting.budget.kv import worth_in_tokens
from vllm_memprof.accounting.findings.needs import CONDITIONS, Need
from vllm_memprof.accounting.findings.rules import (
    BY_BYTES,
    WARNING_BYTES,
    Context,
    FindingRule,
    Found,
)
from vllm_memprof.accounting.findings.table import FINDINGS, blind_ranks
from vllm_memprof.accounting.model import RankReport

ROOT = Path(vllm_memprof.__file__).parents[1]


@pytest.mark.parametrize("rule", FINDINGS.values(), ids=list(FINDINGS))
def test_a_rule_has_a_page_needs_and_a_function(rule: FindingRule) -> None:
    assert (ROOT / "docs" / "findings" / f"{rule.id}.md").exists()
    assert rule.needs.said
    for conditions in rule.needs.conditions:
        assert set(conditions.split(" or ")) <= set(CONDITIONS)
    assert rule.severity in ("error", "warning", "info", BY_BYTES)
    path, _, symbol = rule.source.partition("::")
    assert f"def {symbol}(" in (ROOT / path).read_text()


@pytest.mark.parametrize("rule", FINDINGS.values(), ids=list(FINDINGS))
def test_sentences_name_figures_that_modules_give(rule: FindingRule) -> None:
    """A misspelt name would leave its sentence unsaid for ever."""
    folder = ROOT / "vllm_memprof" / "accounting"
    own = [ROOT / rule.source.partition("::")[0], folder / "model.py"]
    paths = [
        *own,
        *own[0].parent.glob("log_lines.*"),
        *folder.glob("findings/*.py"),
        *folder.glob("oom/*.py"),
        *folder.glob("serving/*.py"),
        ROOT / "vllm_memprof" / "record" / "host.py",
    ]
    given = "".join(path.read_text() for path in paths) + repr(rule.argument)
    for part in [rule.title, *rule.evidence, *rule.action]:
        for one in part:
            template, when = (one, []) if isinstance(one, str) else (one["say"], [one["when"]])
            for name in [*re.findall(r"(?<!{){(\w+)", template), *when]:
                assert re.search(rf"\b{name}\b", given), (rule.id, name)


def test_places_that_explanations_name_are_there() -> None:
    named = {
        place
        for rule in FINDINGS.values()
        for name in SECTIONS
        for place in re.findall(r"`(vllm_memprof/[\w/]+\.py)::(\w+)`", getattr(rule, name))
    }
    assert len(named) > 10
    for path, symbol in named:
        lines = (ROOT / path).read_text()
        assert re.search(rf"^\s*(def |class )?{symbol}\b", lines, re.MULTILINE), (path, symbol)


def test_no_module_is_long() -> None:
    folder = Path(inspect.getfile(findings)).parent
    assert max(len(path.read_text().splitlines()) for path in folder.glob("*.py")) <= 250


def of_a_rank(rank: RankReport, run: Context) -> Iterator[Found]:
    yield Found(WARNING_BYTES, {})
    yield Found(WARNING_BYTES - 1, {"other": "Another title"})


def of_the_run(run: Context) -> Iterator[Found]:
    yield Found(1, {}, severity="error")
    yield Found(1, {}, about=run.ranks[-1])


RULE = FindingRule(
    id="a-rule",
    title=("{other}", "A title"),
    severity=BY_BYTES,
    evidence=(),
    action=[({"when": "other", "say": "action"},)],
    mark="; ",
    needs=Need("nothing"),
    priced=True,
    of_run=False,
    find=of_a_rank,
    meaning="",
    computed="",
    to_do="",
    source="",
)


def test_rank_label_tokens_and_severity_are_filled_in() -> None:
    run = recorded("graph_tp2")
    ranks = build_report(run).ranks
    first, second, *others = RULE.findings(run, ranks)
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
    rule = replace(RULE, severity="info", of_run=True, find=of_the_run)
    whole, last = rule.findings(run, ranks)
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
