"""The runtime's counters in a snapshot, by module of the runtime."""

from __future__ import annotations

from vllm_memprof.record.schema import Snapshot
from vllm_memprof.units import Amount, minus

#: Counters of aclrtGetMemUsageInfo that are divided further; any other is an owner of its own.
APP, HCCL, RUNTIME = "APP", "HCCL", "RUNTIME"


def torch_bytes(snapshot: Snapshot) -> Amount:
    """Return the bytes of torch's segments: reserved, less what sleep mode has unmapped."""
    if snapshot.reserved_bytes is None:
        return None
    return snapshot.reserved_bytes - (snapshot.unmapped_bytes or 0)


def counter(snapshot: Snapshot, name: str) -> Amount:
    """Return a counter of the runtime, bytes; 0 if it is not listed, None if none was read."""
    if snapshot.components is None:
        return None
    return snapshot.components.get(name, {}).get("bytes", 0)


def counted_bytes(snapshot: Snapshot) -> Amount:
    """Return the sum of all counters of the runtime, bytes; None if none was read."""
    if snapshot.components is None:
        return None
    return sum(figures.get("bytes", 0) for figures in snapshot.components.values())


def app_outside_torch(snapshot: Snapshot) -> Amount:
    """Return the process's allocations besides torch's segments and operator workspace, bytes."""
    outside = minus(counter(snapshot, APP), torch_bytes(snapshot))
    return minus(outside, snapshot.npu_workspace_bytes)
