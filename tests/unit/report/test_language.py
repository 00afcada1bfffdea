"""Reports in Chinese: no text of the recorded runs or of the findings is missing, no figure is lost."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import LOGS, RUNS, reports_of
from vllm_memprof.accounting import Report
from vllm_memprof.report import language as language_module
from vllm_memprof.report import render_markdown, render_table
from vllm_memprof.report.language import ENGLISH, KINDS, LANGUAGES, Language, language
from vllm_memprof.report.sections import sections
from vllm_memprof.report.sections.base import Column, Row, Section
from vllm_memprof.report.sections.findings import finding_views
from vllm_memprof.report.sections.head import head

ZH = language("zh")

#: English that stays: quotations of the engine's own lines, and places in its code.
QUOTED = ("Loading model weights took", "NPU out of memory. Tried to allocate", "::")


def texts(report: Report) -> Iterator[tuple[str, str]]:
    """(kind, text) of all that a report says, names of somebody's own left out."""
    for name, value in head(report):
        yield "name", name
        if name not in ("model", "command"):
            yield "head", value
    for section in (*sections(report, 80), *sections(report, 200)):
        yield "title", section.title
        if not section.title.startswith(
            "Growth by owner"
        ):  # its columns are owners, of which the run has the names
            yield from (("column", column.title) for column in section.columns)
        yield from (("cell", cell) for row in section.rows for cell in row.cells)
        yield from (("note", note) for note in section.notes)
    for view in finding_views(report):
        yield "frame", view.severity
        yield from (
            ("finding", text) for text in (view.price, view.title, view.evidence, *view.actions)
        )


def digits(text: str) -> list[str]:
    return sorted(re.findall(r"\d+", text))


@pytest.mark.parametrize("run", [*RUNS, *(f"logs/{log.name}" for log in LOGS)])
def test_every_text_of_the_recorded_runs_is_there_with_its_figures(run: str) -> None:
    missing, other_figures, half_english = set(), set(), set()
    for report in reports_of(run):
        for kind, text in texts(report):
            found = ZH.find(kind, text)
            if found is None:
                missing.add((kind, text))
            elif digits(found) != digits(text):
                other_figures.add((text, found))
            elif re.search(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}", found) and not any(
                quote in found for quote in QUOTED
            ):
                half_english.add(found)
    assert missing == set(), "vllm_memprof/report/lang/zh.toml lacks these"
    assert other_figures == set()
    assert half_english == set()


def variants(node: ast.expr, names: dict[str, ast.expr]) -> list[str]:
    """What an expression of the findings can give; anything that is put in is 7."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.FormattedValue):
        return variants(node.value, names)
    if isinstance(node, ast.JoinedStr):
        parts = [variants(part, names) or ["7"] for part in node.values]
        return ["".join(choice) for choice in itertools.product(*parts)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        pairs = itertools.product(variants(node.left, names), variants(node.right, names))
        return [left + right for left, right in pairs]
    if isinstance(node, ast.IfExp):
        return variants(node.body, names) + variants(node.orelse, names)
    if isinstance(node, ast.Name) and node.id in names:
        return variants(
            names[node.id], {name: value for name, value in names.items() if name != node.id}
        )
    return []


@pytest.mark.parametrize("state", ["missing", "error", "overwritten", "never called"])
def test_states_of_a_required_hook(state: str) -> None:
    assert (
        ZH.find("finding", f"Required hook kv is {state}: kv_cache_alloc is not measured")
        is not None
    )


def test_the_test_of_the_findings_can_fail() -> None:
    tree = ast.parse(
        'def f():\n    return "A sentence that nobody" + (" has" if x else f" ever {y} translated")'
    )
    (node,) = (node for node in ast.walk(tree) if isinstance(node, ast.Return))
    assert node.value is not None
    made = variants(node.value, {})
    assert made == ["A sentence that nobody has", "A sentence that nobody ever 7 translated"]
    assert [ZH.find("finding", text) for text in made] == [None, None]


def frames() -> set[str]:
    """Words that the reporters put around the sections: ``say("frame", ...)`` in the source, 7 for what is put in."""
    found: set[str] = set()
    for path in Path(language_module.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in ("say", "self._say")
                and len(node.args) == 2
            ):
                kind, text = node.args
                if isinstance(kind, ast.Constant) and kind.value == "frame":
                    found.update(variants(text, {}))
    return found


def test_every_word_of_the_reporters_is_there() -> None:
    found = frames()
    assert {"Findings: 7", "No findings.", "Try: "} <= found
    assert {text for text in found if ZH.find("frame", text) is None} == set()


def test_places_of_a_translation_are_those_of_its_text() -> None:
    for kind, entries in ZH.catalogue.items():
        for entry in entries:
            used = re.findall(r"\{(\w+)(?::t)?\}", entry.translated)
            assert sorted(used) == sorted(entry.places), (kind, entry.english)
            assert ":t}" not in entry.translated, (kind, entry.english)


def test_a_catalogue_has_no_table_of_another_name() -> None:
    tables = re.findall(
        r"^\[(\w+)\]",
        (Path(__file__).parents[3] / "vllm_memprof/report/lang/zh.toml").read_text(),
        re.M,
    )
    assert set(tables) == set(KINDS)


def test_a_text_without_a_translation_stays_english() -> None:
    assert ZH("note", "a remark that is new, and long") == "a remark that is new, and long"
    assert ZH("finding", "") == ""
    section = ZH.section(
        Section("New table", [Column("New")], [Row(["a new cell"])], ["a new note"])
    )
    assert (section.title, section.columns[0].title) == ("New table", "New")
    assert section.rows[0].cells == ["a new cell"]
    assert section.notes == ["a new note"]


def test_a_part_that_is_unknown_leaves_the_whole_sentence_english() -> None:
    assert ZH("note", "inferred: captured graphs") == "推算：捕获的图"
    assert ZH("note", "inferred: something else entirely") == "inferred: something else entirely"


def test_words_of_the_user_are_not_translated() -> None:
    assert ZH.head("model", "unknown") == "unknown"
    assert ZH.head("command", "status") == "status"


def test_languages() -> None:
    assert language(ENGLISH)("title", "KV layers by type") == "KV layers by type"
    assert {language(name).name for name in LANGUAGES} == set(LANGUAGES)
    with pytest.raises(ValueError, match="'fr' is not a language"):
        language("fr")


def plain(language_name: str, report: Report) -> str:
    text = render_markdown(report, language_name)
    return text.replace("&#35;", "#").replace("&#64;", "@")


@pytest.mark.parametrize(
    "run", ["graph_tp2", "killed_tp2", "skewed_tp2", "logs/two_methods_910b_tp2.md"]
)
def test_markdown_has_the_same_figures_in_both_languages(run: str) -> None:
    for report in reports_of(run):
        english, chinese = plain("en", report), plain("zh", report)
        assert digits(english) == digits(chinese)
        assert english.count("\n") == chinese.count("\n")


def test_english_is_the_default() -> None:
    (report,) = reports_of("graph_tp2")
    assert render_markdown(report) == render_markdown(report, "en")
    assert isinstance(ZH, Language)
    assert render_table(report) is not None
