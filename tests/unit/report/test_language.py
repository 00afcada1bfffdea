"""Reports in Chinese: every template of the package has its translation, and no figure is lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest

from tests.support.runs import LOGS, RUNS, reports_of
from tests.unit.report.templates import every_template, in_source, parameters
from vllm_memprof.report.documents.report import report_document
from vllm_memprof.report.language import ENGLISH, LANGUAGES, areas, language
from vllm_memprof.report.markdown import render_markdown
from vllm_memprof.report.table import render_table
from vllm_memprof.text import Text, join, text

ZH = language("zh")
#: English that stays: quotations of the engine's own lines, places in its code, flags.
QUOTED = ("Loading model weights took", "NPU out of memory. Tried to allocate", "::")
#: Sentences that are no ``Text``, by where they come from; only ever fewer.
PLAIN = (
    "requested - allocated peak",  # accounting.budget.budgets: formulas
    "growth (at|in|of) |less (all|the|what|torch)|blocks handed to tensors|- all counters"
    "|non-torch at the first|the allocator's list|the driver's list",  # owners: sources
    "memprof plan stops|not reached",  # why a phase was not measured
    "per block|planned bytes",  # accounting.budget.kv: names of checks
    "killed by|exited with|less was free|the KV cache is",  # exit reasons, recorded as English
    "npu-smi|is taken to be|is set",  # notes of logs
    "rror: |out of memory|emory: |memory in use",  # lines of the log, as evidence of a failure
)


@pytest.fixture(scope="module")
def english() -> dict[str, str]:
    """English template -> where it is."""
    return {found.english: found.where for found in every_template()}


def test_every_template_has_a_translation_and_no_translation_is_left_over(
    english: dict[str, str],
) -> None:
    assert len(english) > 400, "the search finds too little to mean anything"
    assert {where: words for words, where in english.items() if words not in ZH.catalogue} == {}
    assert set(ZH.catalogue) - set(english) == set()


def test_a_template_is_given_its_parameters() -> None:
    for found in every_template():
        if found.names is not None:
            wanted = {name.partition(":")[0] for name in parameters(found.english)}
            assert found.names == wanted, found.where


def test_a_translation_has_the_parameters_of_its_template() -> None:
    for template, translated in ZH.catalogue.items():
        assert sorted(set(parameters(translated))) == sorted(set(parameters(template))), template


def test_areas_do_not_contradict_each_other() -> None:
    seen: dict[str, str] = {}
    for area, catalogue in areas("zh").items():
        for template, translated in catalogue.items():
            assert seen.setdefault(template, translated) == translated, (area, template)


def test_a_template_that_is_no_literal_is_refused() -> None:
    (found,) = in_source('text("{n} ranks", n=n)', "a.py")
    assert (found.english, found.names) == ("{n} ranks", {"n"})
    (joined,) = in_source('join(", ", parts)', "a.py")
    assert (joined.english, joined.names) == (", ", None)
    for source in ("text(words)", 'text(f"{n} ranks")', "join(mark, parts)"):
        with pytest.raises(ValueError, match="not a literal"):
            list(in_source(source, "a.py"))


def strings(value: object) -> Iterator[str]:
    """Yield every str of a document, the model and the command left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from strings(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if not (field.name == "value" and getattr(value, "style", "") in ("code", "total")):
                yield from strings(getattr(value, field.name))


@pytest.mark.parametrize("run", [*RUNS, *(f"logs/{log.name}" for log in LOGS)])
def test_no_sentence_of_the_recorded_runs_stays_english(run: str) -> None:
    found = {
        said
        for report in reports_of(run)
        for width in (80, 200)
        for said in strings(ZH(report_document(report, width)))
        if re.search(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}", said)
    }
    found = {said for said in found if not any(quote in said for quote in QUOTED)}
    assert {said for said in found if not re.search("|".join(PLAIN), said)} == set()


def test_texts_are_translated_wherever_they_are() -> None:
    count = text("{count} rows", count=3)
    assert ZH(count) == "3 行"
    assert ZH([join(", ", [count, "rows"])]) == ["3 行，rows"]
    assert ZH(text("{labels}: {note}", labels="rows", note=count)) == "rows：3 行"


def test_what_has_no_translation_stays() -> None:
    assert ZH(text("a sentence that nobody has translated")) == (
        "a sentence that nobody has translated"
    )
    assert ZH("verdict") == "verdict"  # a plain str is somebody's own word
    assert language(ENGLISH)(text("verdict")) == "verdict"


def test_languages() -> None:
    assert {language(name).name for name in LANGUAGES} == set(LANGUAGES)
    with pytest.raises(ValueError, match="'fr' is not a language"):
        language("fr")


def digits(words: str) -> list[str]:
    return sorted(re.findall(r"\d+", words))


def plain(name: str, report: object) -> str:
    return render_markdown(report, name).replace("&#35;", "#").replace("&#64;", "@")


@pytest.mark.parametrize(
    "run", ["graph_tp2", "killed_tp2", "skewed_tp2", "logs/two_methods_910b_tp2.md"]
)
def test_markdown_has_the_same_figures_in_both_languages(run: str) -> None:
    for report in reports_of(run):
        in_english, chinese = plain("en", report), plain("zh", report)
        assert digits(in_english) == digits(chinese)
        assert in_english.count("\n") == chinese.count("\n")


def test_english_is_the_default() -> None:
    (report,) = reports_of("graph_tp2")
    assert render_markdown(report) == render_markdown(report, "en")
    assert render_table(report) is not None
    assert isinstance(report_document(report, 80).verdict, Text)
