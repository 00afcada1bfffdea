"""Host memory by owner: of the process of each rank, and of all processes of a host.

What torch has pinned is part of the anonymous memory of its process, and taken out of it; the
remainder is ``rest``. Where more is pinned than is anonymous the driver keeps it elsewhere. What of
it a connector has is what grew while it registered the KV cache.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from vllm_memprof.accounting.model import HostMemory, HostOwner, RankReport, Report
from vllm_memprof.accounting.readings.run import RunReadings
from vllm_memprof.files import read_own
from vllm_memprof.record.spans import MEASURED, edges_of
from vllm_memprof.units import largest

_TABLE = read_own(__file__, "host.toml")
REST, OFFLOAD = "rest", "pinned:kv_offload"


def host_memory(read: RunReadings, report: Report) -> Report:
    """Add the memory of each host whose launcher has read it, and of each of its ranks."""
    ranks, hosts = list(report.ranks), []
    for part in read.run.parts or [read.run]:
        host, record = part.info.host, part.info.host_memory
        if record is None:
            continue
        at = {str(rank.pid): place for place, rank in enumerate(ranks) if rank.host == host}
        total, grown = Counter[str](), Counter[str]()
        for pid, known in record.processes.items():
            sizes, later = (_by_owner(each) for each in (known, record.later.get(pid, {})))
            more = {owner: later[owner] - sizes[owner] for owner in later | sizes} if later else {}
            if pid in at and sizes:  # nothing is mapped by a process that is ending
                ranks[at[pid]] = _with_pinned(ranks[at[pid]], sizes, more)
            who = "worker" if pid in at else "memprof" if pid == "self" else "other"
            for all_of, own in ((total, sizes), (grown, more)):
                for owner, size in own.items():
                    all_of[f"{REST}:{who}" if owner == REST else owner] += size
        cache, shared, kernel, used = (
            next((record.cgroup[name] for name in names if name in record.cgroup), None)
            for names in _TABLE["cgroup"]
        )
        if cache is not None and shared is not None:
            shm = sum(size for owner, size in total.items() if owner.startswith("shm:"))
            kept = {owner: size for owner, size in total.items() if owner[:5] != "file:"}
            others = {
                "shm:unmapped": shared - shm,
                "file:cache": cache - shared,
                "kernel": kernel or 0,
            }
            total = Counter({**kept, **others})
        rows = [HostOwner(*each, None, grown.get(each[0])) for each in total.items() if each[1]]
        hosts.append(HostMemory(rows, record.ready or record.limits, host, record.asks, used))
    return replace(report, ranks=ranks, host_memory=hosts)


def _by_owner(known: Mapping[str, int]) -> Counter[str]:
    """Return what a process has mapped by its owner."""
    sizes = Counter[str]()
    for what, size in known.items():
        owners = _TABLE["mapped"].items()
        sizes[next(owner for like, owner in owners if re.search(like, what))] += size
    return sizes


def _with_pinned(rank: RankReport, sizes: Counter[str], grown: Mapping[str, int]) -> RankReport:
    """Return a rank with the owners of its process; sizes, grown: as they are mapped."""
    pinned = largest(edge.snapshot.host_pinned_bytes for _, edge in edges_of(rank.phases)) or 0
    offload = 0
    for span in rank.phases:
        if span.phase == "kv_register" and span.after and span.before:
            offload += (span.after.host_pinned_bytes or 0) - (span.before.host_pinned_bytes or 0)
    tensors = sum(
        row.bytes or 0
        for row in rank.connectors
        if (row.place, row.how) == ("host", MEASURED) and row.owner != "pinned_rounding"
    )
    owners = {OFFLOAD: offload, "pinned:other": pinned - offload, **sizes}
    if pinned <= sizes[REST]:
        owners[REST] = sizes[REST] - pinned
    rows = [
        HostOwner(owner, size, tensors if owner == OFFLOAD and tensors else None, grown.get(owner))
        for owner, size in owners.items()
        if size
    ]
    return replace(rank, host_memory=HostMemory(rows))
