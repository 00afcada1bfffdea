"""The tables of a deployment on several hosts: hosts, KV cache by engine core, ranks, skew, phases.

A report of one host has none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median_low
from typing import NamedTuple

from vllm_memprof.accounting.model import (
    COLLECTIVES,
    FIRST,
    WALL,
    Deployment,
    HostRow,
    RankReport,
    Report,
)
from vllm_memprof.accounting.model import UNKNOWN as UNKNOWN_CLOCK
from vllm_memprof.accounting.owners.skew import OwnerSkew, skew_by_owner
from vllm_memprof.document import BAD, MUTED, PLAIN, Row, Section
from vllm_memprof.record.deployment import Gap
from vllm_memprof.tables import COMMAS, GIB, GIB4, STATUS_WORDS, Column, fold, modelled, table
from vllm_memprof.text import Text, text

#: Ranks that have a row of their own in a table.
_LISTED_RANKS = 16
#: Hosts that have one.
_LISTED_HOSTS = 16
#: Owners whose difference between ranks is listed.
_LISTED_OWNERS = 8
#: Marks the slowest of a phase.
_SLOWEST = "*"
#: Phases that are no part of a start-up.
_NOT_STARTUP = ("request", "stage", "sleep", "wake_up", "shutdown", "oom", "empty_cache")
_SECONDS = 10**9


def deployment_sections(report: Report, width: int) -> list[Section]:
    """Return the tables of a deployment; nothing of a run on one host."""
    deployment = report.deployment
    if deployment is None:
        return []
    found = [_hosts(report, deployment), _cores(deployment)]
    return [*found, *_ranks(report), *_skew(report), *_matrix(report, width)]


def gap_text(gap: Gap) -> Text:
    """Return a gap as a sentence."""
    name = gap.name if gap.group is None else f"{gap.group}, {gap.name}"
    match gap.kind:
        case "no_folder":
            return text("no run folder of {name}: its ranks are not in this report", name=name)
        case "unreadable":
            return text("not read: {name} ({reason})", name=name, reason=gap.reason)
        case "given_twice":
            return text("given twice, read once: {name} is {reason}", name=name, reason=gap.reason)
        case "truncated":
            return text("incomplete record: {name} ({reason})", name=name, reason=gap.reason)
    if gap.reason:
        return text("no rank left a record in {name} ({reason})", name=name, reason=gap.reason)
    return text("no rank left a record in {name}", name=name)


class _Host(NamedTuple):
    """A host with the least headroom of its ranks."""

    host: HostRow
    headroom_bytes: int | None
    status: str

    @property
    def style(self) -> str:
        return PLAIN if self.host.status in ("ok", "running") else BAD


def _hosts(report: Report, deployment: Deployment) -> Section:
    headroom = {rank.label: rank.budget.headroom_bytes for rank in report.ranks}
    told: set[str] = set()  # runs whose reason stands in a row above

    def least(row: HostRow) -> int | None:
        known = [size for label in row.labels if (size := headroom[label]) is not None]
        return min(known, default=None)

    def status(row: HostRow) -> str:
        word: str = STATUS_WORDS.get(row.status, row.status)
        if not row.exit_reason or row.status in ("ok", "running") or row.run in told:
            return word
        told.add(row.run)
        return text("{status}: {reason}", status=word, reason=row.exit_reason)

    ranked = sorted(deployment.hosts, key=lambda row: (least(row) is None, least(row) or 0))
    rows = [_Host(row, least(row), status(row)) for row in ranked[:_LISTED_HOSTS]]
    columns = (
        Column("Host", "host.host"),
        Column("Engine group", "host.group", when=len(deployment.groups) > 1),
        Column("Ranks on it", lambda row: fold(row.host.labels) or "-"),
        Column("Status", "status"),
        Column("Least headroom, GiB", "headroom_bytes", GIB, marked=True),
        Column("Clock, s", lambda row: _clock(row.host)),
    )
    notes: list[str] = [*_clock_notes(deployment)]
    if (more := len(ranked) - len(rows)) > 0:
        notes.append(text("{count} more hosts, with more headroom, are in report.json", count=more))
    title = text("Hosts, the one with the least headroom first")
    return table(title, columns, rows, notes, simulated=report.run.simulated)


def _clock(row: HostRow) -> str:
    """Return by how many seconds a host's wall clock is ahead, and what is certain."""
    clock = row.clock
    if clock.by == FIRST:
        return text("reference")
    if clock.by == WALL:
        return text("wall clock, unchecked")
    if clock.by != COLLECTIVES or clock.uncertainty_ns is None:
        return text("unknown")
    if clock.wall_ahead_ns is None:
        return text("± {most:.3f}", most=clock.uncertainty_ns / _SECONDS)
    return text(
        "{ahead:+.3f} ± {most:.3f}",
        ahead=clock.wall_ahead_ns / _SECONDS,
        most=clock.uncertainty_ns / _SECONDS,
    )


