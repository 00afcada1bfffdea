"""Tables as data: columns over rows, and what draws them. Open to every layer.

A ``Column`` says what a cell shows of a row, in which unit, and when the column is there. ``table``
makes a ``Section`` of columns and rows for every renderer and language; a ``TableFile`` has tables
and sentences of a file; ``fold_rows`` puts rows of several ranks together whose cells are
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from vllm_memprof.document import PLAIN, Head, Row, Section
from vllm_memprof.files import read_own
from vllm_memprof.text import QUANTITIES, Text, fold, said, sentences, text, titled
from vllm_memprof.units import (
    format_bytes,
    format_gib,
    format_rate,
    format_signed_gib,
    largest,
)

#: Groups of ranks that get a table of their own; the rest is in report.json.
SHOWN_GROUPS = 4
#: Width of a line from which on tables gain columns.
WIDE = 110
UNKNOWN = text("unknown")

_EIGHTHS = " ▏▎▍▌▋▊▉"

S = TypeVar("S", bound=str)
K = TypeVar("K", bound=Hashable)
#: How a value becomes a cell; ``-`` where it is unknown. Words stand on the left.
Unit = Callable[[Any], str]


def number(value: float | int | None, spec: str = "", suffix: str = "") -> str:
    """Return a figure, formatted by ``spec``, with what follows it."""
    return "-" if value is None else format(value, spec) + suffix


def word(value: Any) -> str:
    """Return a name or a text as it is."""
    return value if isinstance(value, str) else number(value)


def signed(value: int | float | None) -> str:
    """Return a difference with its sign, ``0`` where there is none."""
    return number(value, "+,") if value != 0 else "0"


def bar_of(share: float, cells: int) -> str:
    """Return a bar of characters, ``cells`` long for a share of 1."""
    eighths = round(share * cells * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


GIB, GIB4, MIB, COUNT = format_gib, QUANTITIES["gib4"], QUANTITIES["mib"], format_bytes
SECONDS = partial(number, spec=".2f")

#: When a column is there: of its values, and whether the line has room for those of a wide table.
When = Callable[[list[Any], bool], bool]


def wide_only(values: list[Any], wide: bool) -> bool:
    return wide


def where_known(values: list[Any], wide: bool) -> bool:
    return any(value is not None for value in values)


#: Names of units and of conditions -> what they are, for tables that stand in a file.
UNITS: Mapping[str, Unit] = {
    **QUANTITIES,
    "word": word,
    "number": number,
    "signed": signed,
    "bytes": COUNT,
    "signed gib4": format_signed_gib,
    "rate": format_rate,
    "seconds": SECONDS,
    "decimals": partial(number, spec=",.2f"),
}
WHENS: Mapping[str, When] = {
    "wide": wide_only,
    "narrow": lambda values, wide: not wide,
    "known": where_known,
    "wide and known": lambda values, wide: wide and where_known(values, wide),
}


class Folded(NamedTuple):
    """A row of several ranks, whose cells are alike."""

    labels: list[str]
    rows: list[Any]


#: The value of a column: the ranks of a folded row.
LABELS = "labels"


@dataclass(frozen=True)
class Column:
    """A column: its title, what it shows of a row, the unit, and when it is there."""

    title: str  # a template; a ``Text`` as it is
    value: str | Callable[[Any], Any]  # an attribute of a row, or a function of it
    unit: Unit = word
    when: bool | When = True
    marked: bool = False  # (m) of a simulated device, whose profile has a part in it
    narrow: str = ""  # the title in a narrow table
    right: bool | None = None  # None: all but words stand on the right
    compared: bool = True  # False: of ranks that share a row, the largest value

    def of(self, row: Any) -> Any:
        """Return the value of a row; of rows that ranks share, the first or the largest."""
        if not isinstance(row, Folded):
            return _held(row, self.value) if isinstance(self.value, str) else self.value(row)
        if self.value == LABELS:
            return fold(row.labels)
        values = [self.of(each) for each in row.rows]
        return values[0] if self.compared else largest(values)

    def shown(self, rows: Iterable[Any], wide: bool) -> bool:
        """Return whether the column is there."""
        if isinstance(self.when, bool):
            return self.when
        return self.when([self.of(row) for row in rows], wide)

    def cell(self, row: Any) -> str:
        """Return the cell of a row."""
        return self.unit(self.of(row))

    def head(self, wide: bool, simulated: bool) -> Head:
        """Return the title and the side of the cells."""
        title = titled(self.title if wide else self.narrow or self.title)
        right = self.unit is not word if self.right is None else self.right
        return Head(modelled(title, self.marked and simulated), right, self.compared)


def _held(row: Any, path: str) -> Any:
    """Return what ``a.b`` leads to from a row; None where it ends before."""
    for name in path.split("."):
        if row is not None:
            row = row.get(name) if isinstance(row, Mapping) else getattr(row, name)
    return row


class Look(NamedTuple):
    """How a row looks beside its cells."""

    style: str = PLAIN
    mark: str = ""
    indent: int = 0


@dataclass(frozen=True)
class Size:
    """A row of a table of sizes."""

    title: str
    bytes: int | None
    style: str = PLAIN
    mark: str = ""
    tokens: int | None = None  # of KV cache
    indent: int = 0


#: The notes below a table: ``condition and text(...)``.
Notes = Iterable[str | bool | None]

#: The columns of a table of sizes.
SIZES = (Column("", "title"), Column("GiB", "bytes", GIB4), Column("bytes", "bytes", COUNT))
#: The columns of a table of pairs: a name and what it has.
PAIRS = (Column("", itemgetter(0)), Column("", itemgetter(1)))


def table(
    title: str,
    columns: Iterable[Column],
    rows: Iterable[Any],
    notes: Notes = (),
    wide: bool = True,
    simulated: bool = False,
    look: Callable[[Any], str | Look] | None = None,
    most: int | None = None,
) -> Section:
    """Return a table.

    Args:
        title: above it.
        columns: those whose ``when`` holds are drawn.
        rows: what the columns read; a ``Row`` stands as it is. Of any other, ``style``, ``mark``
            and ``indent`` hold where it has them.
        notes: below it; what is no text is not there.
        wide: the line has room for the columns of a wide table.
        simulated: the device is, so that columns are marked.
        look: the style of a row or more of it, instead of its own.
        most: rows that are drawn; None: all. A note counts the others.
    """
    listed = list(rows)
    drawn, more = listed[:most], len(listed[most:]) if most else 0
    seen = [row for row in drawn if not isinstance(row, Row)]
    shown = [column for column in columns if listed and column.shown(seen, wide)]

    def draw(row: Any) -> Row:
        if isinstance(row, Row):
            return row
        own = row.rows[0] if isinstance(row, Folded) else row
        known = {name: getattr(own, name) for name in Look._fields if hasattr(own, name)}
        if look is not None:
            found = look(own)
            known |= {"style": found} if isinstance(found, str) else found._asdict()
        return Row([column.cell(row) for column in shown], **known)

    heads = [column.head(wide, simulated) for column in shown]
    left_out = [more > 0 and text("{count} more in report.json", count=more)]
    said = [note for note in (*notes, *left_out) if isinstance(note, str)]
    return Section(title, heads, [*map(draw, drawn)], said)


@dataclass(frozen=True)
class Paper:
    """What a table is laid out for."""

    wide: bool = True
    simulated: bool = False


#: Figures by name, and what columns show that is no attribute of a row.
Figures = Mapping[str, object]
Values = Callable[[Any], Any]
NO_FIGURES: Figures = {}


class TableFile:
    """Tables and sentences of a file; ``report/tables.toml`` says what it holds.

    Args:
        module: beside which it stands, its ``__file__``.
        name: of the file.
    """

    def __init__(self, module: str, name: str = "tables.toml") -> None:
        self.content = read_own(module, name)

    def say(self, name: str, figures: Figures, mark: str = "; ") -> Text:
        """Return sentences that can be said of some figures, a mark between them."""
        parts = self.content["sentences"][name]
        return sentences(parts, figures, mark)

    def said(self, name: str, figures: Figures) -> list[Text]:
        """Return sentences that can be said of some figures, one by one."""
        return said(self.content["sentences"][name], figures)

    def columns(
        self, name: str, figures: Figures = NO_FIGURES, /, **values: Values
    ) -> list[Column]:
        """Return the columns of a table.

        Args:
            name: of the table.
            figures: those that a column is there for.
            values: what columns show that is no attribute of a row.
        """

        def column(value: str, unit: str = "word", when: str = "", **more: Any) -> Column:
            shown = WHENS.get(when) or (not when or bool(figures.get(when)))
            return Column(value=values.get(value, value), unit=UNITS[unit], when=shown, **more)

        rows = self.content["tables"][name].get("columns")
        return list(SIZES) if rows is None else [column(**row) for row in rows]

    def draw(
        self,
        on: Paper,
        name: str,
        rows: Iterable[Any],
        /,
        figures: Figures = NO_FIGURES,
        notes: Notes = (),
        look: Callable[[Any], str | Look] | None = None,
        most: int | None = None,
        columns: Iterable[Column] = (),
        before: Iterable[Column] = (),
        **values: Values,
    ) -> Section:
        """Return a table.

        Args:
            on: what it is laid out and marked for.
            name: of the table.
            rows, look, most: as of ``table``.
            figures: that title, columns and notes name.
            notes: further ones.
            columns, before: further ones, behind and before its own.
            values: as of ``columns``.
        """
        words, known = self.content["tables"][name], {"simulated": on.simulated, **figures}
        shown = [*before, *self.columns(name, known, **values), *columns]
        told = [*said(words.get("notes", ()), known), *notes]
        title = words["title"]
        return table(
            sentences([title], known), shown, rows, told, on.wide, on.simulated, look, most
        )


#: What tables of phases show of the device at an edge, in a report and in a comparison; those that
#: neither shows are in the DataFrame.
PHASE_COLUMNS = TableFile(__file__, "phases.toml").columns("phases")


R = TypeVar("R")


def group_ranks(ranks: Iterable[R], key: Callable[[R], Hashable]) -> list[list[R]]:
    """Return ranks with equal keys together, in the order of the first of each."""
    groups: dict[Hashable, list[R]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())


def foremost(rows: Iterable[R], count: int, weight: Callable[[R], Any]) -> list[R]:
    """Return the rows that weigh most, in their order."""
    listed = list(rows)
    kept = {id(row) for row in nlargest(count, listed, key=weight)}
    return [row for row in listed if id(row) in kept]


def merged_order(*orders: Iterable[K]) -> list[K]:
    """Return one order of all keys: one that earlier orders lack comes after its previous one."""
    merged: list[K] = []
    for order in orders:
        place = 0
        for key in order:
            if key in merged:
                place = merged.index(key)
            else:
                merged.insert(place, key)
            place += 1
    return merged


def fold_rows(columns: Sequence[Column], per_rank: Mapping[str, Iterable[Any]]) -> list[Folded]:
    """Return the rows of all ranks, label -> rows; those whose compared cells are alike as one."""
    read = [column for column in columns if column.compared and column.value != LABELS]
    rows = [(label, row) for label, rows in per_rank.items() for row in rows]
    groups = group_ranks(rows, lambda entry: tuple(column.cell(entry[1]) for column in read))
    return [Folded(*map(list, zip(*members, strict=True))) for members in groups]


def modelled(title: S, mark: bool) -> S | Text:
    """Return a title, marked where a simulated device's profile sets its figure."""
    return text("{title} (m)", title=title) if mark else title


def more_groups(groups: Sequence[object], where: str) -> list[str]:
    """Return the note on groups of ranks that are not shown."""
    count = len(groups) - SHOWN_GROUPS
    if count <= 0:
        return []
    return [text("{count} more groups of ranks are in {where}", count=count, where=where)]
