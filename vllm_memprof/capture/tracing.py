"""Which lines of code allocate what stays: with ``MEMPROF_TRACE_ALLOCATIONS`` only.

Runs in workers (device memory) and engine cores (host memory). Tracing begins when the first
request has ended, and ends after as many more requests as were asked for. What is alive then, and
what was alive after half of them, is written by call stack: what grows in between stays. An error
ends the tracing, and never the step that it came in.

- Device: torch's own memory history (``torch.npu.memory._record_memory_history``, or that of CUDA)
  with Python stacks, of at most ``MOST_ENTRIES`` events; blocks alive keep their stack besides. The
  last snapshot is also written as a pickle, which PyTorch's memory viewer opens.
- Host: ``tracemalloc``, which knows what Python allocates, and not what C++ does.
"""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vllm_memprof.capture.attributes import Fields, reach
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.capture.sampler import CoreSteps, Sampler
from vllm_memprof.capture.writer import process_name
from vllm_memprof.record.schema import ALLOCATIONS_DIR

#: Live memory by call stack, which has (file, line, function) from the innermost frame outwards:
#: blocks and bytes. Without frames: what was allocated before tracing began.
Alive = dict[tuple[tuple[str, int, str], ...], tuple[int, int]]

#: Events of torch's history: tens of MiB of host memory.
MOST_ENTRIES = 20_000
#: Stacks that an event lists, and frames of each, innermost first.
MOST_STACKS, MOST_FRAMES = 24, 12
#: Frames that tracemalloc keeps of an allocation.
_HOST_FRAMES = 8
_PICKLE_PROTOCOL = 4  # as torch's own _dump_snapshot


class LiveBlocks:
    """Live blocks of torch's allocator on one device, by the stack that allocated them."""

    def __init__(self, history: Any, device: int | None, folder: Path) -> None:
        self._history, self._device, self._folder = history, device, folder
        self._last: Any = None

    def start(self) -> None:
        self._history._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MOST_ENTRIES
        )

    def alive(self) -> Alive:
        self._last = self._history._snapshot()
        found: Alive = {(): (0, 0)}
        here = [each for each in self._last["segments"] if self._device in (None, each["device"])]
        for block in (block for segment in here for block in segment["blocks"]):
            if block["state"] == "active_allocated":
                frames = (block.get("frames") or ())[:MOST_FRAMES]
                stack = tuple((f["filename"], f["line"], f["name"]) for f in frames)
                blocks, total = found.get(stack, (0, 0))
                found[stack] = blocks + 1, total + block["size"]
        return found

    def stop(self) -> str | None:
        """End the history, and write its last snapshot; return the name of the file."""
        self._history._record_memory_history(None, context=None)
        if self._last is None:
            return None
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f"{process_name()}.pickle"
        path.touch(mode=0o600)
        path.write_bytes(pickle.dumps(self._last, _PICKLE_PROTOCOL))
        self._last = None
        return f"{self._folder.name}/{path.name}"


class Host:
    """Live memory of this process that Python allocated, by stack."""

    def start(self) -> None:
        self._is_ours = not tracemalloc.is_tracing()  # the user's own tracing stays as it is
        if self._is_ours:
            tracemalloc.start(_HOST_FRAMES)

    def alive(self) -> Alive:
        ours = [tracemalloc.Filter(False, each, all_frames=True)
                for each in (tracemalloc.__file__, __file__)]  # fmt: skip
        found: Alive = {}
        for each in tracemalloc.take_snapshot().filter_traces(ours).statistics("traceback"):
            stack = tuple((f.filename, f.lineno, "") for f in reversed(each.traceback))
            found[stack] = each.count, each.size
        return found

    def stop(self) -> None:
        if self._is_ours:
            tracemalloc.stop()


Source = LiveBlocks | Host


class Tracer:
    """Traces one kind of memory of this process over requests, once.

    Args:
        recorder: of this process; it knows over how many.
        memory: device | host.
        source: makes the source when tracing begins, or gives the reason why there is none.
    """

    def __init__(self, recorder: Recorder, memory: str, source: Callable[[], Source | str]) -> None:
        self._recorder, self._source = recorder, source
        self._live: Source | None = None
        self._half: Alive = {}
        self._over = False
        self._event: Fields = {
            "memory": memory,
            "asked": recorder.trace_allocations,
            "requests": 0,
            "half_requests": None,
            "reason": "no request had ended when the process did",
        }

    def request_ended(self) -> None:
        """Count a request; begin with the first, and write what stays after the last."""
        event, live = self._event, self._live
        if self._over:
            return
        with self._guarded():
            if live is not None:
                event["requests"] += 1
                if event["requests"] >= event["asked"]:
                    self.close()
                elif event["requests"] == event["asked"] // 2:
                    self._half, event["half_requests"] = live.alive(), event["requests"]
                return
            source = self._source()
            if isinstance(source, str):
                event["reason"] = source
                self.close()
                return
            source.start()
            self._live, event["reason"] = source, None

    def close(self) -> None:
        """Write what is known, because tracing or the process ends."""
        if self._over:
            return
        self._over = True
        event, live = self._event, self._live
        with self._guarded():
            if live is not None:
                alive = live.alive()
                _, untraced = alive.pop((), (0, None))
                rows = [(stack, *now, *self._half.get(stack, (0, 0)))
                        for stack, now in alive.items()]  # fmt: skip
                rows.sort(key=lambda row: (row[4] - row[2], -row[2]))
                names = ("frames", "blocks", "bytes", "half_blocks", "half_bytes")
                event |= {
                    "stacks": [dict(zip(names, row, strict=True)) for row in rows[:MOST_STACKS]],
                    "other_bytes": sum(row[2] for row in rows[MOST_STACKS:]),
                    "untraced_bytes": untraced,
                    "snapshot": live.stop(),
                }
            self._recorder.emit("allocations", **event)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._over = True
            self._recorder.error(f"tracing of {self._event['memory']} allocations", error)
            with suppress(Exception):
                if self._live is not None:
                    self._live.stop()


def trace_device(recorder: Recorder) -> None:
    """Trace device memory over requests of this worker."""

    def source() -> Source | str:
        memory = reach(recorder.probe.runtime, "memory")
        if hasattr(memory, "_record_memory_history") and hasattr(memory, "_snapshot"):
            return LiveBlocks(memory, recorder.probe.device, recorder.run_dir / ALLOCATIONS_DIR)
        return "torch has no memory history for this device"

    _trace(recorder, "device", source, recorder.sampler)


def trace_host(recorder: Recorder) -> None:
    """Trace Python memory over requests of this engine core."""
    _trace(recorder, "host", Host, recorder.sampler.core)


def _trace(
    recorder: Recorder, memory: str, source: Callable[[], Source | str], steps: Sampler | CoreSteps
) -> None:
    if recorder.trace_allocations and memory not in recorder.end_tracing:
        tracer = Tracer(recorder, memory, source)
        recorder.end_tracing[memory] = tracer.close
        steps.on_request_end = tracer.request_ended


def close(recorder: Recorder) -> None:
    """Write what is known, because the process ends."""
    for end in recorder.end_tracing.values():
        end()
