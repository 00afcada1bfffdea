"""Reading memory, and only reading: a device index enters, a snapshot leaves. Worker processes.

No reading initialises a device, synchronises, empties a cache or resets a peak. What the allocator
keeps (allocated, reserved, peaks) is host-side bookkeeping and exact at any moment; free and total
come from the driver. While a stream is capturing a graph only the counters are read.

What lies outside torch is read from the runtime's counters, and at start-up edges from the driver's
list of processes (owners.py). The readings of one snapshot have to belong together: where the
device's free memory moved while they were taken, they are taken again, twice at most.

Cost, on the simulated device: about 7 µs for the allocator's counters, 1.5 µs for free and total (a
driver call on hardware), 80 µs for the workspace with 50 segments of 300 blocks, growing with the
number of blocks.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vllm_memprof.capture.attributes import Fields, reach
from vllm_memprof.capture.driver_list import DriverError
from vllm_memprof.capture.owners import Owners
from vllm_memprof.record.schema import SNAPSHOT_FIELDS, SNAPSHOT_OBJECTS
from vllm_memprof.record.segments import divide, pools_of
from vllm_memprof.units import minus

#: Device -> package of torch that has its runtime as an attribute of that name, and ``_C``.
PACKAGES = {"npu": "torch_npu", "cuda": "torch"}
#: Readings of one snapshot while the device's free memory moves under them.
_MOST_READINGS = 3
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: The runtime's counter that torch's own segments are part of.
_APP = "APP"
_OUTSIDE_TORCH = (
    "non_torch_bytes",
    "npu_workspace_bytes",
    "npu_workspace_streams",
    "other_processes_bytes",
    "other_processes",
    "components",
)
#: A reading as it is written: keys and units of ``record.schema``, and ``read_again``, the readings
#: that were dropped because free memory moved under them. Values are bytes or None; ``components``
#: has bytes and peak_bytes by counter of the runtime, ``npu_workspace_streams`` and
#: ``other_processes`` bytes by stream and by process.
_NAMES = (*SNAPSHOT_FIELDS, *SNAPSHOT_OBJECTS, "read_again")


def detect_backend() -> str:
    """Return the device of this process by its imports; "" where torch has only CPUs."""
    if "torch_npu" in sys.modules:
        return "npu"
    return "cuda" if reach(sys.modules.get("torch"), "version.cuda") else ""


@dataclass
class Probe:
    """Readings of one process, with the peaks kept across the engine's own peak resets.

    Attributes:
        backend: of ``PACKAGES``; "": none.
        device: the worker's device index; None means the current device of the calling thread.
        unmapped_bytes: what reserved counts and the device does not hold (sleep mode); None before
            the first sleep.
        unmapped_known: whether that is so; else its size is unknown, and so is non-torch memory.
        on_unread: called with what and why of a reading that this process does not get.
    """

    backend: str = field(default_factory=detect_backend)
    device: int | None = None
    unmapped_bytes: int | None = None
    unmapped_known: bool = True
    on_unread: Callable[..., None] = lambda what, reason: None
    owners: Owners = field(default_factory=Owners)
    _run_peaks: Counter[str] = field(default_factory=Counter)

    def torch(self, path: str) -> Any:
        """Return what torch's package for the device has at a path; None: nothing."""
        return reach(sys.modules.get(PACKAGES.get(self.backend, "")), path)

    @property
    def runtime(self) -> Any:
        """``torch.npu`` or ``torch.cuda``; None where there is none."""
        return self.torch(self.backend)

    def function(self, name: str) -> Any:
        """Return a C function below it; None where there is none."""
        return self.torch(f"_C._{self.backend}_{name}")

    def is_ready(self) -> bool:
        """Return whether the device is initialised in this process already."""
        runtime = self.runtime
        return runtime is not None and bool(runtime.is_initialized())

    @property
    def index(self) -> int:
        return int(self.function("getDevice")()) if self.device is None else self.device

    def counters(self) -> Fields:
        """Read the allocator's counters of a device that is ready."""
        stats = self.function("memoryStats")(self.index)
        figures: Fields = {
            "t_ns": time.monotonic_ns(),
            "alloc_retries": stats.get("num_alloc_retries"),
            "ooms": stats.get("num_ooms"),
        }
        for kind in ("allocated", "reserved"):
            known = stats[f"{kind}_bytes"]["all"]
            self._run_peaks[kind] = max(self._run_peaks[kind], known["peak"])
            figures |= {
                f"{kind}_bytes": known["current"],
                f"{kind}_peak_bytes": known["peak"],
                f"{kind}_run_peak_bytes": self._run_peaks[kind],
                f"{kind}_total_bytes": known.get("allocated"),  # handed out so far
            }
        return figures

    def snapshot(self, workspace: bool = False, owners: bool = True, free: bool = True) -> Fields:
        """Read the memory of this process and its device.

        Args:
            workspace: also read the operator workspace from the allocator's segments, and the
                driver's list of processes (start-up only: the cost of the first grows with the
                number of blocks).
            owners: also read the runtime's counters, one call.
            free: also read the device's free memory. Without it the reading is safe inside a
                failing allocation: torch_npu's own observer reads the runtime's counters at the
                same place (``OptionsManager.cpp::oom_observer``).

        Returns:
            The snapshot as JSON: counters alone while a graph is captured, and the figures of the
            host alone where the device is not initialised.
        """
        t_ns = time.monotonic_ns()
        figures: Fields = {}
        if self.is_ready():
            if not free:
                figures = self.counters() | self._outside_torch(False)
            elif self.runtime.is_current_stream_capturing():
                figures = self.counters()
            else:
                figures = self._whole(workspace, owners)
        known = {name: figures.get(name) for name in _NAMES}
        resident, shared = host_memory()
        known |= {"t_ns": t_ns, "host_rss_bytes": resident, "host_shared_bytes": shared}
        return known

    def _whole(self, workspace: bool, owners: bool) -> Fields:
        """Read the figures of one moment: while free memory stands still, if it does."""
        index, npu = self.index, self.backend == "npu"
        for again in range(_MOST_READINGS):
            free, total = self.runtime.mem_get_info(index)
            figures = self.counters() | {
                "device_free_bytes": free,
                "device_total_bytes": total,
                "unmapped_bytes": self.unmapped_bytes,
                "read_again": again,
            }
            reserved = figures["reserved_bytes"]
            if self.unmapped_known:
                figures["non_torch_bytes"] = total - free - reserved + (self.unmapped_bytes or 0)
                if workspace and npu:
                    with suppress(Exception):  # a private interface: absent, it costs some figures
                        figures |= divide(self.runtime.memory_snapshot(), index, reserved)
            if owners:
                figures |= self._outside_torch(workspace)
                figures["host_pinned_bytes"] = self._pinned()
            if not (owners or workspace) or self.runtime.mem_get_info(index)[0] == free:
                break
        return figures

    def _pinned(self) -> int | None:
        """Read the blocks of the allocator of pinned memory; None before torch 2.7 or so."""
        with suppress(Exception):  # a private interface
            size: int = self.function("hostMemoryStats")()["allocated_bytes"]["current"]
            return size
        return None

    def _outside_torch(self, processes: bool) -> Fields:
        """Read the owners of memory outside torch, as far as runtime and driver know them."""
        figures: Fields = {}
        readings = {"components": self.owners.components}
        if processes:
            readings["processes"] = self.owners.processes
        for what, read in readings.items() if self.backend == "npu" else ():
            try:
                figures |= read(self.index)
            except DriverError as error:
                self.on_unread(what=what, reason=str(error))
        return figures

    def pools(self, reserved: int | None, requested: int | None) -> list[Fields] | None:
        """Read the allocator's segments, which it keeps on the host, by pool and stream."""
        if reserved is None:
            return None
        return pools_of(self.runtime.memory_snapshot(), self.index, reserved, requested)


