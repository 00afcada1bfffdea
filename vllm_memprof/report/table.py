"""Draws a document for a terminal with rich, at any width, with or without colour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table

from vllm_memprof.document import (
    BAD,
    CODE,
    GOOD,
    MUTED,
    PLAIN,
    TOTAL,
    Document,
    FindingView,
    Line,
    Section,
)
from vllm_memprof.files import read_own
from vllm_memprof.report.documents import Found, document
from vllm_memprof.report.documents.first_screen import FirstScreen, most_lines
from vllm_memprof.report.grid import Grid, Prose
from vllm_memprof.report.language import ENGLISH, Language, language
from vllm_memprof.text import text

_STYLES = {PLAIN: "", CODE: "", TOTAL: "bold", MUTED: "dim", BAD: "bold red", GOOD: "green"}
_DRAWN = read_own(__file__, "drawn.toml")
_SEVERITIES, _ASCII = _DRAWN["severities"], str.maketrans(_DRAWN["ascii"])
#: Rows that a first screen goes without, at most.
_MOST_LESS = 40


def render_table(found: Found, lang: str = ENGLISH) -> RenderableType:
    """Return the whole document as one rich renderable.

    Args:
        found: what there is a document of.
        lang: one of ``language.LANGUAGES``.
    """
    return _Tables(found, language(lang))


@dataclass(frozen=True)
class _Tables:
    """Lays the document out once the console's width and encoding are known."""

    found: Found
    say: Language

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        width, found, over = options.max_width, self.found, 1
        while over > 0:
            page = self.say(document(found, width))
            parts = [*_Painter(options.ascii_only, self.say, page.compact).parts(page)]
            if not isinstance(found, FirstScreen) or found.less >= _MOST_LESS:
                break
            over = sum(len(console.render_lines(part, options)) + 1 for part in parts)
            over -= 1 + most_lines(width)  # a blank line between two parts
            found = replace(found, less=found.less + over)
        for i, part in enumerate(parts):
            yield from (Prose(), part) if i else (part,)


@dataclass(frozen=True)
class _Painter:
    """Lines, sections and findings as rich draws them."""

    ascii_only: bool
    say: Language
    compact: bool

    def parts(self, page: Document) -> Iterator[RenderableType]:
        """Yield the parts of a document, between which a line is blank."""
        if page.head:
            yield self.lines(page.head)
        yield from map(self.section, page.sections)
        if page.findings is not None:
            yield self.findings(page.findings)
        if page.tail:
            yield self.lines(page.tail)
        if page.verdict:
            style = "bold green" if page.verdict_style == GOOD else _STYLES[page.verdict_style]
            yield self.text(page.verdict, style)

    def text(self, words: str, style: str = "") -> Prose:
        shown = words.translate(_ASCII) if self.ascii_only else words
        return Prose(shown, style=style, overflow="fold")

    def indented(self, words: str, style: str = "") -> RenderableType:
        return Padding(self.text(words, style), (0, 0, 0, 2), expand=False)

    def lines(self, lines: list[Line]) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for line in lines:
            style = _STYLES[line.style]
            name = self.text(line.name, style if self.compact else "")
            table.add_row(name, self.text(line.value, "" if line.style == GOOD else style))
        return table

    def section(self, section: Section) -> RenderableType:
        table = Grid(
            box=None if self.compact else box.SIMPLE_HEAD,
            show_header=any(column.title for column in section.columns),
            padding=(0, 2 if self.compact else 1, 0, 0),
            pad_edge=False,
        )
        for column in section.columns:
            justify: JustifyMethod = "right" if column.right else "left"
            table.add_column(self.text(column.title), justify=justify)
        marked = any(row.mark for row in section.rows)
        for row in section.rows:
            left = 2 * row.indent + (2 if marked and not row.mark else 0)
            first, *cells = row.first, *row.cells[1:]
            style = _STYLES[row.style]
            padded = Padding(self.text(first), (0, 0, 0, left))
            table.add_row(padded, *map(self.text, cells), style=style)
        title = self.text(section.title, "bold" if self.compact else "bold underline")
        return Group(
            *([title] if section.title else []),
            *([table] if section.columns else []),
            *(self.indented(note, "dim") for note in section.notes),
        )

    def findings(self, views: list[FindingView]) -> RenderableType:
        if not views:
            return self.text(self.say(text("No findings")), "bold underline")
        title = self.say(text("Findings: {count}", count=len(views)))
        parts: list[RenderableType] = [self.text(title, "bold underline")]
        for view in views:
            line = self.text("")
            line.append(view.severity_word, _SEVERITIES.get(view.severity, ""))
            line.append(f" {view.id}", "bold")
            line.append(self.say(text(", {labels}", view)) if view.labels else "")
            line.append(self.say(text(": {price}", view)) if view.price else "")
            tried = self.say(text("try: {action}", view)) if view.action else ""
            details = filter(None, (view.title, view.evidence, tried))
            parts += [line, *map(self.indented, details)]
        return Group(*parts)
