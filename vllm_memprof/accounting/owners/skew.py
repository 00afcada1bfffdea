"""Which owner of device memory makes the ranks and the hosts of a deployment differ."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.readings.quantities import TORCH_ROWS
from vllm_memprof.record.spans import AFTER, UNEXPLAINED, Edge, last_of
from vllm_memprof.text import Text, text
from vllm_memprof.units import MIB

#: Less than this is no difference.
_LEAST_BYTES = MIB
#: Phases after which ranks are compared, the latest first.
_MOMENTS = ("warm_up", "graph_capture", "kv_cache_alloc", "weight_load", "device_init")
_COMMUNICATOR = "communicator:"
_TITLES = {
    "weights": text("weights"),
    "experts": text("weights with the experts of the rank"),
    "kv_cache": text("KV cache"),
    "torch_rest": text("rest of torch's segments"),
    "communicators": text("communicators"),
    "contexts_of_ranks": text("contexts of other ranks on the device"),
    "neighbours": text("other processes on the device"),
    UNEXPLAINED: text("unexplained"),
}
_MEASURED = ("weights", "experts", "kv_cache", "torch_rest")


@dataclass(frozen=True)
class OwnerSkew:
    """One owner whose bytes differ between ranks."""

    owner: str
    title: Text | str
    group: str | None  # whose ranks are compared; None: there is one group
    least: int
    least_label: str
    most: int
    most_label: str
    between_hosts: int  # of the median rank of each host, the highest less the lowest

    @property
    def modelled(self) -> bool:
        """Whether the profile of a simulated device sets it."""
        return self.owner not in _MEASURED


def skew_by_owner(report: Report) -> list[OwnerSkew]:
    """Return the owners that differ between ranks, the largest difference first."""
    pids: dict[str | None, set[str]] = {}
    for rank in report.ranks:
        pids.setdefault(rank.host, set()).add(str(rank.pid))
    groups: dict[str | None, list[RankReport]] = {}
    for rank in report.ranks:
        groups.setdefault(rank.group, []).append(rank)
    rows = []
    for group, ranks in groups.items():
        # the latest phase of a start-up that every rank has come through
        passed = (phase for phase in _MOMENTS if all(_end(rank, phase) for rank in ranks))
        moment = next(passed, None)
        if moment is None or len(ranks) < 2:
            continue
        held = [(rank, _held(rank, moment, pids[rank.host])) for rank in ranks]
        for owner in dict.fromkeys(name for _, sizes in held for name in sizes):
            known = [(rank, sizes[owner]) for rank, sizes in held if owner in sizes]
            least = min(known, key=lambda entry: entry[1])
            most = max(known, key=lambda entry: entry[1])
            if most[1] - least[1] < _LEAST_BYTES:
                continue
            hosts: dict[str | None, list[int]] = {}
            for rank, size in known:
                hosts.setdefault(rank.host, []).append(size)
            middle = [median_low(each) for each in hosts.values()]
            rows.append(
                OwnerSkew(
                    owner,
                    _TITLES.get(owner, owner.replace("_", " ")),
                    group if len(groups) > 1 else None,
                    least[1],
                    least[0].label,
                    most[1],
                    most[0].label,
                    max(middle) - min(middle),
                )
            )
    return sorted(rows, key=lambda row: row.least - row.most)


def _end(rank: RankReport, phase: str) -> Edge | None:
    span = last_of(rank.phases, phase)
    return None if span is None or AFTER not in span.owners else span.edges[-1]


def _held(rank: RankReport, phase: str, pids: set[str]) -> dict[str, int]:
    """Return what a rank's device held by owner."""
    edge = _end(rank, phase)
    assert edge is not None
    assert edge.owners is not None
    held: dict[str, int] = {}
    weights, torch = rank.figure("weights_bytes"), 0
    granted = rank.figure("kv_cache_bytes") if phase in _MOMENTS[:3] else 0
    for row in edge.owners.rows:
        if row.bytes is None or row.component == "free":
            continue
        if row.component in TORCH_ROWS:
            torch += row.bytes
        elif row.component.startswith(_COMMUNICATOR):
            held["communicators"] = held.get("communicators", 0) + row.bytes
        elif row.component == "other_processes":
            others = edge.snapshot.other_processes or {}
            own = sum(size for pid, size in others.items() if pid in pids)
            held["contexts_of_ranks"] = own
            held["neighbours"] = row.bytes - own
        else:
            held[row.component] = row.bytes
    if edge.owners.unexplained_bytes is not None:
        held[UNEXPLAINED] = edge.owners.unexplained_bytes
    if weights is not None and granted is not None:
        # expert parallelism divides the experts: ranks may hold different numbers of them
        held["weights" if rank.ep_rank is None else "experts"] = weights
        held["kv_cache"] = granted
        torch -= weights + granted
    return held | {"torch_rest": torch}
