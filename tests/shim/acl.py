"""The ACL runtime through ctypes, for the child processes of the tests. Imports nothing but the
standard library."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

HUGE_FIRST, HUGE_ONLY, NORMAL_ONLY = 0, 1, 2
H2H, H2D, D2H, D2D = 0, 1, 2, 3
OUT_OF_MEMORY = 207001
NO_CONTEXT = 107002
UNSUPPORTED = 200006

lib = ctypes.CDLL(str(Path(os.environ["LD_LIBRARY_PATH"].split(":")[0]) / "libascendcl.so"))
lib.aclGetRecentErrMsg.restype = ctypes.c_char_p
lib.aclrtGetSocName.restype = ctypes.c_char_p


class AclError(Exception):
    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: {code}: {message()}")
        self.code = code


def message() -> str:
    return bytes(lib.aclGetRecentErrMsg() or b"").decode()


def error_of(name: str, *arguments: Any) -> int:
    """Calls a function that returns an ACL code, and gives the code; `message` then says why."""
    code: int = getattr(lib, name)(*arguments)
    return code


def call(name: str, *arguments: Any) -> None:
    """Calls a function that returns an ACL code; raises AclError."""
    code = error_of(name, *arguments)
    if code != 0:
        raise AclError(name, code)


def set_device(device: int = 0) -> None:
    call("aclrtSetDevice", device)


def malloc(size_bytes: int, policy: int = HUGE_FIRST, function: str = "aclrtMallocAlign32") -> int:
    pointer = ctypes.c_void_p()
    call(function, ctypes.byref(pointer), ctypes.c_size_t(size_bytes), policy)
    assert pointer.value
    return pointer.value


def free(pointer: int) -> None:
    call("aclrtFree", ctypes.c_void_p(pointer))


def mem_info() -> tuple[int, int]:
    """(free, total) in bytes."""
    free_bytes, total_bytes = ctypes.c_size_t(), ctypes.c_size_t()
    call("aclrtGetMemInfo", 1, ctypes.byref(free_bytes), ctypes.byref(total_bytes))
    return free_bytes.value, total_bytes.value


def used() -> int:
    free_bytes, total_bytes = mem_info()
    return total_bytes - free_bytes


class _UsageRow(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 32),
        ("current", ctypes.c_uint64),
        ("peak", ctypes.c_uint64),
        ("rest", ctypes.c_size_t * 8),
    ]


def usage(device: int = 0) -> dict[str, tuple[int, int]]:
    """Module -> (current, peak) in bytes of this process, in the order in which they are
    answered."""
    rows, count = (_UsageRow * 16)(), ctypes.c_size_t()
    call("aclrtGetMemUsageInfo", device, rows, ctypes.c_size_t(16), ctypes.byref(count))
    return {row.name.decode(): (row.current, row.peak) for row in rows[: count.value]}


class _ProcessRow(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_int), ("size_bytes", ctypes.c_ulong)]


def processes(device: int = 0) -> dict[int, int]:
    """Process -> bytes that it holds on a device, as the driver's management interface says."""
    dcmi = ctypes.CDLL("libdcmi.so")
    rows, count = (_ProcessRow * 32)(), ctypes.c_int()
    logic, card, chip = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    call("aclrtGetLogicDevIdByUserDevId", device, ctypes.byref(logic))
    for code in (
        dcmi.dcmi_init(),
        dcmi.dcmi_get_card_id_device_id_from_logicid(
            ctypes.byref(card), ctypes.byref(chip), ctypes.c_uint(logic.value)
        ),
        dcmi.dcmi_get_device_resource_info(card, chip, rows, ctypes.byref(count)),
    ):
        if code != 0:
            raise AclError("dcmi", code)
    return {row.pid: row.size_bytes for row in rows[: count.value]}


def copy(
    destination: int | ctypes.Array[Any],
    source: int | ctypes.Array[Any] | bytes,
    size_bytes: int,
    kind: int,
) -> None:
    def pointer(value: Any) -> Any:
        return ctypes.c_void_p(value) if isinstance(value, int) else value

    size = ctypes.c_size_t(size_bytes)
    call("aclrtMemcpy", pointer(destination), size, pointer(source), size, kind)


def read(pointer: int, size_bytes: int) -> bytes:
    target = ctypes.create_string_buffer(size_bytes)
    copy(target, pointer, size_bytes, D2H)
    return target.raw


def pointer_to(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def malloc_error(size_bytes: int) -> int:
    """The code of an allocation, 0 when it succeeds."""
    return error_of(
        "aclrtMallocAlign32",
        ctypes.byref(ctypes.c_void_p()),
        ctypes.c_size_t(size_bytes),
        HUGE_FIRST,
    )


class _PhysicalProperties(ctypes.Structure):
    _fields_ = [
        ("handle_type", ctypes.c_int),
        ("allocation_type", ctypes.c_int),
        ("attribute", ctypes.c_int),
        ("location_id", ctypes.c_uint32),
        ("location_type", ctypes.c_int),
        ("reserve", ctypes.c_uint64),
    ]


def physical(size_bytes: int) -> ctypes.c_void_p:
    """A handle of physical memory on device 0."""
    handle, properties = ctypes.c_void_p(), _PhysicalProperties(0, 0, 4, 0, 1, 0)
    size = ctypes.c_size_t(size_bytes)
    call(
        "aclrtMallocPhysical",
        ctypes.byref(handle),
        size,
        ctypes.byref(properties),
        ctypes.c_uint64(0),
    )
    return handle


def reserve(size_bytes: int) -> int:
    address, size = ctypes.c_void_p(), ctypes.c_size_t(size_bytes)
    call(
        "aclrtReserveMemAddress",
        ctypes.byref(address),
        size,
        ctypes.c_size_t(0),
        None,
        ctypes.c_uint64(0),
    )
    assert address.value
    return address.value


def map_at(address: int, size_bytes: int, handle: ctypes.c_void_p) -> None:
    zero, size = ctypes.c_uint64(0), ctypes.c_size_t(size_bytes)
    call("aclrtMapMem", ctypes.c_void_p(address), size, ctypes.c_size_t(0), handle, zero)


def result(**values: Any) -> None:
    print("RESULT", json.dumps(values), flush=True)
