"""The driver's management interface (DCMI): devices, what is used of each, and by which processes.

Standard library alone, and nothing of memprof: worker processes import it, and ``memprof who`` runs
it as a program of its own, so that a driver that hangs or crashes takes nobody with it. Nothing
here opens a device or takes memory of one. Sources: Ascend HDK, "DCMI API Reference"; the
structures are those of its ``dcmi_interface_api.h``. Process ids are those of the host. The process
list has 32 rows at most, in bytes; memory of the device is told in MiB (the reference writes MB:
65,536 of a 64 GiB part).

    python driver_list.py     prints one JSON object: a row per device, or the reason for none
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from typing import Any

LIBRARIES = ("libdcmi.so", "/usr/local/dcmi/libdcmi.so")
#: Processes that the driver lists at most: a list of so many may leave some out.
LISTED_AT_MOST = 32
#: The driver's unit where it tells the memory of a device.
STEP_BYTES = 1 << 20
_CAPACITY = 128
_MOST_DEVICES = 64
_MEMORY = ("dcmi_get_device_hbm_info", "dcmi_get_device_memory_info_v3")


class DriverError(Exception):
    """A call that the driver refused, or that its library lacks."""


class Process(ctypes.Structure):
    """``struct dcmi_proc_mem_info``."""

    _fields_ = (("pid", ctypes.c_int), ("bytes", ctypes.c_ulong))


class _Hbm(ctypes.Structure):
    """``struct dcmi_hbm_info``: sizes in MiB; temperature and bandwidth are not read."""

    _fields_ = (
        ("size", ctypes.c_ulonglong),
        ("frequency", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("rest", ctypes.c_ubyte * 8),
    )


class _Ddr(ctypes.Structure):
    """``struct dcmi_get_memory_info_stru`` of devices without HBM (310P): sizes in MiB; frequency,
    huge pages, utilization and a reserve of 60 bytes are not read."""

    _fields_ = (
        ("size", ctypes.c_ulonglong),
        ("available", ctypes.c_ulonglong),
        ("rest", ctypes.c_ubyte * 96),
    )


def load_library() -> Any:
    """Return the driver's library.

    Raises:
        DriverError: there is none.
    """
    for name in LIBRARIES:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name)
            if hasattr(library, "dcmi_get_device_resource_info"):
                return library
    raise DriverError(f"no {LIBRARIES[0]} here: the driver's management library")


class DriverList:
    """Asks the driver's library, which is loaded and initialised here.

    Raises:
        DriverError: it refuses; so do the methods.
    """

    def __init__(self) -> None:
        self._library = load_library()
        self._rows = (Process * _CAPACITY)()
        self._ask("dcmi_init")

    def _ask(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverError(f"{name} is not in the library")
        status = function(*arguments)
        if status != 0:
            raise DriverError(f"{name} returned {status}")

    def place(self, logic_id: int) -> tuple[int, int]:
        """Return the card of a device, by the driver's number, and the chip on that card."""
        card, chip, number = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint(logic_id)
        name = "dcmi_get_card_id_device_id_from_logicid"
        self._ask(name, ctypes.byref(card), ctypes.byref(chip), number)
        return card.value, chip.value

    def processes(self, place: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the pid and the bytes of every process that is listed for a chip."""
        count = ctypes.c_int(0)
        self._ask("dcmi_get_device_resource_info", *place, self._rows, ctypes.byref(count))
        return [(row.pid, row.bytes) for row in self._rows[: min(count.value, _CAPACITY)]]

    def memory(self, place: tuple[int, int]) -> tuple[int, int]:
        """Return the bytes of a chip in all and in use, both in steps of ``STEP_BYTES``."""
        reasons = []
        for name, info in zip(_MEMORY, (_Hbm(), _Ddr()), strict=True):
            try:
                self._ask(name, *place, ctypes.byref(info))
                if not info.size:
                    raise DriverError(f"{name} tells no size")
            except DriverError as error:
                reasons.append(str(error))
                continue
            used = info.used if isinstance(info, _Hbm) else info.size - info.available
            return info.size * STEP_BYTES, used * STEP_BYTES
        raise DriverError("; ".join(reasons))


def read_all() -> dict[str, object]:
    """Return a row per device: ``device`` (the driver's number), ``card``, ``chip``, ``processes``,
    ``total_bytes``, ``used_bytes``, ``reasons``; what the driver does not tell is None."""
    devices: list[dict[str, Any]] = []
    try:
        driver = DriverList()
        for device in range(_MOST_DEVICES):
            place = driver.place(device)
            row: dict[str, Any] = {"device": device, "card": place[0], "chip": place[1],
                                   "processes": None, "total_bytes": None, "used_bytes": None,
                                   "reasons": []}  # fmt: skip
            devices.append(row)
            try:
                row["processes"] = driver.processes(place)
            except DriverError as error:
                row["reasons"].append(str(error))
            try:
                row["total_bytes"], row["used_bytes"] = driver.memory(place)
            except DriverError as error:
                row["reasons"].append(str(error))
    except DriverError as error:
        if not devices:  # else it has no further one
            return {"reason": str(error)}
    return {"reason": None, "devices": devices}


if __name__ == "__main__":
    print(json.dumps(read_all()))
