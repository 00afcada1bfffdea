"""What every section is made of: columns, rows, remarks, and the folding of ranks that agree."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from vllm_memprof.accounting.model import RankReport
from vllm_memprof.units import format_bytes, format_gib

NOT_MEASURED = "NOT MEASURED"
#: Marks a figure that the profile of a simulated device sets.
MODELLED_MARK = "(m)"
#: Groups of ranks that get a table of their own; the rest is in report.json.
SHOWN_GROUPS = 4

#: Row styles: a reporter maps them to its own means.
PLAIN, TOTAL, MUTED, BAD, GOOD = "plain", "total", "muted", "bad", "good"


@dataclass(frozen=True)
class Column:
    title: str
    right: bool = True  # aligned to the right


@dataclass(frozen=True)
class Row:
    cells: list[str]
    indent: int = 0  # of the first cell
    style: str = PLAIN


@dataclass(frozen=True)
class Section:
    """A table with its title and the remarks below it."""

    title: str
    columns: list[Column]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


def fold(labels: Sequence[str]) -> str:
    """``TP0, TP1, TP2, TP5`` as ``TP0-TP2, TP5``."""
    runs: list[list[tuple[str, int | None]]] = []
    for label in labels:
        match = re.fullmatch(r"(.*?)(\d+)", label)
        prefix, number = (match.group(1), int(match.group(2))) if match else (label, None)
        last = runs[-1][-1] if runs else None
        if last is not None and last[1] is not None and (prefix, number) == (last[0], last[1] + 1):
            runs[-1].append((prefix, number))
        else:
            runs.append([(prefix, number)])
    texts = []
    for group in runs:
        ends = [
            prefix if number is None else f"{prefix}{number}"
            for prefix, number in (group[0], group[-1])
        ]
        texts.append(ends[0] if len(group) == 1 else f"{ends[0]}-{ends[1].split(' ')[-1]}")
    return ", ".join(texts)


def group_ranks(
    ranks: Iterable[RankReport], key: Callable[[RankReport], Hashable]
) -> list[list[RankReport]]:
    """Ranks with equal keys together, in the order of the first of each."""
    groups: dict[Hashable, list[RankReport]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())


def labels_of(ranks: Iterable[RankReport]) -> str:
    return fold([rank.label for rank in ranks])


def amount(title: str, size: int | None, style: str = PLAIN) -> Row:
    return Row([title, format_gib(size, 4), format_bytes(size)], style=style)


def priced(title: str, size: int | None, tokens: int | None, style: str = PLAIN) -> Row:
    return Row([title, format_gib(size, 4), format_bytes(size), format_bytes(tokens)], style=style)


def number(value: float | int | None, spec: str = "") -> str:
    return "-" if value is None else format(value, spec)


def failed(name: str, expected: int | None, found: int | None) -> str:
    return f"✗ {name}: {format_bytes(expected)} expected, {format_bytes(found)} found"


def least_grant(ranks: Sequence[RankReport]) -> RankReport | None:
    """The rank with the smallest KV cache, with which all of them serve; None where none was granted."""
    known = [rank for rank in ranks if rank.budget.engine_kv_cache_bytes is not None]
    return min(known, key=lambda rank: rank.budget.engine_kv_cache_bytes or 0, default=None)