def _clock_notes(deployment: Deployment) -> list[Text]:
    rows = deployment.hosts
    reference = next((row.host for row in rows if row.clock.by == FIRST), None)
    notes = []
    used = [row.clock for row in rows if row.clock.by == COLLECTIVES]
    if used:
        phases = ", ".join(dict.fromkeys(phase for clock in used for phase in clock.phases))
        notes.append(
            text(
                "clock: seconds by which the wall clock is ahead of that of {host}; ±: the most "
                "that it is off. No rank leaves {phases} before every rank has entered it; the "
                "ranks are assumed to leave it together",
                host=reference or "-",
                phases=phases,
            )
        )
    for row in rows:
        if row.clock.wall_differs_ns:
            notes.append(
                text(
                    "the wall clocks of {host} and {first} differ by at least {seconds:.3f} s",
                    host=row.host or "-",
                    first=reference or "-",
                    seconds=row.clock.wall_differs_ns / _SECONDS,
                )
            )
    wall = _hosts_of([row for row in rows if row.clock.by == WALL and not row.clock.contradict])
    if wall:
        notes.append(
            text(
                "{hosts}: times are compared by the wall clock, which no collective checks",
                hosts=wall,
            )
        )
    contradicting = _hosts_of([row for row in rows if row.clock.contradict])
    if contradicting:
        notes.append(
            text(
                "{hosts}: the collectives contradict each other; times are compared by the wall "
                "clock",
                hosts=contradicting,
            )
        )
    unknown = _hosts_of([row for row in rows if row.clock.by == UNKNOWN_CLOCK])
    if unknown:
        notes.append(
            text(
                "{hosts}: nothing tells the clock; times begin at the first reading there",
                hosts=unknown,
            )
        )
    return notes


def _hosts_of(rows: Sequence[HostRow]) -> str:
    return fold(list(dict.fromkeys(row.host or "-" for row in rows)))


def _cores(deployment: Deployment) -> Section:
    several = len(deployment.groups) > 1
    cores = deployment.cores
    least: dict[str | None, int | None] = {}
    for core in cores:
        size = core.granted_bytes
        known = least.get(core.group)
        if size is not None and (known is None or size < known):
            least[core.group] = size
    ranked = sorted(cores, key=lambda core: (core.group or "", core.granted_bytes or 0))
    columns = (
        Column("Engine group", "group", when=several),
        Column("Engine core", lambda core: None if core.dp_rank is None else f"DP{core.dp_rank}"),
        Column("Hosts", lambda core: fold(core.hosts)),
        Column("Granted, GiB", "granted_bytes", GIB4),
        Column("Tokens", "tokens", COMMAS),
        Column("Rank with the least", "least_label"),
    )
    notes: list[str] = []
    for group, size in least.items():
        if several:
            notes.append(text("least of {group}: {size:gib4} GiB", group=group or "-", size=size))
        elif len(cores) > 1:
            notes.append(text("least of all engine cores: {size:gib4} GiB", size=size))
    if several:
        notes.append(text("each group has a budget of its own: their KV caches are not compared"))
    if (more := len(ranked) - _LISTED_HOSTS) > 0:
        notes.append(text("{count} more engine cores are in report.json", count=more))
    return table(text("KV cache granted by engine core"), columns, ranked[:_LISTED_HOSTS], notes)


