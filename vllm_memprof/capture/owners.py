"""What lies outside torch, by owner: the runtime's counters, and the driver's list of processes.

Runs in worker processes.

The counters are what each module of the runtime holds for this process (CANN 9.1:
``acl_rt.h::aclrtGetMemUsageInfo``; A2, A3 and 310P). Nothing is loaded for them, and the user-space
driver keeps them, so that asking does not reach the device. Names are the driver's module names.
APP is all that was asked of ``aclrtMalloc``: torch's segments, its operator workspace, ATB's pool,
whatever else the process allocates. HCCL is the communicators' buffers, RUNTIME the runtime's own:
streams, task buffers, captured graphs.

The driver (DCMI) lists the bytes of every process on a device, its context included, at start-up
edges: that gives two rows which no counter gives, the context and the other processes. Without its
library, without the right to ask, or in a container whose process numbers the driver does not know,
both are unknown. ``MEMPROF_DCMI=0`` keeps the library out of the engine's processes.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from vllm_memprof.capture.attributes import Fields
from vllm_memprof.capture.driver_list import DriverError, DriverList

#: "0": do not load the driver's management library.
ENV_DCMI = "MEMPROF_DCMI"
_RUNTIME = "libascendcl.so"
_COUNTERS = "aclrtGetMemUsageInfo"
_CAPACITY = 96  # rows asked for; the driver knows fewer modules


class _Row(ctypes.Structure):
    """``aclrtMemUsageInfo``."""

    _fields_ = (
        ("name", ctypes.c_char * 32),
        ("current", ctypes.c_uint64),
        ("peak", ctypes.c_uint64),
        ("reserved", ctypes.c_size_t * 8),
    )


class Owners:
    """Reads both for a device of torch's index; each returns the figures of a snapshot.

    Raises:
        DriverError: why there is no such reading.
    """

    def __init__(self) -> None:
        self._function: Any = None
        self._rows, self._count = (_Row * _CAPACITY)(), ctypes.c_size_t()
        self._driver: DriverList | None = None
        self._refusal: str | None = None  # of the driver, which is then not asked again

    def components(self, device: int) -> Fields:
        """Return the counters of this process; a module that never held anything has none."""
        self._function = self._function or getattr(loaded_library(), _COUNTERS, None)
        if self._function is None:
            raise DriverError(f"no {_COUNTERS} here: {_RUNTIME} is of an older CANN, or not loaded")
        self._count.value = 0
        status = self._function(
            ctypes.c_int32(device),
            self._rows,
            ctypes.c_size_t(_CAPACITY),
            ctypes.byref(self._count),
        )
        if status != 0:
            raise DriverError(f"{_COUNTERS} returned {status}")
        listed = min(self._count.value, _CAPACITY)  # the count may exceed what was asked for
        return {
            "components": {
                row.name.decode(errors="replace"): {"bytes": row.current, "peak_bytes": row.peak}
                for row in self._rows[:listed]
            }
        }

    def processes(self, device: int) -> Fields:
        """Return the bytes of this process and of all others on its device."""
        try:
            listed = self._listed(device)
        except DriverError as error:
            self._refusal = str(error)
            raise
        # this process's number on the host where the runtime tells it, else its pid
        pid = _told("aclrtDeviceGetBareTgid")
        others = {str(each): size for each, size in listed}
        own = others.pop(str(os.getpid() if pid is None else pid), None)
        if own is None:
            raise DriverError(
                f"the driver does not list process {pid or os.getpid()}: "
                "it may have another number on the host"
            )
        return {
            "process_bytes": own,
            "other_processes_bytes": sum(others.values()),
            "other_processes": others,
        }

    def _listed(self, device: int) -> list[tuple[int, int]]:
        if self._refusal is not None:
            raise DriverError(self._refusal)
        if self._driver is None:
            if os.environ.get(ENV_DCMI) == "0":
                raise DriverError(f"{ENV_DCMI}=0")
            self._driver = DriverList()
        logic_id = _told("aclrtGetLogicDevIdByUserDevId", ctypes.c_int32(device))
        if logic_id is None:
            visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")
            known = visible[device].strip() if device < len(visible) else ""
            logic_id = int(known) if known.isdigit() else device
        return self._driver.processes(self._driver.place(logic_id))


def loaded_library(name: str = _RUNTIME) -> ctypes.CDLL | None:
    """Return a library that this process has loaded already; it is never loaded for the asking."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):  # AttributeError: a platform without RTLD_NOLOAD
        return None


def _told(function: str, *arguments: Any) -> int | None:
    """Return the number that a function of the runtime gives; None: it does not."""
    ask: Any = getattr(loaded_library(), function, None)
    found = ctypes.c_int32()
    known = ask is not None and ask(*arguments, ctypes.byref(found)) == 0
    return found.value if known else None