def with_later(snapshot: Fields, later: Fields) -> Fields:
    """Return a snapshot with the figures of a later one for memory outside torch.

    Free, the process's own figure and the counter that holds torch's segments follow the reserved
    memory of the snapshot, so that its figures still add up; that counter's peak is the one of the
    snapshot.
    """
    total, reserved = snapshot["device_total_bytes"], snapshot["reserved_bytes"]
    non_torch = later["non_torch_bytes"]
    if None in (total, reserved, non_torch):
        return snapshot
    since = later["reserved_bytes"] - reserved
    moved = {
        **snapshot,
        **{name: later[name] for name in _OUTSIDE_TORCH},
        "device_free_bytes": total - reserved + (snapshot["unmapped_bytes"] or 0) - non_torch,
        "process_bytes": minus(later["process_bytes"], since),
        "read_again": (snapshot["read_again"] or 0) + (later["read_again"] or 0),
    }
    if app := (later["components"] or {}).get(_APP):
        size = app["bytes"] - since
        peak = ((snapshot["components"] or {}).get(_APP) or app)["peak_bytes"]
        own = {_APP: {"bytes": size, "peak_bytes": max(peak, size)}}
        moved["components"] = {**later["components"], **own}
    return moved


def host_memory() -> tuple[int | None, int | None]:
    """Return the resident set of this process, and what of it is of files or shared."""
    with suppress(OSError), open("/proc/self/statm", "rb", buffering=0) as file:
        sizes = [int(pages) * _PAGE_BYTES for pages in file.read().split()]
        return sizes[1], sizes[2]
    return None, None
