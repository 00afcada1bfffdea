"""The bytes of every process on a device, as the driver lists them (DCMI).

Runs in worker processes, at start-up edges. The figure of a process is all that it holds, its
context included, so that it gives two rows which no counter gives: the context, and the other
processes on the device. The library is the driver's (``libdcmi.so``); without it, without the right
to ask, or in a container whose process numbers the driver does not know, both are None with the
reason. ``MEMPROF_DCMI=0`` keeps the library out of the engine's processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

from vllm_memprof.capture.components import loaded_library

#: "0": do not load the driver's management library.
ENV_DCMI = "MEMPROF_DCMI"

_LIBRARIES = ("libdcmi.so", "/usr/local/dcmi/libdcmi.so")
_CAPACITY = 128  # processes; the driver lists 32 at most


class _Process(ctypes.Structure):
    """``struct dcmi_proc_mem_info``."""

    _fields_ = (("pid", ctypes.c_int), ("bytes", ctypes.c_ulong))


class Neighbours:
    """Reads the driver's list of processes.

    The library is loaded and initialised at the first reading.
    """

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._reason: str | None = None  # why it is of no use; then it is not tried again
        self._places: dict[int, tuple[int, int]] = {}  # torch's device index -> card, device on it
        self._rows = (_Process * _CAPACITY)()

    def read(self, device: int) -> tuple[int | None, dict[str, int] | None, str | None]:
        """Return the bytes of this process and of each other one; two Nones and the reason."""
        library = self._ready()
        place = None if library is None else self._place(library, device)
        if library is None or place is None:
            return None, None, self._reason
        count = ctypes.c_int(0)
        status = library.dcmi_get_device_resource_info(
            place[0], place[1], self._rows, ctypes.byref(count)
        )
        if status != 0:
            return None, None, self._give_up(f"dcmi_get_device_resource_info returned {status}")
        # this process's number on the host where the runtime tells it, else its pid
        host_pid: Any = getattr(loaded_library(), "aclrtDeviceGetBareTgid", None)
        told = ctypes.c_int32()
        known = host_pid is not None and host_pid(ctypes.byref(told)) == 0
        own_pid, own = told.value if known else os.getpid(), None
        others: dict[str, int] = {}
        for row in self._rows[: min(count.value, _CAPACITY)]:
            if row.pid == own_pid:
                own = int(row.bytes)
            else:
                others[str(row.pid)] = int(row.bytes)
        if own is None:
            reason = f"the driver does not list process {own_pid}: "
            return None, None, reason + "it may have another number on the host"
        return own, others, None

    def _ready(self) -> ctypes.CDLL | None:
        if self._library is not None or self._reason is not None:
            return self._library if self._reason is None else None
        if os.environ.get(ENV_DCMI) == "0":
            self._give_up(f"{ENV_DCMI}=0")
            return None
        library = _load()
        if library is None:
            self._give_up(f"no {_LIBRARIES[0]} here: the driver's management library")
            return None
        status = library.dcmi_init()
        if status != 0:
            self._give_up(f"dcmi_init returned {status}")
            return None
        self._library = library
        return library

    def _place(self, library: ctypes.CDLL, device: int) -> tuple[int, int] | None:
        if device not in self._places:
            card, on_card = ctypes.c_int(), ctypes.c_int()
            logic_id = ctypes.c_uint(_logic_id(device))
            function = library.dcmi_get_card_id_device_id_from_logicid
            status = function(ctypes.byref(card), ctypes.byref(on_card), logic_id)
            if status != 0:
                name = "dcmi_get_card_id_device_id_from_logicid"
                self._give_up(f"{name} returned {status} for {logic_id.value}")
                return None
            self._places[device] = (card.value, on_card.value)
        return self._places[device]

    def _give_up(self, reason: str) -> str:
        self._reason = reason
        return reason


def _load() -> ctypes.CDLL | None:
    for name in _LIBRARIES:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name)
            if hasattr(library, "dcmi_get_device_resource_info"):
                return library
    return None


def _logic_id(device: int) -> int:
    """Return the driver's number of a device, after ``ASCEND_RT_VISIBLE_DEVICES``."""
    function: Any = getattr(loaded_library(), "aclrtGetLogicDevIdByUserDevId", None)
    logic = ctypes.c_int32()
    if function is not None and function(ctypes.c_int32(device), ctypes.byref(logic)) == 0:
        return logic.value
    visible = [part.strip() for part in os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")]
    return int(visible[device]) if device < len(visible) and visible[device].isdigit() else device
