"""Draws a report for a terminal with rich. Works at any width, without colour, without a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vllm_memprof.accounting.model import Report
from vllm_memprof.report.language import ENGLISH, Language, language
from vllm_memprof.report.sections import sections
from vllm_memprof.report.sections.base import BAD, GOOD, MUTED, TOTAL, Section
from vllm_memprof.report.sections.findings import FindingView, finding_views
from vllm_memprof.report.sections.head import head, verdict

_STYLES = {TOTAL: "bold", MUTED: "dim", BAD: "bold red", GOOD: "green"}
_SEVERITIES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
#: For terminals whose encoding lacks them.
_ASCII = str.maketrans({"→": ">", "×": "x", "✓": "ok", "✗": "FAILED", "…": "...", "±": "+-"})


def render_table(
    report: Report, console_width: int | None = None, lang: str = ENGLISH
) -> RenderableType:
    """The whole report as one rich renderable.

    Args:
        report: the closed books.
        console_width: characters per line; None takes the console's at the time of printing.
        lang: one of ``language.LANGUAGES``.
    """
    return _Tables(report, console_width, language(lang))


class _Tables:
    """Lays the sections out once the console's width and encoding are known."""

    def __init__(self, report: Report, width: int | None, say: Language) -> None:
        self._report = report
        self._width = width
        self._say = say

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        width = self._width or options.max_width
        say = self._say
        draw = Painter(ascii_only=options.ascii_only, say=say)
        yield draw.head(head(self._report))
        for section in sections(self._report, width):
            yield Text()
            yield draw.section(say.section(section))
        yield Text()
        yield draw.findings([say.finding(view) for view in finding_views(self._report)])
        yield Text()
        yield draw.text(say("head", verdict(self._report)), "bold")


class Painter:
    """Texts, sections and findings as rich draws them."""

    def __init__(self, ascii_only: bool, say: Language | None = None) -> None:
        self._ascii_only = ascii_only
        self._say = say or language(ENGLISH)

    def text(self, text: str, style: str = "") -> Text:
        return Text(
            text.translate(_ASCII) if self._ascii_only else text, style=style, overflow="fold"
        )

    def indented(self, text: str, style: str = "") -> RenderableType:
        return Padding(self.text(text, style), (0, 0, 0, 2), expand=False)

    def head(self, lines: list[tuple[str, str]]) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in lines:
            bad = name == "status" and not value.startswith(("ok", "running"))
            style = "bold red" if bad else "bold" if name == "model" else ""
            table.add_row(
                self.text(self._say("name", name)), self.text(self._say.head(name, value), style)
            )
        return table

    def section(self, section: Section) -> RenderableType:
        headless = all(not column.title for column in section.columns)
        table = Table(
            box=box.SIMPLE_HEAD, show_header=not headless, padding=(0, 1, 0, 0), pad_edge=False
        )
        for column in section.columns:
            table.add_column(
                self.text(column.title),
                justify="right" if column.right else "left",
                overflow="fold",
            )
        for row in section.rows:
            first = Padding(
                self.text(row.cells[0]), (0, 0, 0, 2 * row.indent)
            )  # a name in two lines keeps its place
            table.add_row(
                first,
                *(self.text(cell) for cell in row.cells[1:]),
                style=_STYLES.get(row.style, ""),
            )
        notes = [self.indented(note, "dim") for note in section.notes]
        return Group(self.text(section.title, "bold underline"), table, *notes)

    def findings(self, views: list[FindingView]) -> RenderableType:
        if not views:
            return self.text(self._say("frame", "No findings"), "bold underline")
        comma, colon, attempt = (self._say("frame", mark) for mark in (", ", ": ", "try: "))
        parts: list[RenderableType] = [
            self.text(self._say("frame", f"Findings: {len(views)}"), "bold underline")
        ]
        for view in views:
            line = self.text("")
            line.append(self._say("frame", view.severity), _SEVERITIES.get(view.severity, ""))
            line.append(f" {view.id}", "bold")
            line.append(f"{comma}{view.labels}" if view.labels else "")
            line.append(f"{colon}{view.price}" if view.price else "")
            parts.append(line)
            details = [
                view.title,
                view.evidence,
                *(f"{attempt}{action}" for action in view.actions),
            ]
            parts += [self.indented(detail) for detail in details if detail]
        return Group(*parts)
