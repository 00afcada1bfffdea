"""The one form that every report has before a renderer draws it: head, findings, tables, verdict.

Whoever has a result makes a ``Document`` of it; ``table``, ``markdown`` and ``html`` draw any of
them. Words are ``Text``, names and figures plain str, so that ``language`` can put the whole
document into another language.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm_memprof.text import text

#: Styles of rows and lines: a renderer maps them to its own means.
PLAIN, TOTAL, MUTED, BAD, GOOD = "plain", "total", "muted", "bad", "good"
#: Style of a line that a shell takes.
CODE = "code"

NOT_MEASURED = text("NOT MEASURED")


@dataclass(frozen=True)
class Head:
    """The head of a column as a renderer draws it."""

    title: str
    right: bool = True  # aligned to the right
    compared: bool = True  # ranks are alike only if they have its cells in common


@dataclass(frozen=True)
class Row:
    cells: list[str]
    indent: int = 0  # of the first cell
    style: str = PLAIN
    mark: str = ""  # before the first cell: = - × ✓ ✗

    @property
    def first(self) -> str:
        """The first cell behind its mark."""
        return f"{self.mark} {self.cells[0]}" if self.mark else self.cells[0]


@dataclass(frozen=True)
class Section:
    """A table with its title and the notes below it."""

    title: str
    columns: list[Head]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)

    @property
    def compared(self) -> object:
        """What ranks have in common that share the table; each has notes of its own."""
        kept = [place for place, head in enumerate(self.columns) if head.compared]
        return self.title, [[row.cells[at] for at in kept] for row in self.rows]


@dataclass(frozen=True)
class Line:
    """A named line above or below the tables."""

    name: str
    value: str
    style: str = PLAIN
    summary: bool = False  # belongs to the first sentence, where a format has one


def note_lines(notes: Iterable[str]) -> list[Line]:
    """Return a line per note."""
    return [Line(text("note"), note) for note in notes]


@dataclass(frozen=True)
class FindingView:
    """A finding, the ranks it concerns folded."""

    severity: str  # error | warning | info
    severity_word: str
    id: str
    labels: str  # "" where it concerns the run
    price: str  # "0.30 GiB, 4,352 tokens of KV cache", "" where it has none
    title: str
    evidence: str
    action: str  # "" where there is none


@dataclass(frozen=True)
class CurveFigure:
    """A quantity that curves can show."""

    name: str  # key of the figures of a line
    title: str
    unit: str  # tokens | GiB | requests


@dataclass(frozen=True)
class CurveLine:
    """Plans that differ in one option alone, in the order of its values."""

    name: str  # the values of the other options
    places: list[float]  # on the axis
    values: list[str]
    #: By name; None: not known, or the plan did not come up.
    figures: dict[str, list[int | float | None]]


@dataclass(frozen=True)
class Marks:
    """Plans that did not come up: they have no figure to be drawn at."""

    places: list[float]
    texts: list[str]


@dataclass(frozen=True)
class Curve:
    """Everything against one option."""

    knob: str
    ticks: list[tuple[float, str]]
    others: int  # options that the lines differ in
    lines: list[CurveLine]
    failed: Marks
    text: str
    named: bool  # the lines are in a legend


@dataclass(frozen=True)
class Curves:
    """Curves that a page draws above the tables; each shows the figure that a reader chooses."""

    figures: list[CurveFigure]
    curves: list[Curve]


@dataclass(frozen=True)
class Document:
    """A report of any kind, in the order in which it is read."""

    kind: str  # report | diff | check | sweep | fit | who | calibrated
    title: str
    head: list[Line]
    sections: list[Section]
    verdict: str = ""  # "" where there is none
    verdict_style: str = TOTAL
    findings: list[FindingView] | None = None  # None: this kind has none
    tail: list[Line] = field(default_factory=list)
    badge: Line | None = None  # the outcome in a word or two, good or bad
    whole: str = "report.json"  # what holds what a short format leaves out
    compact: bool = False  # tables without rules, the first column's head as their title
    simulated: bool = False  # the profile of a simulated device sets figures of it
    curves: Curves | None = None


#: What lays a document out for lines of so many characters.
Layout = Callable[[int], Document]
