"""What is known of a run at this moment: events and accounting enter, plain figures leave.

The views and the exporter of metrics show these and nothing else. Pure: no clock, file or process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_memprof.launch.progress import EngineProgress, KvSize, Load, ProcessProgress


@dataclass(frozen=True)
class GrowingOwner:
    """An owner of a rank's memory that grows while the engine serves; None where unknown."""

    owner: str
    bytes_per_hour: float | None
    bytes_per_request: float | None
    hours_until_full: float | None  # of the device, at this rate


@dataclass(frozen=True)
class RankBudget:
    """What accounting says of one rank, when the engine is ready or later; None where unknown."""

    label: str
    pid: int | None
    granted_bytes: int | None
    fits_request_bytes: int | None
    fits_device_bytes: int | None
    headroom_bytes: int | None  # at the serving peak
    owners: Mapping[str, int] = field(default_factory=dict)  # at the last phase edge
    #: Owners that grow; empty: none of those that could be judged. None: none could be yet.
    growth: tuple[GrowingOwner, ...] | None = None


@dataclass(frozen=True)
class RankStatus:
    """One rank now; bytes, None where unknown."""

    process: ProcessProgress
    readings: Mapping[str, int]  # the latest known, by snapshot field
    granted_bytes: int | None
    headroom_bytes: int | None  # at the serving peak: accounting's figure, or less free was sampled
    budget: RankBudget | None

    @property
    def label(self) -> str:
        return self.process.name

    def reading(self, field_name: str) -> int | None:
        """Return the latest reading of a snapshot field."""
        return self.readings.get(field_name)


@dataclass(frozen=True)
class ServingStatus:
    """What the engine cores do, all replicas together; None where it was not sampled."""

    running: int | None
    waiting: int | None
    blocks_used: int | None
    blocks: int | None
    kv_used_bytes: int | None  # on the worker that holds the most
    kv_bytes: int | None
    t_ns: int  # of the oldest of the samples that it is made of


@dataclass(frozen=True)
class Status:
    ranks: list[RankStatus]
    serving: ServingStatus | None  # None: no sample of an engine core
    lost_events: int
    samples: int  # lines of samples, of all processes
    blind: list[str]  # processes that record nothing, each with the reason
    modelled: bool = False  # the profile of a simulated device sets memory outside torch

    @property
    def headroom_bytes(self) -> int | None:
        """The least of all ranks; None where one of them is unknown."""
        return _all_known(min, [rank.headroom_bytes for rank in self.ranks])

    @property
    def growing(self) -> list[tuple[str, GrowingOwner]]:
        """Return (label, owner that grows) of all ranks, the fastest first."""
        found = [
            (rank.label, each)
            for rank in self.ranks
            if rank.budget is not None
            for each in rank.budget.growth or ()
        ]
        return sorted(found, key=lambda pair: -(pair[1].bytes_per_hour or 0))

    @property
    def growth_judged(self) -> bool:
        """Whether the readings of every rank were enough to tell what grows."""
        return bool(self.ranks) and all(
            rank.budget is not None and rank.budget.growth is not None for rank in self.ranks
        )

    def highest(self, field_name: str) -> RankStatus | None:
        """Return the rank with the highest reading; None where no rank has one."""
        known = [rank for rank in self.ranks if rank.reading(field_name) is not None]
        return max(known, key=lambda rank: rank.reading(field_name) or 0, default=None)


def read_status(
    progress: EngineProgress, budgets: Iterable[RankBudget] = (), modelled: bool = False
) -> Status:
    """Return what is known now.

    Args:
        progress: the events so far.
        budgets: accounting's figures, once the engine was ready.
        modelled: the device is simulated.
    """
    by_pid = {budget.pid: budget for budget in budgets if budget.pid is not None}
    ranks = []
    for process in progress.workers:
        budget = None if process.pid is None else by_pid.get(process.pid)
        granted = process.granted_bytes if budget is None else budget.granted_bytes
        headroom = None if budget is None else budget.headroom_bytes
        lowest = process.lowest_free_bytes
        if headroom is not None and lowest is not None:
            headroom = min(headroom, lowest)
        ranks.append(RankStatus(process, dict(process.readings), granted, headroom, budget))
    processes = progress.processes
    return Status(
        ranks,
        _serving(processes),
        lost_events=sum(process.lost_events for process in processes),
        samples=sum(process.samples for process in processes),
        blind=[f"{each.name}: {each.blind_because}" for each in processes if each.blind_because],
        modelled=modelled,
    )


def _serving(processes: list[ProcessProgress]) -> ServingStatus | None:
    cores: list[tuple[Load, KvSize]] = []
    for process in processes:
        load, ended = process.load, process.request_end_t_ns
        if load is None:
            continue
        if not process.open_requests and ended is not None and ended >= load.t_ns:
            load = replace(load, running=0, waiting=0)  # all have ended after the last sample
        cores.append((load, process.plan or KvSize(0, ())))
    if not cores:
        return None
    running, waiting, used, blocks = (
        _all_known(sum, [getattr(load, name) for load, _ in cores])
        for name in ("running", "waiting", "blocks_used", "blocks")
    )
    return ServingStatus(
        running,
        waiting,
        used,
        blocks,
        kv_used_bytes=_all_known(max, [plan.of_blocks(load.blocks_used) for load, plan in cores]),
        kv_bytes=_all_known(max, [plan.of_blocks(plan.blocks) for _, plan in cores]),
        t_ns=min(load.t_ns for load, _ in cores),
    )


def _all_known(of: Callable[[list[int]], int], sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return of(known) if known and len(known) == len(sizes) else None
