"""Bring the monotonic clocks of hosts onto that of the first: runs enter, offsets leave.

No rank leaves a collective that blocks before every rank has entered it. With a and b the clocks of
two hosts, enter_b <= exit_a and enter_a <= exit_b in true time: each gives a bound of the offset.
The set-up of the process groups (``hccl_init``) blocks: its rendezvous and its barriers wait for
every rank. The first collective of a communicator does not bound anything: it is queued, the call
returns before the other ranks have entered theirs, on the simulated device too
(``sim/native/communicator.cpp``). It says which ranks share a world.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from vllm_memprof.accounting.model import COLLECTIVES, FIRST, UNKNOWN, WALL, HostClock
from vllm_memprof.record.deployment import wall_of
from vllm_memprof.record.loader import Run
from vllm_memprof.units import Amount, minus

#: The phase in which every rank of a world waits for all others.
BLOCKING = "hccl_init"
#: A world of ranks that set up their process groups together, and the number of the passage.
_Key = tuple[str | None, Amount, int]
#: When ranks entered a blocking collective and left it, by host, ns of its clock.
_Passages = dict[str | None, list[tuple[int, int]]]


class _Bound(NamedTuple):
    """What one collective says of b's clock less a's."""

    least: int
    most: int
    guess: int


def host_clocks(runs: Sequence[Run]) -> dict[str | None, HostClock]:
    """Return each host's clock against that of the first host.

    Args:
        runs: the parts of a deployment, the first host's first. Groups share no collective.
    """
    walls: dict[str | None, int] = {}
    for run in runs:
        for host in run.hosts:
            ahead = wall_of(run, host)
            if ahead is not None:
                walls.setdefault(host, ahead)
    passages = list(_passages(runs).values())
    hosts = list(dict.fromkeys(host for run in runs for host in run.hosts))
    found: dict[str | None, HostClock] = {}
    wall = walls.get(hosts[0]) if hosts else None
    for host in hosts:
        # the first host that it shares a collective with; without one its wall clock tells
        together = (via for via in found if any({via, host} <= set(each) for each in passages))
        via = next(together, host)
        if via != host:
            bounds = []
            for each in passages:
                if {via, host} <= set(each):
                    enters, exits = zip(*each[via], strict=True)
                    other_enters, other_exits = zip(*each[host], strict=True)
                    least, most = max(other_enters) - min(exits), min(other_exits) - max(enters)
                    guess = round(median(other_exits) - median(exits))
                    bounds.append(_Bound(least, most, guess))
            found[host] = _clock(found[via], bounds, wall, walls.get(host))
        elif found:
            found[host] = _by_wall(wall, walls.get(host))
        else:
            found[host] = HostClock(FIRST, 0, 0, 0, 0, 0)
    return found


def _passages(runs: Sequence[Run]) -> dict[_Key, _Passages]:
    """Return each passage of the ranks through a blocking phase, by world and number."""
    workers = [(run.info.group, each) for run in runs for each in run.workers]
    across = set()  # groups whose replicas are one world: a communicator has ranks of several
    for group, process in workers:
        size = process.identity.world_size
        for span in process.phases if size else ():
            ranks = span.listed("ranks") if span.phase == "communicator" else None
            for rank in ranks or ():
                if isinstance(rank, int) and rank >= (size or 0):
                    across.add(group)
    found: dict[_Key, _Passages] = defaultdict(lambda: defaultdict(list))
    for group, process in workers:
        who = process.identity
        replica = None if group in across else who.dp_rank or 0
        through = [span for span in process.phases if span.phase == BLOCKING]
        for number, span in enumerate(through):
            if span.start_t_ns is not None and span.end_t_ns is not None and span.error is None:
                times = found[group, replica, number][who.host]
                times.append((span.start_t_ns, span.end_t_ns))
    return found


def _clock(via: HostClock, bounds: Sequence[_Bound], wall_first: Amount, wall: Amount) -> HostClock:
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
    return HostClock(COLLECTIVES, offset, least, most, ahead, differs)


def _by_wall(first: Amount, wall: Amount) -> HostClock:
    offset = minus(first, wall)
    return HostClock(UNKNOWN, None) if offset is None else HostClock(WALL, offset, wall_ahead_ns=0)
