"""Host memory while a run is under way: what the launcher reads of the cgroup and its processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from vllm_memprof.record.host import HostRecord, in_use, mapped, numbers, read_limits

#: Looks that growth is told over.
_LOOKS = 10


class HostWatch:
    """Keeps the record of host memory up to date.

    Args:
        record: of the run; limits and asks are in it.
    """

    def __init__(self, record: HostRecord) -> None:
        self._record, self._kills = record, in_use().get("oom_kill", 0)
        self._uses: deque[tuple[float, int]] = deque(maxlen=_LOOKS)

    def look(self, pids: Iterable[int]) -> None:
        """Take the last reading, until the kernel kills a process; one of those ids."""
        record, use = self._record, in_use()
        record.kills = use.get("oom_kill", 0) - self._kills
        if record.kills or "used" not in use:
            return
        self._uses.append((time.monotonic(), use["used"]))
        (first_s, first), (last_s, record.last_bytes) = self._uses[0], self._uses[-1]
        record.grown_bytes, record.grown_seconds = record.last_bytes - first, last_s - first_s
        resident = {pid: numbers(Path(f"/proc/{pid}/status")).get("VmRSS", 0) for pid in pids}
        if resident:
            largest = max(resident, key=lambda pid: resident[pid])
            record.largest, record.largest_bytes = str(largest), resident[largest]

    def read(self, pids: Iterable[int]) -> None:
        """Read all processes, because the engine is ready."""
        names = (*map(str, pids), "self")
        self._record.processes = {name: mapped(name) for name in names}
        self._record.cgroup, self._record.ready = in_use(), read_limits()
