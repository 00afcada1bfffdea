"""Host memory by owner: of the process of each rank, and of all processes of a host.

What is pinned follows from the tensors of an object (``host_owner`` events): torch takes blocks of
2^n bytes for them (ATen/core/CachingHostAllocator.h::allocate, torch 2.10). It is taken out of the
anonymous memory of its process, the remainder is ``rest``; negative where the driver keeps pinned
memory elsewhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from vllm_memprof.accounting.model import DERIVED, MEASURED, HostMemory, HostOwner, Report
from vllm_memprof.accounting.readings.run import RunReadings
from vllm_memprof.files import read_table
from vllm_memprof.record.host import HostRecord
from vllm_memprof.record.loader import Identity, ProcessRecord, Run
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import edges_of

_TABLE = read_table(Path(__file__).with_name("host.toml"))
REST = "rest"


def block_bytes(size: int) -> int:
    """Return the bytes of the pinned block that torch takes for a size."""
    return 1 << max(size - 1, 0).bit_length()


def host_memory(read: RunReadings, report: Report) -> Report:
    """Add the host memory of each rank, and of each host whose launcher has read it."""
    parts = [part for part in read.run.parts or [read.run] if part.info.host_memory is not None]
    records = {part.info.host: part.info.host_memory or HostRecord() for part in parts}
    ranks = []
    for rank, (_, process) in zip(report.ranks, read.workers, strict=True):
        record = records.get(process.identity.host, HostRecord())
        rows = _rows(process, record.processes.get(str(process.identity.pid), {}))
        ranks.append(replace(rank, host_memory=HostMemory(rows, record.limits)))
    hosts = [_of_host(part, records[part.info.host]) for part in parts]
    return replace(report, ranks=ranks, host_memory=hosts)


def _rows(process: ProcessRecord, known: Mapping[str, int]) -> list[HostOwner]:
    """Return the owners of a process: as mapped when it was ready, else by its last reading."""
    edges = [edge.snapshot for _, edge in edges_of(process.phases)]
    read = max(edges, key=lambda at: at.t_ns or 0, default=Snapshot())
    sizes, tensors = _mapped(known), Counter[str]()
    if not sizes and read.host_rss_bytes and read.host_shared_bytes:
        sizes = Counter({"shm:all": read.host_shared_bytes})
        sizes[REST] = read.host_rss_bytes - read.host_shared_bytes
    blocks = {each.owner: sum(map(block_bytes, each.sizes)) for each in process.host_owners}
    other = (read.host_pinned_bytes or 0) - sum(blocks.values())
    for each in process.host_owners if sizes else ():
        pinned = each.pinned or other >= 0  # as the counter tells, which knows no owners
        kind = f"{'pinned' if pinned else 'host'}:{each.owner.partition('.')[0]}"
        size = blocks[each.owner] if pinned else sum(each.sizes)
        sizes.update({kind: size, REST: -size})
        tensors[kind] += sum(each.sizes)
    if sizes and other > 0:
        sizes.update({"pinned:other": other, REST: -other})
    return _owners(sizes, tensors)


def _owners(sizes: Mapping[str, int], tensors: Mapping[str, int]) -> list[HostOwner]:
    return [
        HostOwner(
            kind, size, DERIVED if kind in tensors or REST in kind else MEASURED, tensors.get(kind)
        )
        for kind, size in sizes.items()
        if size
    ]


def _mapped(known: Mapping[str, int]) -> Counter[str]:
    """Return what is mapped by owner."""
    sizes = Counter[str]()
    for what, size in known.items():
        found = (owner for pattern, owner in _TABLE["mapped"].items() if re.search(pattern, what))
        sizes.update(dict.fromkeys(islice(found, 1), size))
    return sizes


def _of_host(run: Run, record: HostRecord) -> HostMemory:
    """Return the memory of all processes of a host; files as the cgroup counts them."""
    by_pid = {str(each.identity.pid): each for each in run.processes}
    sizes, tensors = Counter[str](), Counter[str]()
    for pid, known in record.processes.items():
        process = by_pid.get(
            pid, ProcessRecord("", Identity(role="memprof" if pid == "self" else "other"))
        )
        for row in _rows(process, known):
            name = f"{REST}:{process.identity.role}" if row.owner == REST else row.owner
            sizes[name] += row.bytes
            tensors.update({} if row.tensor_bytes is None else {name: row.tensor_bytes})
    stat = {
        what: next((record.cgroup[name] for name in names if name in record.cgroup), 0)
        for what, names in _TABLE["cgroup"].items()
    }
    if record.cgroup:
        shared = sum(size for name, size in sizes.items() if name.startswith("shm:"))
        for name in [name for name in sizes if name.startswith("file:")]:
            del sizes[name]  # pages that another cgroup read first are charged to that
        sizes["shm:unmapped"] = stat["shared"] - shared
        sizes["file:cache"] = stat["cache"] - stat["shared"]
        sizes["kernel"] = stat["kernel"]
    used, limits = record.cgroup.get("used"), record.ready or record.limits
    return HostMemory(_owners(sizes, tensors), limits, run.info.host, record.asks, used)