_RANKS = (
    Column("Rank", "label"),
    Column("Host", "host"),
    Column("Headroom", "budget.headroom_bytes", GIB4, marked=True),
    Column("Granted", "budget.engine_kv_cache_bytes", GIB4),
    Column("Fits the device", "budget.fits_device_bytes", GIB4, marked=True),
)


def _ranks(report: Report) -> list[Section]:
    known = [rank for rank in report.ranks if rank.budget.headroom_bytes is not None]
    if not known:
        return []
    ranked = sorted(known, key=lambda rank: rank.budget.headroom_bytes or 0)
    notes: list[str] = []
    if (more := len(ranked) - _LISTED_RANKS) > 0:
        notes.append(text("{count} more ranks, with more headroom, are in report.json", count=more))
    if len(known) < len(report.ranks):
        unknown = [rank.label for rank in report.ranks if rank.budget.headroom_bytes is None]
        notes.append(text("not known of {labels}", labels=fold(unknown)))

    def look(rank: RankReport) -> str:
        return BAD if (rank.budget.headroom_bytes or 0) < 0 else PLAIN

    title = text("Ranks by headroom at the serving peak, GiB, the least first")
    rows = ranked[:_LISTED_RANKS]
    return [table(title, _RANKS, rows, notes, simulated=report.run.simulated, look=look)]


def _skew(report: Report) -> list[Section]:
    found = skew_by_owner(report)
    if not found:
        return []

    def owner(row: OwnerSkew) -> str:
        title = modelled(row.title, report.run.simulated and row.modelled)
        if row.group is None:
            return title
        return text("{group}: {title}", group=row.group, title=title)

    columns = (
        Column("Owner", owner),
        Column("Between\nranks", lambda row: row.most - row.least, GIB4),
        Column("Least on", "least_label"),
        Column("Most on", "most_label"),
        Column("Between\nhosts", "between_hosts", GIB4),
    )
    notes: list[str] = [
        text("of the last reading before the shutdown that all ranks have; the largest first"),
        text("between hosts: of the median rank of each host, the highest less the lowest"),
    ]
    if any(row.group for row in found):
        notes.append(text("ranks are compared within their group"))
    if (more := len(found) - _LISTED_OWNERS) > 0:
        notes.append(text("{count} more owners differ by less", count=more))
    title = text("Differences of device memory by owner, GiB")
    return [table(title, columns, found[:_LISTED_OWNERS], notes)]


class _Line(NamedTuple):
    """One row of the matrix: a rank, or the slowest rank of a host in each phase."""

    name: str
    host: str
    seconds: dict[str, tuple[float, str]]  # phase -> s, label of the rank


