"""Tables as data: columns over rows, and what draws them. Open to every layer.

A ``Column`` says what a cell shows of a row, in which unit, and when the column is there. ``table``
makes a ``Section`` of columns and rows for every renderer and language; ``alike`` and ``fold_rows``
put ranks together whose cells are alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Protocol, TypeVar

from vllm_memprof.document import PLAIN, Head, Row, Section
from vllm_memprof.text import Text, text, titled
from vllm_memprof.units import MIB as MIB_BYTES
from vllm_memprof.units import format_bytes, format_gib, format_mib, format_rate

#: Groups of ranks that get a table of their own; the rest is in report.json.
SHOWN_GROUPS = 4
#: Width of a line from which on tables gain columns.
WIDE = 110
UNKNOWN = text("unknown")
STATUS_WORDS = {
    "ok": text("ok"),
    "running": text("running"),
    "failed": text("failed"),
    "oom": text("oom"),
    "truncated": text("truncated"),
}

#: How a value becomes a cell; ``-`` where it is unknown. Words stand on the left.
Unit = Callable[[Any], str]


def word(value: object) -> str:
    """Return a name or a text as it is."""
    if isinstance(value, str):
        return value
    return "-" if value is None else str(value)


def number(value: float | int | None, spec: str = "") -> str:
    """Return a figure, formatted by ``spec``."""
    return "-" if value is None else format(value, spec)


@lru_cache(maxsize=1 << 15)
def printed_gib(size: float | None, digits: int = 2) -> str:
    """Return ``format_gib`` of a figure that many ranks have in common."""
    return format_gib(size, digits)


def signed(value: int | float | None) -> str:
    """Return a difference with its sign, ``0`` where there is none."""
    return "-" if value is None else f"{value:+,}" if value else "0"


GIB, GIB3, GIB4 = printed_gib, partial(printed_gib, digits=3), partial(printed_gib, digits=4)
COUNT, MIB, RATE = format_bytes, format_mib, format_rate
SECONDS = partial(number, spec=".2f")
COMMAS = partial(number, spec=",")


def ms(seconds: float | None) -> str:
    """Return seconds as milliseconds."""
    return "-" if seconds is None else f"{seconds * 1000:.2f}"


class Shown(NamedTuple):
    """What decides whether a column is there."""

    rows: Sequence[Any]
    wide: bool


def wide_only(shown: Shown) -> bool:
    return shown.wide


def narrow_only(shown: Shown) -> bool:
    return not shown.wide


#: The value of a column: the ranks of a folded row.
LABELS = "labels"


@dataclass(frozen=True)
class Column:
    """A column: its title, what it shows of a row, the unit, and when it is there."""

    title: str  # a template; a ``Text`` as it is
    value: str | Callable[[Any], Any]  # an attribute of a row, or a function of it
    unit: Unit = word
    when: bool | Callable[[Shown], bool] = True
    marked: bool = False  # (m) of a simulated device, whose profile has a part in it
    narrow: str = ""  # the title in a narrow table
    right: bool | None = None  # None: all but words stand on the right
    compared: bool = True  # False: of ranks that share a row, the largest value

    def of(self, row: Any) -> Any:
        """Return the value of a row."""
        return attrgetter(self.value)(row) if isinstance(self.value, str) else self.value(row)

    def cell(self, row: Any) -> str:
        """Return the cell of a row, or of rows of several ranks that share it."""
        if not isinstance(row, Folded):
            return self.unit(self.of(row))
        if self.value == LABELS:
            return self.unit(fold(row.labels))
        if self.compared:
            return self.unit(self.of(row.rows[0]))
        known = [value for value in map(self.of, row.rows) if value is not None]
        return self.unit(max(known, default=None))

    def shown(self, rows: Sequence[Any], wide: bool) -> bool:
        """Return whether the column is there."""
        return self.when if isinstance(self.when, bool) else self.when(Shown(rows, wide))

    def head(self, wide: bool, simulated: bool) -> Head:
        """Return the title and the side of the cells."""
        title = titled(self.title if wide else self.narrow or self.title)
        right = self.unit is not word if self.right is None else self.right
        return Head(modelled(title, self.marked and simulated), right)


class Folded(NamedTuple):
    """A row of several ranks, whose cells are alike."""

    labels: list[str]
    rows: list[Any]


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


#: The columns of a table of sizes.
SIZES = (
    Column("", "title"),
    Column("GiB", "bytes", GIB4),
    Column("bytes", "bytes", COUNT),
)

#: The columns of a table of pairs: a name and what it has.
PAIRS = (Column("", itemgetter(0)), Column("", itemgetter(1)))


def table(
    title: str,
    columns: Iterable[Column],
    rows: Iterable[Any],
    notes: Iterable[str] = (),
    wide: bool = True,
    simulated: bool = False,
    look: Callable[[Any], str | Look] | None = None,
) -> Section:
    """Return a table.

    Args:
        title: above it.
        columns: those whose ``when`` holds are drawn.
        rows: what the columns read; a ``Row`` stands as it is. Of any other, ``style``, ``mark``
            and ``indent`` hold where it has them.
        notes: below it.
        wide: the line has room for the columns of a wide table.
        simulated: the device is, so that columns are marked.
        look: the style of a row or more of it, instead of its own.
    """
    listed = list(rows)
    shown = [column for column in columns if column.shown(listed, wide)]

    def draw(row: Any) -> Row:
        if isinstance(row, Row):
            return row
        own = row.rows[0] if isinstance(row, Folded) else row
        cells = [column.cell(row) for column in shown]
        known = {name: getattr(own, name) for name in Look._fields if hasattr(own, name)}
        if look is not None:
            seen = look(own)
            known |= {"style": seen} if isinstance(seen, str) else seen._asdict()
        return Row(cells, **known)

    heads = [column.head(wide, simulated) for column in shown]
    return Section(title, heads, [*map(draw, listed)], list(notes))


#: What tables of phases show of the device at an edge, in a report and in a comparison; those that
#: neither shows are in the DataFrame.
PHASE_COLUMNS = (
    Column("Reserved", "reserved_bytes", GIB),
    Column("", "reserved_peak_bytes", GIB, when=False),
    Column("Allocated peak", "allocated_peak_bytes", GIB),
    Column("Allocated", "allocated_bytes", GIB, wide_only),
    Column("Non-torch", "non_torch_bytes", GIB, marked=True),
    Column("", "npu_workspace_bytes", GIB, when=False),
    Column("Free", "device_free_bytes", GIB, wide_only, marked=True),
)


class Ranked(Protocol):
    """What the functions below know of a rank."""

    @property
    def label(self) -> str: ...
    @property
    def lines(self) -> Sequence[int] | None: ...


R = TypeVar("R", bound=Ranked)


def group_ranks(ranks: Iterable[R], key: Callable[[R], Hashable]) -> list[list[R]]:
    """Return ranks with equal keys together, in the order of the first of each."""
    groups: dict[Hashable, list[R]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())


def alike(
    ranks: Iterable[R],
    draw: Callable[[R, str], list[Section]],
    key: Callable[[R], Hashable] | None = None,
    every: str | None = None,
) -> list[Section]:
    """Return the tables of each group of ranks whose tables are alike; of many groups the first.

    Args:
        ranks: in their order.
        draw: makes the tables of a rank, given the labels that their titles name.
        key: what ranks of a group have in common; None: the tables themselves.
        every: these labels where one group has all ranks; None: theirs.
    """
    groups = group_ranks(ranks, key or (lambda rank: repr(draw(rank, ""))))
    found: list[Section] = []
    for members in groups[:SHOWN_GROUPS]:
        one = every is not None and len(groups) == 1
        found += draw(members[0], str(every) if one else labels_of(members))
    if found:
        found[-1].notes.extend(more_groups(groups, "report.json"))
    return found


def fold_rows(columns: Sequence[Column], per_rank: Mapping[str, Iterable[Any]]) -> list[Folded]:
    """Return the rows of all ranks, label -> rows; those whose compared cells are alike as one."""
    groups: dict[Hashable, Folded] = {}
    for label, rows in per_rank.items():
        for row in rows:
            key = tuple(
                column.cell(row) for column in columns if column.compared and column.value != LABELS
            )
            group = groups.setdefault(key, Folded([], []))
            group.labels.append(label)
            group.rows.append(row)
    return list(groups.values())


def fold(labels: Sequence[str]) -> str:
    """Return ``TP0, TP1, TP2, TP5`` as ``TP0-TP2, TP5``."""
    runs: list[list[str]] = []
    follows: tuple[str, str] | None = None  # prefix and digits of the label that goes on the run
    for label in labels:
        match = re.fullmatch(r"(.*?)(\d+)", label)
        parts = None if match is None else (match.group(1), match.group(2))
        if parts is not None and parts == follows:
            runs[-1].append(label)
        else:
            runs.append([label])
        if parts is not None:  # node09 is followed by node10, node9 too
            follows = parts[0], str(int(parts[1]) + 1).zfill(len(parts[1]))
        else:
            follows = None
    ends = [(group[0], group[-1].split(" ")[-1], len(group)) for group in runs]
    return ", ".join(first if count == 1 else f"{first}-{last}" for first, last, count in ends)


def labels_of(ranks: Iterable[Ranked]) -> str:
    """Return the labels of ranks; of a log, of a worker that nothing names also its lines."""
    members = list(ranks)
    lines = members[0].lines if len(members) == 1 else None
    if lines is None:
        return fold([rank.label for rank in members])
    first, last = lines
    if first == last:
        return text("{label}, line {first}", label=members[0].label, first=first)
    return text("{label}, lines {first}-{last}", label=members[0].label, first=first, last=last)


def modelled(title: str, mark: bool) -> str:
    """Return a title, marked where a simulated device's profile sets its figure."""
    return text("{title} (m)", title=title) if mark else title


def failed(name: str, expected: int | None, found: int | None) -> Text:
    """Return the note of a cross-check that does not hold."""
    return text(
        "✗ {name}: {expected:bytes} expected, {found:bytes} found",
        name=name,
        expected=expected,
        found=found,
    )


def more_groups(groups: Sequence[object], where: str) -> list[str]:
    """Return the note on groups of ranks that are not shown."""
    count = len(groups) - SHOWN_GROUPS
    if count <= 0:
        return []
    return [text("{count} more groups of ranks are in {where}", count=count, where=where)]


def signed_mib(size: int | None) -> str:
    """Return a difference as MiB with its sign, ``0`` where there is none."""
    return "-" if size is None else f"{size / MIB_BYTES:+.1f}" if size else "0"


def grown_mib(size: int | None) -> str:
    """Return growth as MiB with its sign, ``0`` where there is none, ``?`` where it is unknown."""
    return format_mib(size) or "0"
