"""Contexts that the other ranks of a machine leave on this rank's device.

Some releases touch the first device before a worker chooses its own: with vllm-ascend 0.13.0,
``torch_npu._inductor`` is imported in the worker's constructor. Each worker then leaves a second
context there, and the rank whose device that is sees less free memory. A rank that is planned alone
has no such neighbours; so where it finds that it has opened a context early itself, one small
process per missing rank opens one on the same device, and holds it until the plan ends.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from vllm_memprof.capture.owners import loaded_library

#: Opens a context on the device argv[1] of the library argv[2], says so, and stays until its input
#: is closed.
_HOLD = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[2])
status = library.aclInit(None) or library.aclrtSetDevice(int(sys.argv[1]))
print(status, flush=True)
sys.stdin.read()
"""
_LIBRARY = "libascendcl.so"


class PeerContextError(RuntimeError):
    """A process that was to hold a context could not open it."""


def is_in_use(device: int) -> bool:
    """Return True if this process has a context on a device.

    (A default device is set without one.)
    """
    function: Any = getattr(loaded_library(_LIBRARY), "aclrtGetPrimaryCtxState", None)
    flags, active = ctypes.c_uint32(), ctypes.c_int32()
    return (
        function is not None
        and function(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        and active.value == 1
    )


def hold_contexts(device: int, count: int) -> list[subprocess.Popen[str]]:
    """Start processes that hold a context each, until this process ends or closes their input.

    Args:
        device: index among the visible devices.
        count: how many.

    Raises:
        PeerContextError: one could not open its context.
    """
    command = [sys.executable, "-I", "-S", "-c", _HOLD, str(device), _LIBRARY]
    held = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        for _ in range(count)
    ]
    for process in held:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "0":
            raise PeerContextError(
                f"no context for another rank could be opened on device {device}"
            )
    return held


def let_go(held: Sequence[subprocess.Popen[str]]) -> None:
    """End what ``hold_contexts`` started."""
    for process in held:
        assert process.stdin is not None
        process.stdin.close()
    for process in held:
        process.wait(10)
