"""Put the times of a run on one axis: monotonic clocks of hosts in, ns since its start out."""

from __future__ import annotations

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.record.spans import edges_of

#: Phases that are one reading: they begin where they end.
MOMENTS = ("oom",)


def host_starts(report: Report) -> dict[str | None, int]:
    """Host -> ns of its monotonic clock that count as the run's start.

    On the launcher's host that is the launch; elsewhere the first reading, because clocks of two
    hosts have nothing in common. Those of a deployment are brought onto one (``host_clocks``).
    """
    begins: dict[str | None, int] = {}
    for rank in report.ranks:
        times = [edge.snapshot.t_ns for _, edge in edges_of(rank.phases) if edge.snapshot.t_ns]
        times += [begin for begin, _ in passages(rank).values()]
        if times:
            begins[rank.host] = min(*times, begins.get(rank.host, times[0]))
    launch, launcher = report.run.start_t_ns, report.run.host
    if report.deployment is None:
        if launch is not None and launch <= begins.get(launcher, -1):
            begins[launcher] = launch
        return begins
    # one moment, as each of the clocks has it: the launch on the first host, or the first reading
    # where that is earlier; a host whose clock nothing tells of starts at its own first reading
    offsets = report.deployment.offsets()
    known = [t_ns - offsets[host] for host, t_ns in begins.items() if host in offsets]
    if launch is not None and launcher in offsets:
        known.append(launch - offsets[launcher])
    return begins | {host: min(known) + offsets[host] for host in begins if host in offsets}


def passages(rank: RankReport) -> dict[int, tuple[int, int | None]]:
    """Return for each span, by its order, when it began and ended, ns; None if never left.

    A passage without any time is left out.
    """
    found: dict[int, tuple[int, int | None]] = {}
    for span in rank.phases:
        begins = span.start_t_ns or (span.before.t_ns if span.before else None)
        ends = span.end_t_ns or (span.after.t_ns if span.after else None)
        if not begins and span.phase in MOMENTS:
            begins = ends
        if begins:
            found[span.order] = (begins, None if span.open or not ends else max(begins, ends))
    return found
