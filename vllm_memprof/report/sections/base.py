"""What the tables of a report are drawn on, and how ranks share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vllm_memprof.accounting.evidence import EVIDENCE, Evidence
from vllm_memprof.accounting.model import Check, RankReport, Report
from vllm_memprof.document import Section
from vllm_memprof.files import read_table
from vllm_memprof.tables import (
    SHOWN_GROUPS,
    WIDE,
    Column,
    Look,
    labels_of,
    more_groups,
    table,
)
from vllm_memprof.text import Text, said, sentences, text

_WORDS = read_table(Path(__file__).parents[1] / "words.toml")
NO_FIGURES: Mapping[str, object] = {}


def words_of(name: str, figures: Mapping[str, object] = NO_FIGURES) -> tuple[Text, list[Text]]:
    """Return the title and the notes of a table of ``words.toml``."""
    words = _WORDS["tables"][name]
    title, notes = words["title"], words.get("notes", ())
    return sentences([title], figures), said(notes, figures)


def sentences_of(name: str, figures: Mapping[str, object]) -> Text:
    """Return sentences of ``words.toml`` that can be said of some figures."""
    parts = _WORDS["sentences"][name]
    return sentences(parts, figures)


class Sheet(NamedTuple):
    """A report, and how many characters the lines have that its tables are laid out for."""

    report: Report
    width: int

    @property
    def wide(self) -> bool:
        return self.width >= WIDE

    @property
    def evidence(self) -> Evidence:
        return EVIDENCE[self.report.run.source]

    def table(
        self,
        name: str,
        columns: Iterable[Column],
        rows: Iterable[Any],
        figures: Mapping[str, object] = NO_FIGURES,
        notes: Iterable[str] = (),
        look: Callable[[Any], str | Look] | None = None,
        most: int | None = None,
    ) -> Section:
        """Return a table, laid out for the width and marked for the device of the report.

        Args:
            name: of its title and notes in ``words.toml``.
            columns, rows, look, most: as of ``tables.table``.
            figures: that title and notes name.
            notes: further ones.
        """
        simulated = self.report.run.simulated
        title, told = words_of(name, {"simulated": simulated, **figures})
        return table(title, columns, rows, [*told, *notes], self.wide, simulated, look, most)


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


def least_grant(ranks: Sequence[RankReport]) -> RankReport | None:
    """Return the rank with the smallest KV cache, which all of them serve with; None: no grant."""
    known = [rank for rank in ranks if rank.budget.engine_kv_cache_bytes is not None]
    return min(known, key=lambda rank: rank.budget.engine_kv_cache_bytes or 0, default=None)
