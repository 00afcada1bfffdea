"""Which owner of device memory makes the ranks and the hosts of a deployment differ."""

from __future__ import annotations

from collections import defaultdict
from statistics import median_low
from typing import NamedTuple

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.readings.quantities import TORCH_ROWS
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.record.spans import AFTER, UNEXPLAINED, Edge, last_of
from vllm_memprof.units import MIB

#: Less than this is no difference.
_LEAST_BYTES = MIB
#: Phases after which ranks are compared, the latest first.
_MOMENTS = ("warm_up", "graph_capture", "kv_cache_alloc", "weight_load", "device_init")
_MEASURED = ("weights", "experts", "kv_cache", "torch_rest")


class OwnerSkew(NamedTuple):
    """One owner whose bytes differ between ranks."""

    owner: str
    title: str
    group: str | None  # whose ranks are compared; None: there is one group
    least: int
    least_label: str
    most: int
    most_label: str
    between_hosts: int  # of the median rank of each host, the highest - the lowest

    @property
    def modelled(self) -> bool:
        """Whether the profile of a simulated device sets it."""
        return self.owner not in _MEASURED


def skew_by_owner(report: Report) -> list[OwnerSkew]:
    """Return the owners that differ between ranks, the largest difference first."""
    pids: dict[str | None, set[str]] = defaultdict(set)
    groups: dict[str | None, list[RankReport]] = defaultdict(list)
    for rank in report.ranks:
        pids[rank.host].add(str(rank.pid))
        groups[rank.group].append(rank)
    rows = []
    for group, ranks in groups.items():
        by_owner: dict[str, list[tuple[int, RankReport]]] = defaultdict(list)
        for rank, edge, serves in _compared(ranks):
            for owner, size in _held(rank, edge, serves, pids[rank.host]).items():
                by_owner[owner].append((size, rank))
        for owner, held in by_owner.items():
            least, most = (pick(held, key=lambda each: each[0]) for pick in (min, max))
            if most[0] - least[0] < _LEAST_BYTES:
                continue
            hosts: dict[str | None, list[int]] = defaultdict(list)
            for size, rank in held:
                hosts[rank.host].append(size)
            middle = [median_low(each) for each in hosts.values()]
            rows.append(
                OwnerSkew(
                    owner,
                    TITLES["skew"].get(owner, owner.replace("_", " ")),
                    group if len(groups) > 1 else None,
                    least[0],
                    least[1].label,
                    most[0],
                    most[1].label,
                    max(middle) - min(middle),
                )
            )
    return sorted(rows, key=lambda row: row.least - row.most)


def _compared(ranks: list[RankReport]) -> list[tuple[RankReport, Edge, bool]]:
    """Return the end of the latest phase of a start-up that every rank has come through.

    The third of each says whether the KV cache stands by then.
    """
    for phase in _MOMENTS if len(ranks) > 1 else ():
        spans = [last_of(rank.phases, phase) for rank in ranks]
        ends = [span.edges[-1] for span in spans if span is not None and AFTER in span.owners]
        if len(ends) == len(ranks):
            serves = phase in _MOMENTS[:3]
            return [(rank, end, serves) for rank, end in zip(ranks, ends, strict=True)]
    return []


def _held(rank: RankReport, edge: Edge, serves: bool, pids: set[str]) -> dict[str, int]:
    """Return what a rank's device held by owner."""
    assert edge.owners is not None
    held: dict[str, int] = defaultdict(int)
    torch = 0
    for row in edge.owners.rows:
        if row.bytes is None or row.component == "free":
            continue
        if row.component in TORCH_ROWS:
            torch += row.bytes
        elif row.component.startswith("communicator:"):
            held["communicators"] += row.bytes
        elif row.component == "other_processes":
            others = edge.snapshot.other_processes or {}
            own = sum(size for pid, size in others.items() if pid in pids)
            held |= {"contexts_of_ranks": own, "neighbours": row.bytes - own}
        else:
            held[row.component] = row.bytes
    if edge.owners.unexplained_bytes is not None:
        held[UNEXPLAINED] = edge.owners.unexplained_bytes
    weights, granted = rank.figure("weights_bytes"), rank.figure("kv_cache_bytes") if serves else 0
    if weights is not None and granted is not None:
        # expert parallelism divides the experts: ranks may hold different numbers of them
        held |= {"weights" if rank.ep_rank is None else "experts": weights, "kv_cache": granted}
        torch -= weights + granted
    return held | {"torch_rest": torch}