def _matrix(report: Report, width: int) -> list[Section]:
    """Return seconds by rank and phase; of many ranks by host, of many hosts the outliers."""
    times = {rank.label: _seconds(rank) for rank in report.ranks}
    phases: dict[str, float] = {}
    for own in times.values():
        for phase, seconds in own.items():
            phases[phase] = max(phases.get(phase, 0.0), seconds)
    if not phases:
        return []
    by_rank = len(report.ranks) <= _LISTED_RANKS
    lines = (
        [
            _Line(
                rank.label,
                rank.host or "-",
                {phase: (s, rank.label) for phase, s in times[rank.label].items()},
            )
            for rank in report.ranks
        ]
        if by_rank
        else _by_host(report, times)
    )
    slowest = {
        phase: max(
            (line.seconds[phase] for line in lines if phase in line.seconds),
            key=lambda entry: entry[0],
        )
        for phase in phases
    }
    left_out = 0
    if len(lines) > _LISTED_HOSTS:
        kept = _outliers(lines, slowest)
        left_out = len(lines) - len(kept)
        lines = kept
    room = width - 2 - max(len(line.name) for line in lines) - 2
    if by_rank:
        room -= max(len(line.host) for line in lines) + 2
    shown = _fitting(phases, room)

    def took(phase: str, line: _Line) -> str | None:
        entry = line.seconds.get(phase)
        if entry is None:
            return None
        return f"{entry[0]:.2f}{_SLOWEST if entry == slowest[phase] else ''}"

    last = [text("slowest"), *([""] if by_rank else []), *(slowest[phase][1] for phase in shown)]
    columns = [
        Column("Rank", "name", when=by_rank),
        Column("Host", "host"),
        *(Column(phase, partial(took, phase), right=True) for phase in shown),
    ]
    notes: list[str] = [text("{mark}: the slowest rank of the phase", mark=_SLOWEST)]
    if not by_rank:
        notes.append(text("of each host its slowest rank in the phase"))
    if "hccl_init" in shown and "device_init" in shown:
        notes.append(
            text(
                "hccl_init is a part of device_init; a rank that is early waits in it for the last"
            )
        )
    if left_out:
        notes.append(
            text(
                "{count} more hosts, near the median in every phase, are in report.json",
                count=left_out,
            )
        )
    if len(shown) < len(phases):
        others = [phase for phase in phases if phase not in shown]
        notes.append(text("shorter phases: {phases}", phases=", ".join(others)))
    title = text("Seconds by rank and phase") if by_rank else text("Seconds by host and phase")
    return [table(title, columns, [*lines, Row(last, style=MUTED)], notes)]


def _by_host(report: Report, times: dict[str, dict[str, float]]) -> list[_Line]:
    hosts: dict[str | None, dict[str, tuple[float, str]]] = {}
    for rank in report.ranks:
        own = hosts.setdefault(rank.host, {})
        for phase, seconds in times[rank.label].items():
            if phase not in own or seconds > own[phase][0]:
                own[phase] = seconds, rank.label
    return [_Line(host or "-", host or "-", own) for host, own in hosts.items()]


def _outliers(lines: Sequence[_Line], slowest: dict[str, tuple[float, str]]) -> list[_Line]:
    """Return the slowest of each phase, and those farthest from the median in any."""
    middle = {
        phase: median_low(line.seconds[phase][0] for line in lines if phase in line.seconds)
        for phase in slowest
    }

    def distance(line: _Line) -> float:
        return max((abs(s - middle[phase]) for phase, (s, _) in line.seconds.items()), default=0.0)

    marked = [line for line in lines if any(line.seconds.get(p) == s for p, s in slowest.items())]
    ranked = marked + sorted(
        (line for line in lines if not any(line is each for each in marked)),
        key=distance,
        reverse=True,
    )
    kept = ranked[:_LISTED_HOSTS]
    return [line for line in lines if any(line is each for each in kept)]


def _fitting(phases: dict[str, float], room: int) -> list[str]:
    """Return the longest phases whose columns fit the line, in their order."""
    kept: list[str] = []
    for phase in sorted(phases, key=lambda phase: -phases[phase]):
        size = max(len(phase), 8) + 2
        if kept and size > room:
            break
        room -= size
        kept.append(phase)
    return [phase for phase in phases if phase in kept]


def _seconds(rank: RankReport) -> dict[str, float]:
    """Return the seconds of a rank's start-up, by phases that lie in no other but device_init."""
    found: dict[str, float] = {}
    around = {span.order: span.phase for span in rank.phases}
    for span in rank.phases:
        outermost = span.parent is None or around.get(span.parent) == "device_init"
        if outermost and span.phase not in _NOT_STARTUP and span.seconds is not None:
            found[span.phase] = found.get(span.phase, 0.0) + span.seconds
    return found


def summary_of(deployment: Deployment) -> Text:
    """Return how many hosts there are, and their names."""
    names = list(dict.fromkeys(row.host or "-" for row in deployment.hosts))
    return text("{count}: {names}", count=len(names), names=fold(names))
