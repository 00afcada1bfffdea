"""What the tables of reports share: ranks that agree folded into one, figures as cells."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache

from vllm_memprof.accounting.model import (
    RankReport,
    RunSummary,
)
from vllm_memprof.document import PLAIN, Row
from vllm_memprof.text import Text, text
from vllm_memprof.units import format_bytes, format_gib

#: Groups of ranks that get a table of their own; the rest is in report.json.
SHOWN_GROUPS = 4
#: Width of a line from which on tables gain columns.
WIDE = 110

GIB, BYTES = text("GiB"), text("bytes")
UNKNOWN = text("unknown")
STATUS_WORDS = {
    "ok": text("ok"),
    "running": text("running"),
    "failed": text("failed"),
    "oom": text("oom"),
    "truncated": text("truncated"),
}


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


@lru_cache(maxsize=1 << 15)
def printed_gib(size: int | None, digits: int = 2) -> str:
    """Return ``format_gib`` of a figure that many ranks have in common."""
    return format_gib(size, digits)


def group_ranks(
    ranks: Iterable[RankReport], key: Callable[[RankReport], Hashable]
) -> list[list[RankReport]]:
    """Return ranks with equal keys together, in the order of the first of each."""
    groups: dict[Hashable, list[RankReport]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())


def labels_of(ranks: Iterable[RankReport]) -> str:
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


def amount(title: str, size: int | None, style: str = PLAIN, mark: str = "") -> Row:
    return Row([title, format_gib(size, 4), format_bytes(size)], style=style, mark=mark)


def number(value: float | int | None, spec: str = "") -> str:
    return "-" if value is None else format(value, spec)


def failed(name: str, expected: int | None, found: int | None) -> Text:
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


def least_grant(ranks: Sequence[RankReport]) -> RankReport | None:
    """Return the rank with the smallest KV cache, which all of them serve with; None: no grant."""
    known = [rank for rank in ranks if rank.budget.engine_kv_cache_bytes is not None]
    return min(known, key=lambda rank: rank.budget.engine_kv_cache_bytes or 0, default=None)


def engine_text(run: RunSummary) -> str:
    """Return the engine of a run with its version."""
    engine = " ".join(part for part in (run.engine, run.engine_version) if part)
    return engine or text("engine unknown")


def device_text(run: RunSummary) -> str:
    """Return the device of a run, and what simulates it."""
    device = run.device or text("device unknown")
    if not run.simulated:
        return device
    profile = run.device_profile or UNKNOWN
    return text("{device} [simulated: profile {profile}]", device=device, profile=profile)
