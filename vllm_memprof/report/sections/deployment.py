"""The tables of a deployment on several hosts: hosts, KV cache by engine core, ranks, skew, phases.

A report of one host has none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from statistics import median_low
from typing import NamedTuple

from vllm_memprof.accounting.deployment.host_clocks import BLOCKING
from vllm_memprof.accounting.model import (
    COLLECTIVES,
    FIRST,
    Deployment,
    HostRow,
    RankReport,
)
from vllm_memprof.accounting.owners.skew import OwnerSkew, skew_by_owner
from vllm_memprof.accounting.titles import TITLES, title_in
from vllm_memprof.document import BAD, MUTED, PLAIN, Row, Section
from vllm_memprof.record.deployment import Gap
from vllm_memprof.report.sections.base import Sheet, draw, fitting, sentences_of
from vllm_memprof.tables import UNKNOWN, Column, foremost, modelled
from vllm_memprof.text import Text, fold, text
from vllm_memprof.units import smallest

#: Rows that a table has, of ranks, hosts and engine cores; of owners.
_LISTED, _LISTED_OWNERS = 16, 8
#: Marks the slowest of a phase.
_SLOWEST = "*"
#: Phases that are no part of a start-up.
_NOT_STARTUP = ("request", "stage", "sleep", "wake_up", "shutdown", "oom", "empty_cache")
_SECONDS = 10**9
_WELL = ("ok", "running")


def summary_of(deployment: Deployment) -> Text:
    """Return how many hosts there are, and their names."""
    names = list(dict.fromkeys(row.host or "-" for row in deployment.hosts))
    return text("{count}: {names}", count=len(names), names=fold(names))


def gap_text(gap: Gap) -> Text:
    """Return a gap as a sentence."""
    name = gap.name if gap.group is None else f"{gap.group}, {gap.name}"
    figures = {gap.kind: True, "name": name, "reason": gap.reason or UNKNOWN}
    return sentences_of("gap", figures)


def hosts(sheet: Sheet) -> Iterator[Section]:
    """Return the hosts, the one with the least headroom first."""
    deployment = sheet.report.deployment
    if deployment is None:
        return
    headroom = {rank.label: rank.budget.headroom_bytes for rank in sheet.report.ranks}
    told: set[str] = set()  # runs whose reason stands in a row above

    def least(row: HostRow) -> int | None:
        return smallest(headroom[label] for label in row.labels)

    def status(row: HostRow) -> str:
        word: str = title_in("statuses", row.status)
        if not row.run.exit_reason or row.status in _WELL or row.run.id in told:
            return word
        told.add(row.run.id)
        return text("{status}: {exit_reason}", row.run, status=word)

    def ahead(row: HostRow) -> str:
        """Return by how many seconds a host's wall clock is ahead, and what is certain."""
        clock = row.clock
        if clock.by != COLLECTIVES or clock.uncertainty_ns is None:
            return TITLES["clocks"].get(clock.by, UNKNOWN)
        most = clock.uncertainty_ns / _SECONDS
        if clock.wall_ahead_ns is None:
            return text("± {most:.3f}", most=most)
        return text("{ahead:+.3f} ± {most:.3f}", ahead=clock.wall_ahead_ns / _SECONDS, most=most)

    ranked = sorted(deployment.hosts, key=lambda row: (least(row) is None, least(row) or 0))
    figures, differing = _clocks(deployment.hosts)
    yield draw(
        sheet,
        "hosts",
        ranked,
        {**figures, "several": len(deployment.groups) > 1},
        differing,
        lambda row: PLAIN if row.status in _WELL else BAD,
        _LISTED,
        members=lambda row: fold(row.labels) or None,
        said=status,
        least=least,
        ahead=ahead,
    )


def _clocks(rows: list[HostRow]) -> tuple[dict[str, str], list[Text]]:
    """Return the hosts by how their clocks were brought together, and which differ."""
    by: dict[str, list[str]] = {}
    for row in rows:
        by.setdefault("contradict" if row.clock.contradict else row.clock.by, []).append(
            row.host or "-"
        )
    reference = by.get(FIRST, ["-"])[0]
    differing = [
        text(
            "the wall clocks of {host} and {first} differ by at least {seconds:.3f} s",
            host=row.host or "-",
            first=reference,
            seconds=row.clock.wall_differs_ns / _SECONDS,
        )
        for row in rows
        if row.clock.wall_differs_ns
    ]
    figures = {how: fold(list(dict.fromkeys(hosts))) for how, hosts in by.items()}
    return figures | {"reference": reference, "phases": BLOCKING}, differing


