"""``memprof glossary``: words of reports, from the one page that explains them."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from vllm_memprof.cli import app, main
from vllm_memprof.cli.commands.glossary import entries
from vllm_memprof.errors import UsageError


def said(*args: str) -> str:
    done = CliRunner().invoke(app, ["glossary", *args], prog_name="memprof")
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    "word", ["requested memory", "serving peak", "headroom", "Headroom", "non-torch increase"]
)
def test_a_word_is_said_in_a_sentence(word: str) -> None:
    first = said(word).splitlines()[0]
    assert first.lower().startswith(word.lower())
    assert ": " in first
    assert "**" not in first
    assert "](" not in first


def test_a_part_of_a_word_finds_all_that_have_it() -> None:
    assert len(said("peak act").splitlines()) > 1


def test_a_misspelt_word_has_the_nearest() -> None:
    with pytest.raises(UsageError) as raised:
        CliRunner().invoke(app, ["glossary", "hedroom"], catch_exceptions=False)
    assert raised.value.hint is not None
    assert "headroom" in raised.value.hint.lower()
    assert main(["glossary", "hedroom"]) == 2


def test_every_entry_has_words_and_a_meaning() -> None:
    known = entries()
    assert len(known) > 200
    assert all(entry.words and len(entry.meaning) > 3 and entry.table for entry in known)
    words = said()
    assert "headroom at the serving peak" in words


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("FITS", "the KV cache fits the device"),
        ("CUT OFF", "ends early"),
        ("likely", "not certain"),
        ("more at a later moment", "a later reading"),
        ("neighbour", "another process uses"),
        ("co-tenant", "Requested memory is a share"),
        ("E4p", "vllm-ascend"),
        ("tables and buffers", "beside the checkpoint"),
    ],
)
def test_words_of_the_first_screen_findings_causes_and_equations_are_found(
    word: str, meaning: str
) -> None:
    assert meaning in said(word).splitlines()[0]
