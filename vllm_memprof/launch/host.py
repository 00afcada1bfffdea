"""Host memory while a run is under way: what the launcher reads of the cgroup and its processes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path

from vllm_memprof.record.host import HostRecord, in_use, mapped, numbers, read_limits


#: All processes are read again after so long, and at most for this share of the time.
_AGAIN_S, _SHARE = 10.0, 0.02


class HostWatch:
    """Keeps the record of host memory up to date.

    Args:
        record: of the run; limits and asks are in it.
        again: read the processes again while the engine serves.
    """

    def __init__(self, record: HostRecord, again: bool = False) -> None:
        self._record, self._first, self._start_s = record, in_use(), time.monotonic()
        self._again, self._next_s = again, math.inf

    def look(self, pids: Iterable[int]) -> None:
        """Take the last reading, until the kernel kills a process; one of those ids."""
        last, now = self._record.last, in_use()
        grown = {name: size - self._first.get(name, 0) for name, size in now.items()}
        last["kills"] = grown.get("oom_kill", 0)
        if time.monotonic() >= self._next_s and not last["kills"]:
            self._record.later = self._mapped(pids) or self._record.later
        for name in ("memory.current", "memory.usage_in_bytes"):
            if name in now and not last["kills"]:
                sizes = {numbers(Path(f"/proc/{pid}/status")).get("VmRSS", 0): pid for pid in pids}
                size = max(sizes, default=0)
                seconds = int(time.monotonic() - self._start_s)
                last.update(last_bytes=now[name], grown_bytes=grown[name], seconds=seconds,
                            largest_bytes=size, largest=sizes.get(size, 0))  # fmt: skip

    def read(self, pids: Iterable[int]) -> None:
        """Read all processes, because the engine is ready."""
        record = self._record
        record.processes = self._mapped(pids)
        record.cgroup, record.ready = in_use(), read_limits()

    def _mapped(self, pids: Iterable[int]) -> dict[str, dict[str, int]]:
        start_s = time.monotonic()
        found = {name: mapped(name) for name in (*map(str, pids), "self")}
        if self._again:
            now_s = time.monotonic()
            self._next_s = now_s + max(_AGAIN_S, (now_s - start_s) / _SHARE)
        return found
