"""``acl.rt``: runtime calls on the ACL library that torch_npu has loaded (here, the simulated
device)."""

import ctypes
import functools


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libascendcl.so")
    library.aclrtMemcpy.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
    ]
    library.aclrtMemcpy.restype = ctypes.c_int
    pointer = ctypes.POINTER(ctypes.c_int64)
    library.aclrtGetDeviceInfo.argtypes = [ctypes.c_uint32, ctypes.c_int, pointer]
    library.aclrtGetDeviceInfo.restype = ctypes.c_int
    return library


def memcpy(dst: int, dest_max: int, src: int, count: int, kind: int) -> int:
    """Copies ``count`` bytes between addresses.

    Args:
        dst: address to write to.
        dest_max: bytes that fit there.
        src: address to read from.
        count: bytes to copy.
        kind: 0 host to host, 1 host to device, 2 device to host, 3 device to device
        (``aclrtMemcpyKind``).

    Returns:
        The ACL error code, 0 for success.
    """
    return int(_library().aclrtMemcpy(dst, dest_max, src, count, kind))


def get_device_info(device_id: int, attr: int) -> tuple[int, int]:
    """Returns an attribute of a device (``aclrtDevAttr``; 601 is its architecture), and the ACL
    error code, 0 for success."""
    value = ctypes.c_int64(0)
    status = _library().aclrtGetDeviceInfo(device_id, attr, ctypes.byref(value))
    return value.value, int(status)
