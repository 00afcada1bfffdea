"""Run by the engine's interpreter beside engines: hold memory of a simulated device.

Argument: bytes that the process holds on device 0, its context included. Prints one line
``MEMPROF held`` when it does, and holds them until its standard input ends.
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

    call("aclrtSetDevice", 0)
    call("aclrtGetMemInfo", HBM, ctypes.byref(free), ctypes.byref(total))
    size = int(sys.argv[1]) - (total.value - free.value)
    block = ctypes.c_void_p()
    if size > 0:
        call("aclrtMallocAlign32", ctypes.byref(block), ctypes.c_size_t(size), HUGE_FIRST)
    print("MEMPROF held", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
