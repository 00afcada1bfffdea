"""A page as a parser sees it: elements, texts, tables. For the tests of the page."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = ("meta", "input", "br", "img", "link", "hr")


@dataclass
class Table:
    caption: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    orders: list[list[str | None]] = field(default_factory=list)  # data-v of each cell


class Page(HTMLParser):
    """Reads a page; ``text`` is what a reader sees, without scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.count: Counter[str] = Counter()
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.data: list[Any] = []
        self.tables: list[Table] = []
        self.headings: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self._texts: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] += 1
        found = dict(attrs)
        self.attributes.append((tag, found))
        if tag in VOID:
            return
        self._open.append(tag)
        self._texts.append("")
        if tag == "table":
            self.tables.append(Table())
        elif tag == "tr" and self.tables and "tbody" in self._open:
            self.tables[-1].rows.append([])
            self.tables[-1].orders.append([])
        elif tag in ("td", "th") and "tbody" in self._open:
            self.tables[-1].orders[-1].append(found.get("data-v"))

    def handle_data(self, data: str) -> None:
        self._texts = [text + data for text in self._texts]
        if not {"script", "style"} & set(self._open):
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1:] == [tag], f"</{tag}> within {self._open}"
        text = self._texts.pop()
        if tag == "script":
            self.scripts.append(text)
            if text.lstrip().startswith("{"):
                self.data.append(json.loads(text))
        elif tag in ("h1", "h2", "h3"):
            self.headings.append((tag, " ".join(text.split())))
        elif tag == "caption":
            self.tables[-1].caption = text
        elif tag in ("td", "th") and "tbody" in self._open:
            self.tables[-1].rows[-1].append(text)
        elif tag == "th":
            self.tables[-1].columns.append(text)
        self._open.pop()

    def outline(self) -> str:
        """Headings in their order, then each table with its columns and rows counted."""
        lines = [f"{'#' * int(tag[1])} {text}" for tag, text in self.headings]
        for table in self.tables:
            lines.append(
                f"table {table.caption} [{' | '.join(table.columns)}] {len(table.rows)} rows"
            )
        return "\n".join(lines) + "\n"
