"""Bring the monotonic clocks of hosts onto that of the first: runs enter, offsets leave.

No rank leaves a collective that blocks before every rank has entered it. With a and b the clocks of
two hosts, enter_b <= exit_a and enter_a <= exit_b in true time: each gives a bound of the offset.
The set-up of the process groups (``hccl_init``) blocks: its rendezvous and its barriers wait for
every rank. The first collective of a communicator does not bound anything: it is queued, the call
returns before the other ranks have entered theirs, on the simulated device too
(``sim/native/communicator.cpp``). It says which ranks share a world.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from vllm_memprof.accounting.model import COLLECTIVES, FIRST, UNKNOWN, WALL, HostClock
from vllm_memprof.record.deployment import wall_of
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.units import minus

#: Phases in which every rank of a world waits for all others.
_BLOCKING = ("hccl_init",)
#: A world of ranks that set up their process groups together, the phase, the number of passages.
_Key = tuple[str | None, int | None, str, int]


@dataclass(frozen=True)
class _CollectiveTimes:
    """When the ranks of one host were in one blocking collective, ns of its clock."""

    enters: tuple[int, ...]
    exits: tuple[int, ...]


@dataclass(frozen=True)
class _Bound:
    """What one collective says of b's clock less a's."""

    least: int
    most: int
    guess: int
    phase: str
    ranks: int


def host_clocks(runs: Sequence[Run]) -> dict[str | None, HostClock]:
    """Return each host's clock against that of the first host.

    Args:
        runs: the parts of a deployment, the first host's first. Groups share no collective.
    """
    walls: dict[str | None, int] = {}
    passages: dict[_Key, dict[str | None, _CollectiveTimes]] = {}
    for run in runs:
        for host in run.hosts:
            ahead = wall_of(run, host)
            if ahead is not None:
                walls.setdefault(host, ahead)
    for key, host, passage in _passages(runs):
        known = passages.setdefault(key, {})
        if host in known:
            old = known[host]
            passage = _CollectiveTimes(old.enters + passage.enters, old.exits + passage.exits)
        known[host] = passage
    hosts = list(dict.fromkeys(host for run in runs for host in run.hosts))
    if not hosts:
        return {}
    first = hosts[0]
    found: dict[str | None, HostClock] = {}
    for start in hosts:  # of each set of hosts that share collectives, the first
        if start in found:
            continue
        found[start] = (
            HostClock(FIRST, 0, 0, 0, 0, 0)
            if start == first
            else _by_wall(walls.get(first), walls.get(start))
        )
        near = [start]
        while near:
            known_host = near.pop(0)
            for host in hosts:
                bounds = [
                    _Bound(
                        least=max(right.enters) - min(left.exits),
                        most=min(right.exits) - max(left.enters),
                        guess=round(median(right.exits) - median(left.exits)),
                        phase=key[2],
                        ranks=len(left.enters) + len(right.enters),
                    )
                    for key, by_host in passages.items()
                    if host not in found
                    and (left := by_host.get(known_host)) is not None
                    and (right := by_host.get(host)) is not None
                ]
                if bounds:
                    via = found[known_host]
                    found[host] = _clock(via, bounds, walls.get(first), walls.get(host))
                    near.append(host)
    return found


def _passages(runs: Sequence[Run]) -> Iterator[tuple[_Key, str | None, _CollectiveTimes]]:
    """Yield each passage of a rank through a blocking phase, keyed by world, phase and number."""
    workers = [(run, each) for run in runs for each in run.processes if each.is_worker]
    across = {run.info.group for run, each in workers if _shares_replicas(each)}
    for run, process in workers:
        who = process.identity
        replica = None if run.info.group in across else who.dp_rank or 0
        counts: dict[str, int] = {}
        for span in process.phases:
            if span.phase not in _BLOCKING:
                continue
            number = counts.get(span.phase, 0)
            counts[span.phase] = number + 1
            if span.start_t_ns is None or span.end_t_ns is None or span.error is not None:
                continue
            key = (run.info.group, replica, span.phase, number)
            yield key, who.host, _CollectiveTimes((span.start_t_ns,), (span.end_t_ns,))


def _shares_replicas(process: ProcessRecord) -> bool:
    """Whether the data-parallel replicas are one world: a communicator holds ranks of several."""
    size = process.identity.world_size
    groups = (span.detail.get("ranks") for span in process.phases if span.phase == "communicator")
    return any(
        isinstance(rank, int) and rank >= size
        for ranks in groups
        if size and isinstance(ranks, list)
        for rank in ranks
    )


def _clock(
    via: HostClock, bounds: Sequence[_Bound], wall_first: int | None, wall: int | None
) -> HostClock:
    """Return a clock by its bounds against another host's, whose own is known."""
    least, most = max(each.least for each in bounds), min(each.most for each in bounds)
    if least > most or via.offset_ns is None:
        return replace(_by_wall(wall_first, wall), contradict=least > most)
    guess = min(max(round(median(each.guess for each in bounds)), least), most)
    offset = via.offset_ns + guess
    walls = minus(wall, wall_first)
    ahead = None if walls is None else offset + walls
    if via.least_ns is None or via.most_ns is None:  # itself by its wall clock
        return HostClock(WALL, offset, wall_ahead_ns=ahead)
    least, most = via.least_ns + least, via.most_ns + most
    differs = None if walls is None else max(0, least + walls, -most - walls)
    phases = list(dict.fromkeys(each.phase for each in bounds))
    ranks = max(each.ranks for each in bounds)
    return HostClock(COLLECTIVES, offset, least, most, ahead, differs, phases, ranks)


def _by_wall(first: int | None, wall: int | None) -> HostClock:
    offset = minus(first, wall)
    return HostClock(UNKNOWN, None) if offset is None else HostClock(WALL, offset, wall_ahead_ns=0)
