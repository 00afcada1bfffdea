"""What the tables of a report are drawn on, and how ranks share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vllm_memprof.accounting.evidence import Evidence
from vllm_memprof.accounting.model import Check, RankReport, Report
from vllm_memprof.document import Section
from vllm_memprof.files import read_table
from vllm_memprof.tables import (
    SHOWN_GROUPS,
    SIZES,
    UNITS,
    WHENS,
    WIDE,
    Column,
    Look,
    fold,
    more_groups,
    table,
)
from vllm_memprof.text import Text, said, sentences, text

_WORDS = read_table(Path(__file__).parents[1] / "tables.toml")
Figures = Mapping[str, object]
Values = Callable[[Any], Any]
NO_FIGURES: Figures = {}


def sentences_of(name: str, figures: Figures, mark: str = "; ") -> Text:
    """Return sentences of ``tables.toml`` that can be said of some figures, a mark between them."""
    parts = _WORDS["sentences"][name]
    return sentences(parts, figures, mark)


def columns_of(name: str, figures: Figures = NO_FIGURES, /, **values: Values) -> list[Column]:
    """Return the columns of a table of ``tables.toml``.

    Args:
        name: of the table.
        figures: those that a column is there for.
        values: what columns show that is no attribute of a row.
    """

    def column(value: str, unit: str = "word", when: str = "", **more: Any) -> Column:
        shown = WHENS.get(when) or (not when or bool(figures.get(when)))
        return Column(value=values.get(value, value), unit=UNITS[unit], when=shown, **more)

    rows = _WORDS["tables"][name].get("columns")
    return list(SIZES) if rows is None else [column(**row) for row in rows]


class Paper(NamedTuple):
    """What a table is laid out for."""

    wide: bool = True
    simulated: bool = False


class Sheet(NamedTuple):
    """A report, and how many characters the lines have that its tables are laid out for."""

    report: Report
    width: int

    @property
    def wide(self) -> bool:
        return self.width >= WIDE

    @property
    def simulated(self) -> bool:
        return self.report.run.simulated

    @property
    def evidence(self) -> Evidence:
        return self.report.run.evidence


def draw(
    on: Sheet | Paper,
    name: str,
    rows: Iterable[Any],
    /,
    figures: Figures = NO_FIGURES,
    notes: Iterable[str] = (),
    look: Callable[[Any], str | Look] | None = None,
    most: int | None = None,
    columns: Iterable[Column] = (),
    **values: Values,
) -> Section:
    """Return a table of ``tables.toml``.

    Args:
        on: what it is laid out and marked for.
        name: of the table.
        rows, look, most: as of ``tables.table``.
        figures: that title, columns and notes name.
        notes: further ones.
        columns: further ones.
        values: as of ``columns_of``.
    """
    words, known = _WORDS["tables"][name], {"simulated": on.simulated, **figures}
    title, sayable = words["title"], words.get("notes", ())
    shown = [*columns_of(name, known, **values), *columns]
    told = [*said(sayable, known), *notes]
    return table(sentences([title], known), shown, rows, told, on.wide, on.simulated, look, most)


#: What draws tables of a report, and of one rank.
Draw = Callable[[Sheet], Iterable[Section]]
DrawRank = Callable[[Sheet, RankReport], Iterable[Section]]


def per_rank(*draws: DrawRank, order: Callable[[RankReport], Any] | None = None) -> Draw:
    """Return what draws the tables of each group of ranks that are alike, with their labels.

    Args:
        draws: make the tables of a rank that are grouped as one.
        order: of the groups, by their first rank; of many the first are drawn. None: as they come.
    """

    def draw_all(sheet: Sheet) -> list[Section]:
        groups: dict[str, tuple[list[RankReport], list[Section]]] = {}
        ranks = sorted(sheet.report.ranks, key=order) if order else sheet.report.ranks
        for rank in ranks:
            drawn = [section for draw in draws for section in draw(sheet, rank)]
            key = repr([section.compared for section in drawn])
            members, shared = groups.setdefault(key, ([], drawn))
            members.append(rank)
            for section, own in zip(shared, drawn, strict=True):
                section.notes.extend(note for note in own.notes if note not in section.notes)
        known = [group for group in groups.values() if group[1]]
        found = [
            replace(section, title=text("{title}, {labels}", section, labels=labels_of(members)))
            for members, shared in known[:SHOWN_GROUPS]
            for section in shared
        ]
        for section in found[-1:]:
            section.notes.extend(more_groups(known, "report.json"))
        return found

    return draw_all


def fitting(sizes: Mapping[str, int], weights: Mapping[str, float], room: int) -> list[str]:
    """Return the columns that weigh most and fit the room, at least one, in their order."""
    kept: list[str] = []
    for name in sorted(sizes, key=lambda name: -weights[name]):
        room -= sizes[name]
        if kept and room < 0:
            break
        kept.append(name)
    return [name for name in sizes if name in kept]


def failed(checks: Iterable[Check]) -> Iterator[str]:
    """Return the notes of cross-checks that do not hold."""
    for check in checks:
        if check.ok is False:
            yield text("✗ {name}: {expected:bytes} expected, {found:bytes} found", check)


def labels_of(ranks: Iterable[RankReport]) -> str:
    """Return the labels of ranks; of a log, of a worker that nothing names also its lines."""
    members = list(ranks)
    if len(members) != 1 or members[0].lines is None:
        return fold([rank.label for rank in members])
    first, last = members[0].lines
    if first == last:
        return text("{label}, line {first}", members[0], first=first)
    return text("{label}, lines {first}-{last}", members[0], first=first, last=last)


def least_grant(ranks: Sequence[RankReport]) -> RankReport | None:
    """Return the rank with the smallest KV cache, which all of them serve with; None: no grant."""
    known = [rank for rank in ranks if rank.budget.engine_kv_cache_bytes is not None]
    return min(known, key=lambda rank: rank.budget.engine_kv_cache_bytes or 0, default=None)
