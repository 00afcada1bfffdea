"""The bytes of every process on a device, as the driver lists them (DCMI).

Runs in worker processes, at start-up edges. The figure of a process is all that it holds, its
context included, so that it gives two rows which no counter gives: the context, and the other
processes on the device. The library is the driver's (``libdcmi.so``); without it, without the right
to ask, or in a container whose process numbers the driver does not know, both are None with the
reason. ``MEMPROF_DCMI=0`` keeps the library out of the engine's processes.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from vllm_memprof.capture.components import loaded_library
from vllm_memprof.capture.driver_list import LIBRARIES, DriverError, DriverList, load_library

#: "0": do not load the driver's management library.
ENV_DCMI = "MEMPROF_DCMI"


class Neighbours:
    """Reads the driver's list of processes.

    The library is loaded and initialised at the first reading.
    """

    def __init__(self) -> None:
        self._driver: DriverList | None = None
        self._reason: str | None = None  # why it is of no use; then it is not tried again
        self._places: dict[int, tuple[int, int]] = {}  # torch's device index -> card, chip

    def read(self, device: int) -> tuple[int | None, dict[str, int] | None, str | None]:
        """Return the bytes of this process and of each other one; two Nones and the reason."""
        if self._reason is not None:
            return None, None, self._reason
        try:
            listed = self._listed(device)
        except DriverError as error:
            self._reason = str(error)
            return None, None, self._reason
        # this process's number on the host where the runtime tells it, else its pid
        host_pid: Any = getattr(loaded_library(), "aclrtDeviceGetBareTgid", None)
        told = ctypes.c_int32()
        known = host_pid is not None and host_pid(ctypes.byref(told)) == 0
        pid = told.value if known else os.getpid()
        others = {str(each): size for each, size in listed}
        own = others.pop(str(pid), None)
        if own is None:
            reason = f"the driver does not list process {pid}: "
            return None, None, reason + "it may have another number on the host"
        return own, others, None

    def _listed(self, device: int) -> list[tuple[int, int]]:
        if self._driver is None:
            if os.environ.get(ENV_DCMI) == "0":
                raise DriverError(f"{ENV_DCMI}=0")
            library = load_library()
            if library is None:
                raise DriverError(f"no {LIBRARIES[0]} here: the driver's management library")
            self._driver = DriverList(library)
        if device not in self._places:
            self._places[device] = self._driver.place(_logic_id(device))
        return self._driver.processes(self._places[device])


def _logic_id(device: int) -> int:
    """Return the driver's number of a device, after ``ASCEND_RT_VISIBLE_DEVICES``."""
    function: Any = getattr(loaded_library(), "aclrtGetLogicDevIdByUserDevId", None)
    logic = ctypes.c_int32()
    if function is not None and function(ctypes.c_int32(device), ctypes.byref(logic)) == 0:
        return logic.value
    visible = [part.strip() for part in os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")]
    return int(visible[device]) if device < len(visible) and visible[device].isdigit() else device
