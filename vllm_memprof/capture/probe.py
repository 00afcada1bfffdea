"""Reading memory, and only reading: a device index enters, a snapshot leaves. Worker processes.

Runs in worker processes.

No reading initialises a device, synchronises, empties a cache or resets a peak. What the allocator
keeps (allocated, reserved, peaks) is host-side bookkeeping and exact at any moment; free and total
come from the driver. While a stream is capturing a graph only the counters are read.

What lies outside torch is read from the runtime's counters (components.py), and at start-up edges
from the driver's list of processes (neighbours.py). The readings of one snapshot have to belong
together: where the device's free memory moved while they were taken, they are taken again, twice at
most.

Cost, on the simulated device: about 7 µs for the allocator's counters, 1.5 µs for free and total (a
driver call on hardware), 80 µs for the workspace with 50 segments of 300 blocks, growing with the
number of blocks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.components import Counters
from vllm_memprof.capture.neighbours import Neighbours
from vllm_memprof.capture.segments import divide, pools_of
from vllm_memprof.capture.snapshot import SnapshotDict
from vllm_memprof.record.schema import SNAPSHOT_FIELDS, SNAPSHOT_OBJECTS

NOT_INITIALISED = "the device is not initialised in this process"
#: A snapshot as JSON in which nothing is known. (Built by hand: dataclasses.asdict costs more than
#: the reading.)
_UNKNOWN: SnapshotDict = dict.fromkeys(("t_ns", *SNAPSHOT_FIELDS, *SNAPSHOT_OBJECTS))
CAPTURING = "a graph is being captured: counters only"
#: Readings of one snapshot while the device's free memory moves under them.
_MOST_READINGS = 3
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM_BYTES = 256  # more than seven numbers
ASLEEP_UNKNOWN = "sleep mode: how much of reserved is not on the device is unknown, so non-torch is"


@dataclass(frozen=True)
class Backend:
    """How one device runtime is read. All figures in bytes."""

    name: str
    is_ready: Callable[[], bool]  # already initialised in this process; never initialises
    is_capturing: Callable[[], bool]
    current_device: Callable[[], int]
    stats: Callable[
        [int], Mapping[str, Any]
    ]  # nested: {"reserved_bytes": {"all": {"current": ...}}}
    mem_info: Callable[[int], tuple[int, int]]  # free, total
    #: Of the allocator, with their blocks; None: it does not tell.
    segments: Callable[[], list[Mapping[str, Any]]] | None
    device_name: Callable[[int], str | None]
    package: str = "torch"  # has the runtime as an attribute of its name, and ``_C``
    #: CANN's: by module, and the driver's by process; its segments include operator workspace.
    has_counters: bool = False
    #: Returns the C function under ``stats``, for one who calls it in every step of a device that
    #: is ready; None: ``stats`` is the only way.
    bare_stats: Callable[[], Callable[[int], Mapping[str, Any]]] | None = None


def _backend(name: str, package: str, **own: Any) -> Backend:
    """Return a backend with what all of them have in common."""

    def runtime() -> Any:
        return runtime_of(name)

    return Backend(
        name=name,
        package=package,
        is_ready=lambda: runtime() is not None and bool(runtime().is_initialized()),
        is_capturing=lambda: bool(runtime().is_current_stream_capturing()),
        mem_info=lambda device: runtime().mem_get_info(device),
        device_name=lambda device: str(runtime().get_device_name(device)),
        **own,
    )


def _c_module(package: str) -> Any:
    return sys.modules[package]._C


def _cuda() -> Any:
    return sys.modules["torch"].cuda


BACKENDS = {
    "npu": _backend(
        "npu",
        "torch_npu",
        current_device=lambda: int(_c_module("torch_npu")._npu_getDevice()),
        stats=lambda device: dict(_c_module("torch_npu")._npu_memoryStats(device)),
        bare_stats=lambda: _c_module("torch_npu")._npu_memoryStats,
        segments=lambda: list(_c_module("torch_npu")._npu_memorySnapshot()["segments"]),
        has_counters=True,
    ),
    "cuda": _backend(
        "cuda",
        "torch",
        current_device=lambda: int(_cuda().current_device()),
        stats=lambda device: dict(_cuda().memory_stats_as_nested_dict(device)),
        bare_stats=lambda: _c_module("torch")._cuda_memoryStats,
        segments=lambda: list(_cuda().memory_snapshot()),
    ),
}


def runtime_of(name: str | None) -> Any:
    """Return torch's module of a backend (``torch.npu``, ``torch.cuda``); None where there is none.

    Args:
        name: of the backend; None: of none.
    """
    package = sys.modules.get(BACKENDS[name].package) if name in BACKENDS else None
    return getattr(package, name or "", None)


def detect_backend() -> Backend | None:
    """Return the backend of this process by its imports; None where torch has only CPUs."""
    if "torch_npu" in sys.modules:
        return BACKENDS["npu"]
    if reach(sys.modules.get("torch"), "version.cuda"):
        return BACKENDS["cuda"]
    return None


@dataclass
class Probe:
    """Readings of one process, with the peaks kept across the engine's own peak resets.

    Attributes:
        backend: None until one is known.
        device: the worker's device index; None means the current device of the calling thread.
        unmapped_bytes: what reserved counts and the device does not hold (sleep mode); None before
            the first sleep.
        unread: (what, reason) of readings that this process does not get, until the recorder writes
            them.
    """

    backend: Backend | None = None
    device: int | None = None
    unmapped_bytes: int | None = None
    unread: list[tuple[str, str]] = field(default_factory=list)
    _unmapped_known: bool = True
    _run_peaks: dict[tuple[int, str], int] = field(default_factory=dict)
    _modules: Counters = field(default_factory=Counters)
    _neighbours: Neighbours = field(default_factory=Neighbours)
    _told: set[tuple[str, str]] = field(default_factory=set)

    @property
    def backend_name(self) -> str | None:
        return None if self.backend is None else self.backend.name

    def set_unmapped(self, size: int | None) -> None:
        """Set how many bytes of the allocator's pools are not mapped now; None: unknown."""
        self.unmapped_bytes, self._unmapped_known = size, size is not None

    def is_ready(self) -> bool:
        return self.backend is not None and self.backend.is_ready()

    def snapshot(
        self, workspace: bool = False, owners: bool = True
    ) -> tuple[SnapshotDict, str | None]:
        """Read the memory of this process and its device.

        Args:
            workspace: also read the operator workspace from the allocator's segments, and the
                driver's list of processes (start-up only: the cost of the first grows with the
                number of blocks).
            owners: also read the runtime's counters, one call.

        Returns:
            The snapshot as JSON and None, or a snapshot that lacks something and the reason.
            ``read_again`` counts the readings that were dropped because the device's free memory
            moved under them; it is not there without.
        """
        backend = self.backend
        if backend is None or not backend.is_ready():
            return self.host_only(), NOT_INITIALISED
        t_ns = time.monotonic_ns()
        rss = host_rss_bytes()
        device = self._device(backend)
        if backend.is_capturing():
            figures = self._counters(backend, device)
            reason: str | None = CAPTURING
        else:
            figures = self._whole(backend, device, workspace, owners)
            reason = None if self._unmapped_known else ASLEEP_UNKNOWN
        return {**_UNKNOWN, "t_ns": t_ns, "host_rss_bytes": rss, **figures}, reason

    def _whole(self, backend: Backend, device: int, workspace: bool, owners: bool) -> SnapshotDict:
        """Read the figures of one moment: while free memory stands still, if it does."""
        for again in range(_MOST_READINGS):
            free, total = backend.mem_info(device)
            figures = self._counters(backend, device)
            reserved, unmapped = figures["reserved_bytes"], self.unmapped_bytes
            figures["device_free_bytes"], figures["device_total_bytes"] = int(free), int(total)
            figures["unmapped_bytes"] = unmapped
            if self._unmapped_known and reserved is not None:
                figures["non_torch_bytes"] = int(total) - int(free) - reserved + (unmapped or 0)
                if workspace and backend.segments is not None and backend.has_counters:
                    with suppress(Exception):  # a private interface: absent, it costs some figures
                        figures |= divide(backend.segments(), device, reserved)
            if owners and backend.has_counters:
                figures |= self._owners(device, workspace)
            if again:
                figures["read_again"] = again
            if not (owners or workspace) or int(backend.mem_info(device)[0]) == int(free):
                break
        return figures

    def _owners(self, device: int, processes: bool) -> SnapshotDict:
        """Read the owners of memory outside torch, as far as runtime and driver know them."""
        components, reason = self._modules.read(device)
        self._tell("components", reason)
        figures: SnapshotDict = {"components": components}
        if processes:
            own, others, reason = self._neighbours.read(device)
            self._tell("processes", reason)
            total = None if others is None else sum(others.values())
            figures["process_bytes"] = own
            figures["other_processes_bytes"] = total
            figures["other_processes"] = others
        return figures

    def _tell(self, what: str, reason: str | None) -> None:
        if reason is not None and (what, reason) not in self._told:
            self._told.add((what, reason))
            self.unread.append((what, reason))

    def host_only(self) -> SnapshotDict:
        """Return a snapshot that leaves the device alone."""
        return {**_UNKNOWN, "t_ns": time.monotonic_ns(), "host_rss_bytes": host_rss_bytes()}

    def counters_only(self) -> SnapshotDict:
        """Read the counters of allocator and runtime alone: safe inside a failing allocation.

        torch_npu's own observer reads the runtime's counters at the same place
        (``OptionsManager.cpp::oom_observer``).
        """
        figures = SnapshotDict()
        if self.backend is not None and self.backend.is_ready():
            device = self._device(self.backend)
            figures = self._counters(self.backend, device)
            if self.backend.has_counters:
                figures |= self._owners(device, processes=False)
        return {**_UNKNOWN, "t_ns": time.monotonic_ns(), **figures}

    def pools(self, reserved: int | None, requested: int | None) -> list[dict[str, object]] | None:
        """Read the allocator's segments, which it keeps on the host, by pool and stream."""
        backend = self.backend
        if backend is None or backend.segments is None or reserved is None:
            return None
        return pools_of(backend.segments(), self._device(backend), reserved, requested)

    def fold_peaks(self, device: int | None = None) -> None:
        """Keep the present peaks, because the engine is about to reset them."""
        if self.backend is not None and self.backend.is_ready():
            self._counters(self.backend, self._device(self.backend) if device is None else device)

    def reset(self) -> None:
        """Forget what belongs to another process (after a fork)."""
        self.device = None
        self.unmapped_bytes, self._unmapped_known = None, True
        self._run_peaks.clear()
        self.unread.clear()
        self._told.clear()
        self._modules, self._neighbours = Counters(), Neighbours()

    def _device(self, backend: Backend) -> int:
        return backend.current_device() if self.device is None else self.device

    def _counters(self, backend: Backend, device: int) -> SnapshotDict:
        stats = backend.stats(device)
        figures: SnapshotDict = {}
        for kind in ("allocated", "reserved"):
            known = stats.get(f"{kind}_bytes", {}).get("all", {})
            peak, run_peak = known.get("peak"), self._run_peaks.get((device, kind))
            if peak is not None:
                run_peak = self._run_peaks[device, kind] = max(run_peak or 0, peak)
            figures[f"{kind}_bytes"] = known.get("current")
            figures[f"{kind}_peak_bytes"] = peak
            figures[f"{kind}_run_peak_bytes"] = run_peak
        figures["alloc_retries"] = stats.get("num_alloc_retries")
        figures["ooms"] = stats.get("num_ooms")
        return figures


def host_rss_bytes() -> int | None:
    """Resident set of this process from ``/proc``, None where there is none."""
    with HostMemory() as host:
        return host.read()[0]


class HostMemory:
    """``/proc/self/statm``, kept open: opening it costs five times as much as reading it.

    It is of the process that opened it: a forked child needs its own.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        with suppress(OSError):
            self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[int | None, int | None]:
        """Return (resident set, what of it is of files or shared), None where it is not known."""
        if self._fd is None:
            return None, None
        try:
            _, resident, shared, _ = os.pread(self._fd, _STATM_BYTES, 0).split(None, 3)
            return int(resident) * _PAGE_BYTES, int(shared) * _PAGE_BYTES
        except (OSError, ValueError):
            return None, None

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
