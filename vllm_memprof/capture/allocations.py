"""Which lines of code allocate what stays: with ``MEMPROF_TRACE_ALLOCATIONS`` only.

Runs in workers (device memory) and engine cores (host memory). Tracing begins when the first
request has ended, and ends after as many more requests as were asked for. What is alive then, and
what was alive after half of them, is written by call stack: what grows in between stays.

- Device: torch's own memory history (``torch.npu.memory._record_memory_history``, or that of CUDA)
  with Python stacks, of at most ``MOST_ENTRIES`` events; blocks alive keep their stack besides. The
  last snapshot is also written as a pickle, which PyTorch's memory viewer opens.
- Host: ``tracemalloc``, which knows what Python allocates, and not what C++ does.
"""

from __future__ import annotations

import os
import pickle
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_memprof.capture.probe import runtime_of
from vllm_memprof.record.host import host_name
from vllm_memprof.record.schema import ALLOCATIONS_DIR

Frame = tuple[str, int, str]  # file, line, function
Stack = tuple[Frame, ...]  # innermost first

#: Events of torch's history: tens of MiB of host memory.
MOST_ENTRIES = 20_000
#: Stacks that an event lists, and frames of each, innermost first.
MOST_STACKS, MOST_FRAMES = 24, 12
#: Frames that tracemalloc keeps of an allocation.
_HOST_FRAMES = 8
_PICKLE_PROTOCOL = 4  # as torch's own _dump_snapshot
_FILE_MODE = 0o600


class Alive(NamedTuple):
    """Live memory of one call stack."""

    blocks: int = 0
    bytes: int = 0


class LiveBlocks:
    """Live blocks of torch's allocator on one device, by the stack that allocated them."""

    memory = "device"

    def __init__(self, history: Any, device: int | None, folder: Path) -> None:
        self._history, self._device, self._folder = history, device, folder
        self._last: dict[str, Any] | None = None
        self.untraced_bytes = 0

    def start(self) -> None:
        self._history._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MOST_ENTRIES
        )

    def alive(self) -> dict[Stack, Alive]:
        self._last = self._history._snapshot()
        self.untraced_bytes = 0
        found: dict[Stack, Alive] = {}
        blocks = (
            block
            for segment in self._last["segments"]
            if self._device in (None, segment.get("device", self._device))
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        )
        for block in blocks:
            size, frames = int(block["size"]), block.get("frames")
            if not frames:
                self.untraced_bytes += size
                continue
            stack = tuple((f["filename"], f["line"], f["name"]) for f in frames[:MOST_FRAMES])
            before = found.get(stack, Alive())
            found[stack] = Alive(before.blocks + 1, before.bytes + size)
        return found

    def stop(self) -> str | None:
        """End the history, and write its last snapshot; return the name of the file."""
        self._history._record_memory_history(None, context=None)
        last, self._last = self._last, None
        if last is None:
            return None
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f"{host_name()}-{os.getpid()}.pickle"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(os.open(path, flags, _FILE_MODE), "wb") as out:
            pickle.dump(last, out, _PICKLE_PROTOCOL)
        return f"{self._folder.name}/{path.name}"


class Host:
    """Live memory of this process that Python allocated, by stack."""

    memory = "host"
    untraced_bytes = None

    def __init__(self) -> None:
        self._started = False

    def start(self) -> None:
        if not tracemalloc.is_tracing():  # the user's own tracing stays as it is
            tracemalloc.start(_HOST_FRAMES)
            self._started = True

    def alive(self) -> dict[Stack, Alive]:
        snapshot = tracemalloc.take_snapshot().filter_traces(
            [
                tracemalloc.Filter(False, tracemalloc.__file__, all_frames=True),
                tracemalloc.Filter(False, __file__, all_frames=True),
            ]
        )
        return {
            tuple((f.filename, f.lineno, "") for f in reversed(each.traceback)): Alive(
                each.count, each.size
            )
            for each in snapshot.statistics("traceback")
        }

    def stop(self) -> str | None:
        if self._started:
            tracemalloc.stop()
        return None


Source = LiveBlocks | Host


@dataclass
class Tracer:
    """Traces one kind of memory of this process over ``asked`` requests, once.

    Attributes:
        source: makes the source when tracing begins, or gives the reason why there is none.
        emit: writes the event.
    """

    asked: int
    source: Callable[[], Source | str]
    emit: Callable[[dict[str, object]], None]
    memory: str

    def __post_init__(self) -> None:
        self._live: Source | None = None
        self._half: dict[Stack, Alive] = {}
        self._half_requests = self._requests = self._begin_ns = 0
        self._over = False

    def request_ended(self, _: str) -> None:
        """Count a request; begin with the first, and write what stays after the last."""
        if self._over:
            return
        if self._live is None:
            source = self.source()
            if isinstance(source, str):
                self._over = True
                self._write({}, source, None, None)
                return
            source.start()
            self._live, self._begin_ns = source, time.monotonic_ns()
            return
        self._requests += 1
        if self._requests == max(self.asked // 2, 1) and self.asked > 1:
            self._half, self._half_requests = self._live.alive(), self._requests
        if self._requests >= self.asked:
            self.close()

    def close(self) -> None:
        """Write what is known, because tracing or the process ends."""
        if self._over:
            return
        self._over = True
        live = self._live
        if live is None:
            self._write({}, "no request had ended when the process did", None, None)
            return
        alive = live.alive()
        untraced = live.untraced_bytes
        self._write(alive, None, live.stop(), untraced)

    def give_up(self) -> None:
        """End the tracing without a result: an error has been recorded."""
        self._over = True
        if self._live is not None:
            with suppress(Exception):
                self._live.stop()

    def _write(
        self,
        alive: dict[Stack, Alive],
        reason: str | None,
        snapshot: str | None,
        untraced: int | None,
    ) -> None:
        rows = [(stack, now, self._half.get(stack, Alive())) for stack, now in alive.items()]
        rows.sort(key=lambda row: (row[2].bytes - row[1].bytes, -row[1].bytes))
        rest = rows[MOST_STACKS:]
        self.emit(
            {
                "memory": self.memory,
                "asked": self.asked,
                "requests": self._requests,
                "half_requests": self._half_requests or None,
                "begin_ns": self._begin_ns or None,
                "stacks": [
                    {
                        "frames": [list(frame) for frame in stack],
                        "blocks": now.blocks,
                        "bytes": now.bytes,
                        "half_blocks": half.blocks,
                        "half_bytes": half.bytes,
                    }
                    for stack, now, half in rows[:MOST_STACKS]
                ],
                "other_stacks": len(rest),
                "other_bytes": sum(now.bytes for _, now, _ in rest),
                "untraced_bytes": untraced,
                "snapshot": snapshot,
                "reason": reason,
            }
        )


def device_source(backend: str | None, device: int | None, run_dir: Path) -> Source | str:
    """Return torch's history of this process, or why it has none."""
    memory = getattr(runtime_of(backend), "memory", None)
    if not hasattr(memory, "_record_memory_history") or not hasattr(memory, "_snapshot"):
        return "torch has no memory history for this device"
    return LiveBlocks(memory, device, run_dir / ALLOCATIONS_DIR)
