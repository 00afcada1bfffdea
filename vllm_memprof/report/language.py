"""Reports in other languages: the same figures, names and flags, with headings, remarks and findings translated.

A report is built in English. A catalogue (``lang/zh.toml``) has the English text as the key and its translation as the
value; ``{name}`` stands for whatever is there and is copied as it is, ``{name:t}`` is translated in its turn. What no
entry fits is printed in English, so that nothing is lost.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from vllm_memprof.report.sections.base import MODELLED_MARK, Section
from vllm_memprof.report.sections.findings import FindingView

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGLISH, CHINESE = "en", "zh"
LANGUAGES = (ENGLISH, CHINESE)

#: Tables of a catalogue. A text is looked up in the table of its kind, then in ``part``.
KINDS = ("frame", "name", "head", "title", "column", "cell", "note", "finding", "part")
#: Kinds in which every entry has to be there, also one that stays as it is: their texts are words of the report's own.
STRICT = ("frame", "name", "title", "column")

_PLACE = re.compile(r"\{(\w+)(:t)?\}")
#: Places that only a figure fits.
_FIGURES = ("size", "count", "tokens", "number", "line")
_FIGURE = r"[-+±]?\d[\d.,]*|-|\?"
#: What stays as it is: figures, labels of ranks, flags, identifiers, places in the code.
_NEUTRAL = re.compile(
    r"[^A-Za-z]*|\S+|(TP|PP|DP|EP|device|rank|pid)\S* ?\S*( -?[\d.,]+ GiB)?|-?[\d.,]+ (GiB|MiB|ms|s)"
    r"|[\w:-]+ (x\d+|[\w-]+:\d+)|\d+ x \d+ MiB"
)
_AFFIXES = re.compile(rf"(\s*(?:[-=×] )?)(.*?)((?: {re.escape(MODELLED_MARK)})?)", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """One text of a catalogue."""

    english: str
    translated: str

    @property
    def places(self) -> list[str]:
        return [name for name, _ in _PLACE.findall(self.english)]


class Language:
    """Translates texts of a report by their kind. English leaves every text as it is."""

    def __init__(self, name: str, catalogue: dict[str, list[Entry]]) -> None:
        self.name = name
        self.catalogue = catalogue
        self._exact = {
            kind: {e.english: e.translated for e in entries} for kind, entries in catalogue.items()
        }
        self._patterns = {kind: _compiled(entries) for kind, entries in catalogue.items()}

    def __call__(self, kind: str, text: str) -> str:
        """The text in this language, or as it is where the catalogue does not have it."""
        found = self.find(kind, text)
        return text if found is None else found

    def find(self, kind: str, text: str) -> str | None:
        """The text in this language; None where the catalogue does not have it."""
        if self.name == ENGLISH or not text.strip():
            return text
        match = _AFFIXES.fullmatch(text)
        assert match is not None
        before, core, after = match.groups()
        found = self._look_up(kind, core)
        return None if found is None else before + found + after

    def head(self, name: str, text: str) -> str:
        """A line at the top of a report: the model and the command are somebody's own words and stay."""
        return text if name in ("model", "command") else self("head", text)

    def section(self, section: Section) -> Section:
        """A table with its words translated; its figures as they are."""
        if self.name == ENGLISH:
            return section
        return Section(
            self("title", section.title),
            [replace(column, title=self("column", column.title)) for column in section.columns],
            [
                replace(row, cells=[self("cell", cell) for cell in row.cells])
                for row in section.rows
            ],
            [self("note", note) for note in section.notes],
        )

    def finding(self, view: FindingView) -> FindingView:
        """A finding with its sentences translated; its id, which other programs know, as it is."""
        if self.name == ENGLISH:
            return view
        return replace(
            view,
            labels=self("part", view.labels),
            price=self("finding", view.price),
            title=self("finding", view.title),
            evidence=self("finding", view.evidence),
            actions=[self("finding", action) for action in view.actions],
        )

    def _look_up(self, kind: str, text: str) -> str | None:
        for table in dict.fromkeys((kind, "part")):
            exact = self._exact.get(table, {}).get(text)
            if exact is not None:
                return exact
        if (
            kind not in STRICT
        ):  # before the patterns: a place must not swallow what could be translated
            for mark in ("; ", ", "):
                if mark in text:
                    pieces = [self.find(kind, piece) for piece in text.split(mark)]
                    if None not in pieces:
                        return self("frame", mark).join(
                            piece for piece in pieces if piece is not None
                        )
        for table in dict.fromkeys((kind, "part")):
            for pattern, entry, nested in self._patterns.get(table, []):
                match = pattern.fullmatch(text)
                if match is not None:
                    filled = self._filled(kind, match, entry, nested)
                    if filled is not None:
                        return filled
        return text if kind not in STRICT and _NEUTRAL.fullmatch(text) else None

    def _filled(
        self, kind: str, match: re.Match[str], entry: Entry, nested: set[str]
    ) -> str | None:
        values = dict(match.groupdict())
        for name in nested:
            within = self.find("part" if kind in STRICT else kind, values[name])
            if within is None:
                return None
            values[name] = within
        return _PLACE.sub(lambda place: values[place.group(1)], entry.translated)


def _compiled(entries: list[Entry]) -> list[tuple[re.Pattern[str], Entry, set[str]]]:
    """Patterns of the entries that have places, those with most text of their own first."""
    found = []
    for entry in entries:
        if entry.places:
            pieces = _PLACE.split(entry.english)  # text, name, ":t" or None, text, ...
            pattern = "".join(
                re.escape(piece)
                if i % 3 == 0
                else f"(?P<{piece}>{_FIGURE if piece in _FIGURES else '.+?'})"
                if i % 3 == 1
                else ""
                for i, piece in enumerate(piece or "" for piece in pieces)
            )
            nested = {name for name, mark in _PLACE.findall(entry.english) if mark}
            found.append((re.compile(pattern, re.DOTALL), entry, nested))
    return sorted(found, key=lambda row: -len(_PLACE.sub("", row[1].english)))


@cache
def language(name: str) -> Language:
    """A language by its name.

    Raises:
        ValueError: not one of ``LANGUAGES``.
    """
    if name not in LANGUAGES:
        raise ValueError(f"{name!r} is not a language of the reports: {', '.join(LANGUAGES)}")
    if name == ENGLISH:
        return Language(name, {})
    text = files("vllm_memprof.report").joinpath(f"lang/{name}.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    catalogue = {kind: [Entry(*pair) for pair in tables.get(kind, {}).items()] for kind in KINDS}
    return Language(name, catalogue)
