"""``memprof glossary``: what a word of a report means, from docs/glossary.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import typer

from vllm_memprof.accounting.budget.equations import EQUATIONS, named_equation
from vllm_memprof.accounting.findings.table import FINDINGS
from vllm_memprof.causes.book import read_book
from vllm_memprof.cli.options import command_app
from vllm_memprof.errors import UsageError, did_you_mean

PACKAGE = Path(__file__).parents[2]
#: A wheel has the page in the package, a clone in docs/.
PLACES = (PACKAGE / "report/glossary.md", PACKAGE.parent / "docs/glossary.md")
#: Entries that are printed at most.
_MOST = 12
_TERMS = r"\*\*[^*]+\*\*(?:(?:, | or )\*\*[^*]+\*\*)*"


class Entry(NamedTuple):
    """Words that have one meaning, and the table that they stand in."""

    words: list[str]
    meaning: str
    table: str


def entries() -> list[Entry]:
    """Return all entries of the glossary, in its order."""
    text = next(place.read_text("utf-8") for place in PLACES if place.is_file())
    found = []
    for part in re.split(r"^#{2,3} ", text, flags=re.M)[1:]:
        table, _, body = part.partition("\n")
        for item in re.findall(r"^- (.*(?:\n  .*)*)", body, re.M):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(item.split()))
            pieces = re.split(rf"(?:^|(?<=\. ))({_TERMS}) ?(\([^)]*\))?[:.] ?", plain)[1:]
            for terms, aside, meaning in zip(*[iter(pieces)] * 3, strict=True):
                words = re.findall(r"\*\*([^*]+)\*\*", terms)
                said = f"{aside or ''} {meaning}".replace("**", "").strip()
                found += [Entry(words, said, table)] if said else []
    rows = {
        "Findings": {row.id: row.meaning for row in FINDINGS.values()},
        "Causes": {row.kind: row.title for each in read_book().origins.values() for row in each},
        "Equations": {row.id: f"{named_equation(row.id)}, {row.cite}" for row in EQUATIONS},
    }
    del rows["Causes"]["other"]  # of all kinds
    return found + [Entry([word], said, kind) for kind in rows for word, said in rows[kind].items()]


def _plain(word: str) -> str:
    return " ".join(re.findall(r"\w+", word.lower())) or word


def glossary(word: str | None = None) -> None:
    """Say in a sentence what a word of a report means; without WORD list the words."""
    known = entries()
    if word is None:
        typer.echo(", ".join(dict.fromkeys(each for entry in known for each in entry.words)))
        return
    asked = _plain(word)
    same = [entry for entry in known if asked in map(_plain, entry.words)]
    near = same or [entry for entry in known if any(asked in _plain(w) for w in entry.words)]
    if not near:
        words = [each for entry in known for each in entry.words]
        raise UsageError(
            f"the glossary has no {word!r}", hint=did_you_mean(word, words, "memprof glossary")
        )
    for entry in near[:_MOST]:
        said = f"{', '.join(entry.words)}: {entry.meaning}  [{entry.table}]"
        typer.echo(said.replace("\n", " "))


app = command_app(glossary)
