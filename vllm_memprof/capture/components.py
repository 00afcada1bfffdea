"""The bytes that each module of the runtime holds for this process: ``aclrtGetMemUsageInfo``.

Runs in worker processes. Nothing is loaded for it: where libascendcl is not loaded yet, or is too
old to export the function, the reading is None with the reason. The counters are the calling
process's own, kept by the user-space driver, so that asking does not reach the device. (CANN 9.1:
``acl_rt.h::aclrtGetMemUsageInfo``; A2, A3 and 310P)

Names are the driver's module names. APP is all that was asked of ``aclrtMalloc``: torch's segments,
its operator workspace, ATB's pool, whatever else the process allocates. HCCL is the communicators'
buffers, RUNTIME the runtime's own: streams, task buffers, captured graphs.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

_LIBRARY = "libascendcl.so"
_FUNCTION = "aclrtGetMemUsageInfo"
_CAPACITY = 96  # rows asked for; the driver knows fewer modules


class _Row(ctypes.Structure):
    """``aclrtMemUsageInfo``."""

    _fields_ = (
        ("name", ctypes.c_char * 32),
        ("current", ctypes.c_uint64),
        ("peak", ctypes.c_uint64),
        ("reserved", ctypes.c_size_t * 8),
    )


class Counters:
    """Reads the counters of this process; keeps the function and the rows between readings."""

    def __init__(self) -> None:
        self._function: Any = None
        self._rows = (_Row * _CAPACITY)()
        self._count = ctypes.c_size_t()

    def read(self, device: int) -> tuple[dict[str, dict[str, int]] | None, str | None]:
        """Read the counters of one device.

        Args:
            device: torch's index of a device that this process has a context on.

        Returns:
            ``{name: {"bytes": current, "peak_bytes": peak}}`` and None, or None and the reason. A
            module that never held anything is not listed.
        """
        if self._function is None:
            library = loaded_library()
            if library is None:
                return None, f"{_LIBRARY} is not loaded in this process"
            self._function = getattr(library, _FUNCTION, None)
            if self._function is None:
                return None, f"{_LIBRARY} does not export {_FUNCTION}: an older CANN"
            count = ctypes.c_size_t
            rows, found = ctypes.POINTER(_Row), ctypes.POINTER(count)
            self._function.argtypes = ctypes.c_int32, rows, count, found
        self._count.value = 0
        status = self._function(device, self._rows, _CAPACITY, ctypes.byref(self._count))
        if status != 0:
            return None, f"{_FUNCTION} returned {status}"
        listed = min(self._count.value, _CAPACITY)  # the count may exceed what was asked for
        return {
            row.name.decode(errors="replace"): {"bytes": row.current, "peak_bytes": row.peak}
            for row in self._rows[:listed]
        }, None


def loaded_library(name: str = _LIBRARY) -> ctypes.CDLL | None:
    """Return a library that this process has loaded already; it is never loaded for the asking."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):  # AttributeError: a platform without RTLD_NOLOAD
        return None
