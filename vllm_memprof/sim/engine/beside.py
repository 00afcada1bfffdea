"""Run by the engine's interpreter beside engines: hold memory of a simulated device.

Argument: bytes that are in use on device 0 once the process holds its own, its context included;
it is the first on the device. Prints one line ``MEMPROF {bytes in use}``, and holds them until its
standard input ends.
"""

import ctypes
import os
import sys
from pathlib import Path

HBM, HUGE_FIRST = 1, 0


def main() -> None:
    folder = os.environ["LD_LIBRARY_PATH"].split(":")[0]
    acl = ctypes.CDLL(str(Path(folder) / "libascendcl.so"))
    free, total = ctypes.c_size_t(), ctypes.c_size_t()

    def call(name: str, *arguments: object) -> None:
        code = getattr(acl, name)(*arguments)
        if code != 0:
            sys.exit(f"{name} failed with {code}: {free.value} bytes of {total.value} are free")

    def used() -> int:
        call("aclrtGetMemInfo", HBM, ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value

    call("aclrtSetDevice", 0)
    size = int(sys.argv[1]) - used()
    block = ctypes.c_void_p()
    if size > 0:
        call("aclrtMallocAlign32", ctypes.byref(block), ctypes.c_size_t(size), HUGE_FIRST)
    print(f"MEMPROF {used()}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