def cores(sheet: Sheet) -> Iterator[Section]:
    """Return the KV cache that each engine core was granted; the least of each group below it."""
    deployment = sheet.report.deployment
    if deployment is None:
        return
    several = len(deployment.groups) > 1
    ranked = sorted(deployment.cores, key=lambda core: (core.group or "", core.granted_bytes or 0))
    least = []
    for group in deployment.groups:
        granted = [core.granted_bytes for core in ranked if core.group == group]
        size = smallest(granted)
        least.append(text("least of {group}: {size:gib4} GiB", group=group or "-", size=size))
    figures = {"several": several, "least": None if several or len(ranked) < 2 else size}
    notes = least if several else []
    yield draw(
        sheet,
        "cores",
        ranked,
        figures,
        notes,
        most=_LISTED,
        name=lambda core: None if core.dp_rank is None else f"DP{core.dp_rank}",
        on=lambda core: fold(core.hosts),
    )


def ranks(sheet: Sheet) -> Iterator[Section]:
    """Return the ranks by headroom."""
    headroom = {rank.label: rank.budget.headroom_bytes for rank in sheet.report.ranks}
    known = [rank for rank in sheet.report.ranks if headroom[rank.label] is not None]
    if not known or sheet.report.deployment is None:
        return
    unknown = fold([label for label, size in headroom.items() if size is None])
    ranked = sorted(known, key=lambda rank: headroom[rank.label] or 0)

    def look(rank: RankReport) -> str:
        return BAD if (headroom[rank.label] or 0) < 0 else PLAIN

    yield draw(sheet, "ranks", ranked, {"unknown": unknown}, look=look, most=_LISTED)


def skew(sheet: Sheet) -> Iterator[Section]:
    """Return the owners of device memory that make the ranks differ."""
    found = [] if sheet.report.deployment is None else skew_by_owner(sheet.report)
    if not found:
        return

    def owner(row: OwnerSkew) -> str:
        title = modelled(row.title, sheet.report.run.simulated and row.modelled)
        return title if row.group is None else text("{group}: {title}", row, title=title)

    figures = {"grouped": any(row.group for row in found)}
    yield draw(
        sheet,
        "skew",
        found,
        figures,
        most=_LISTED_OWNERS,
        named=owner,
        spread=lambda row: row.most - row.least,
    )


class _MatrixRow(NamedTuple):
    """One row of the matrix: a rank, or the slowest rank of a host in each phase."""

    name: str
    host: str
    seconds: dict[str, tuple[float, str]]  # phase -> s, label of the rank


def matrix(sheet: Sheet) -> Iterator[Section]:
    """Return seconds by rank and phase; of many ranks by host, of many hosts the outliers."""
    if sheet.report.deployment is None:
        return
    by_rank = len(sheet.report.ranks) <= _LISTED
    lines: dict[str, _MatrixRow] = {}
    slowest: dict[str, tuple[float, str]] = {}
    for rank in sheet.report.ranks:
        name = rank.label if by_rank else rank.host or "-"
        line = lines.setdefault(name, _MatrixRow(name, rank.host or "-", {}))
        around = {span.order: span.phase for span in rank.phases}
        own: defaultdict[str, float] = defaultdict(float)
        for span in rank.phases:  # of the start-up, those in no other phase but device_init
            outermost = span.parent is None or around.get(span.parent) == "device_init"
            if outermost and span.phase not in _NOT_STARTUP and span.seconds is not None:
                own[span.phase] += span.seconds
        for phase, seconds in own.items():
            for held in (line.seconds, slowest):
                if phase not in held or seconds > held[phase][0]:
                    held[phase] = seconds, rank.label
    if not slowest:
        return
    middle = {
        phase: median_low(
            each.seconds[phase][0] for each in lines.values() if phase in each.seconds
        )
        for phase in slowest
    }

    def weight(line: _MatrixRow) -> tuple[bool, float]:
        """Return whether it is the slowest of a phase, and how far from the median in any."""
        took = line.seconds.items()
        far = max((abs(entry[0] - middle[phase]) for phase, entry in took), default=0.0)
        return any(entry == slowest[phase] for phase, entry in took), far

    rows = foremost(lines.values(), _LISTED, weight)
    room = sheet.width - 4 - max(len(line.name) for line in rows)
    if by_rank:
        room -= max(len(line.host) for line in rows) + 2
    sizes = {phase: max(len(phase), 8) + 2 for phase in slowest}
    shown = fitting(sizes, {phase: entry[0] for phase, entry in slowest.items()}, room)

    def took(phase: str, line: _MatrixRow) -> str | None:
        entry = line.seconds.get(phase)
        mark = _SLOWEST if entry == slowest[phase] else ""
        return None if entry is None else f"{entry[0]:.2f}{mark}"

    last = [text("slowest"), *[""] * by_rank, *(slowest[phase][1] for phase in shown)]
    columns = [Column(phase, partial(took, phase), right=True) for phase in shown]
    figures = {
        "by_rank": by_rank,
        "by_host": not by_rank,
        "inside": {"hccl_init", "device_init"} <= set(shown),
        "left_out": len(lines) - len(rows) or None,
        "shorter": ", ".join(phase for phase in slowest if phase not in shown),
    }
    yield draw(sheet, "matrix", [*rows, Row(last, style=MUTED)], figures, columns=columns)
