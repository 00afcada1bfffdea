"""What the tables of a report are drawn on, and how ranks share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_memprof.accounting.evidence import Evidence
from vllm_memprof.accounting.model import Check, RankReport, Report
from vllm_memprof.document import Section
from vllm_memprof.tables import SHOWN_GROUPS, Paper, TableFile, more_groups
from vllm_memprof.text import fold, text

_WORDS = TableFile(str(Path(__file__).parent))
draw, columns_of, sentences_of = _WORDS.draw, _WORDS.columns, _WORDS.say
CONTENT = _WORDS.content


@dataclass(frozen=True, kw_only=True)
class Sheet(Paper):
    """A report, and how many characters the lines have that its tables are laid out for."""

    report: Report
    width: int

    @property
    def evidence(self) -> Evidence:
        return self.report.run.evidence


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
