"""The tables of a deployment on several hosts: hosts, KV cache by engine core, ranks, skew, phases.

A report of one host has none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

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
from vllm_memprof.accounting.skew import OwnerSkew, skew_by_owner
from vllm_memprof.document import BAD, MUTED, PLAIN, Head, Row, Section
from vllm_memprof.record.deployment import Gap
from vllm_memprof.record.spans import Span
from vllm_memprof.tables import STATUS_WORDS, fold, modelled
from vllm_memprof.text import Text, text
from vllm_memprof.units import format_gib

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
    found += _ranks(report, deployment)
    found += _skew(report)
    found += _matrix(report, deployment, width)
    return found


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


def _hosts(report: Report, deployment: Deployment) -> Section:
    by_label = {rank.label: rank for rank in report.ranks}
    several = len(deployment.groups) > 1
    spares: list[tuple[int | None, HostRow]] = []
    for row in deployment.hosts:
        known = [by_label[label].budget.spare_bytes for label in row.labels]
        spares.append((min((size for size in known if size is not None), default=None), row))
    spares.sort(key=lambda entry: (entry[0] is None, entry[0] or 0))
    shown = spares[:_LISTED_HOSTS]
    rows = []
    told: set[str] = set()  # runs whose reason stands in a row above
    for spare, row in shown:
        ok = row.status in ("ok", "running")
        status: str = STATUS_WORDS.get(row.status, row.status)
        if row.exit_reason and not ok and row.run not in told:
            told.add(row.run)
            status = text("{status}: {reason}", status=status, reason=row.exit_reason)
        cells = [
            row.host or "-",
            *([row.group or "-"] if several else []),
            fold(row.labels) or "-",
            status,
            format_gib(spare),
            _clock(row),
        ]
        rows.append(Row(cells, style=PLAIN if ok else BAD))
    columns = [
        Head(text("Host"), right=False),
        *([Head(text("Engine group"), right=False)] if several else []),
        Head(text("Ranks on it"), right=False),
        Head(text("Status"), right=False),
        Head(modelled(text("Least spare, GiB"), report.run.simulated)),
        Head(text("Clock, s"), right=False),
    ]
    notes: list[str] = [*_clock_notes(deployment)]
    if len(spares) > len(shown):
        notes.append(
            text(
                "{count} more hosts, with more to spare, are in report.json",
                count=len(spares) - len(shown),
            )
        )
    return Section(text("Hosts, the one with the least to spare first"), columns, rows, notes)


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
    rows = []
    cores = deployment.cores
    least: dict[str | None, int | None] = {}
    for core in cores:
        size = core.granted_bytes
        known = least.get(core.group)
        if size is not None and (known is None or size < known):
            least[core.group] = size
    ranked = sorted(cores, key=lambda core: (core.group or "", core.granted_bytes or 0))
    for core in ranked[:_LISTED_HOSTS]:
        rows.append(
            Row(
                [
                    *([core.group or "-"] if several else []),
                    "-" if core.dp_rank is None else f"DP{core.dp_rank}",
                    fold(core.hosts),
                    format_gib(core.granted_bytes, 4),
                    "-" if core.tokens is None else f"{core.tokens:,}",
                    core.least_label or "-",
                ]
            )
        )
    columns = [
        *([Head(text("Engine group"), right=False)] if several else []),
        Head(text("Engine core"), right=False),
        Head(text("Hosts"), right=False),
        Head(text("Granted, GiB")),
        Head(text("Tokens")),
        Head(text("Rank with the least"), right=False),
    ]
    notes: list[str] = []
    for group, size in least.items():
        if several:
            notes.append(text("least of {group}: {size:gib4} GiB", group=group or "-", size=size))
        elif len(cores) > 1:
            notes.append(text("least of all engine cores: {size:gib4} GiB", size=size))
    if several:
        notes.append(text("each group has a budget of its own: their KV caches are not compared"))
    if len(ranked) > _LISTED_HOSTS:
        notes.append(
            text("{count} more engine cores are in report.json", count=len(ranked) - _LISTED_HOSTS)
        )
    return Section(text("KV cache granted by engine core"), columns, rows, notes)


def _ranks(report: Report, deployment: Deployment) -> list[Section]:
    known = [rank for rank in report.ranks if rank.budget.spare_bytes is not None]
    if not known:
        return []
    ranked = sorted(known, key=lambda rank: rank.budget.spare_bytes or 0)
    rows = [
        Row(
            [
                rank.label,
                rank.host or "-",
                format_gib(rank.budget.spare_bytes, 4),
                format_gib(rank.budget.engine_kv_cache_bytes, 4),
                format_gib(rank.budget.fits_device_bytes, 4),
            ],
            style=BAD if (rank.budget.spare_bytes or 0) < 0 else PLAIN,
        )
        for rank in ranked[:_LISTED_RANKS]
    ]
    columns = [
        Head(text("Rank"), right=False),
        Head(text("Host"), right=False),
        Head(modelled(text("Spare"), report.run.simulated)),
        Head(text("Granted")),
        Head(modelled(text("Fits the device"), report.run.simulated)),
    ]
    notes: list[str] = []
    if len(ranked) > _LISTED_RANKS:
        notes.append(
            text(
                "{count} more ranks, with more to spare, are in report.json",
                count=len(ranked) - _LISTED_RANKS,
            )
        )
    if len(known) < len(report.ranks):
        unknown = [rank.label for rank in report.ranks if rank.budget.spare_bytes is None]
        notes.append(text("not known of {labels}", labels=fold(unknown)))
    return [
        Section(
            text("Ranks by what is spare at the serving peak, GiB, the least first"),
            columns,
            rows,
            notes,
        )
    ]


def _skew(report: Report) -> list[Section]:
    found = skew_by_owner(report)
    if not found:
        return []
    rows = [_skew_row(row, report) for row in found[:_LISTED_OWNERS]]
    columns = [
        Head(text("Owner"), right=False),
        Head(text("Between\nranks")),
        Head(text("Least on"), right=False),
        Head(text("Most on"), right=False),
        Head(text("Between\nhosts")),
    ]
    notes: list[str] = [
        text("of the last reading before the shutdown that all ranks have; the largest first"),
        text("between hosts: of the median rank of each host, the highest less the lowest"),
    ]
    if any(row.group for row in found):
        notes.append(text("ranks are compared within their group"))
    if len(found) > _LISTED_OWNERS:
        notes.append(text("{count} more owners differ by less", count=len(found) - _LISTED_OWNERS))
    return [Section(text("Differences of device memory by owner, GiB"), columns, rows, notes)]


def _skew_row(row: OwnerSkew, report: Report) -> Row:
    title = modelled(row.title, report.run.simulated and row.modelled)
    if row.group is not None:
        title = text("{group}: {title}", group=row.group, title=title)
    return Row(
        [
            title,
            format_gib(row.most - row.least, 4),
            row.least_label,
            row.most_label,
            format_gib(row.between_hosts, 4),
        ]
    )


@dataclass(frozen=True)
class _Line:
    """One row of the matrix: a rank, or the slowest rank of a host in each phase."""

    name: str
    host: str
    seconds: dict[str, tuple[float, str]]  # phase -> s, label of the rank


def _matrix(report: Report, deployment: Deployment, width: int) -> list[Section]:
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
    rows = []
    for line in lines:
        cells = [line.name, *([line.host] if by_rank else [])]
        for phase in shown:
            entry = line.seconds.get(phase)
            mark = _SLOWEST if entry is not None and entry == slowest[phase] else ""
            cells.append("-" if entry is None else f"{entry[0]:.2f}{mark}")
        rows.append(Row(cells, style=PLAIN))
    names = {phase: slowest[phase][1] for phase in shown}
    rows.append(
        Row(
            [text("slowest"), *([""] if by_rank else []), *names.values()],
            style=MUTED,
        )
    )
    columns = [
        Head(text("Rank") if by_rank else text("Host"), right=False),
        *([Head(text("Host"), right=False)] if by_rank else []),
        *(Head(phase) for phase in shown),
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
    return [Section(title, columns, rows, notes)]


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
    """Return the seconds of the outermost phases of a rank's start-up, in their order."""
    found: dict[str, float] = {}
    for span in _outermost(rank.phases):
        if span.seconds is not None:
            found[span.phase] = found.get(span.phase, 0.0) + span.seconds
    return found


def _outermost(spans: Iterable[Span]) -> Iterable[Span]:
    """Return the phases of a start-up that lie in no other; those in device_init too."""
    listed = list(spans)
    around = {span.order: span.phase for span in listed}
    return [
        span
        for span in listed
        if span.phase not in _NOT_STARTUP
        and (span.parent is None or around.get(span.parent) == "device_init")
    ]


def summary_of(deployment: Deployment) -> Text:
    """Return how many hosts there are, and their names."""
    names = list(dict.fromkeys(row.host or "-" for row in deployment.hosts))
    return text("{count}: {names}", count=len(names), names=fold(names))
