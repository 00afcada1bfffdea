"""Tells the simulated device, in its poison mode, which lines of Python read a value.

On the ``PYTHONPATH`` of the engine's processes in that mode only; Python imports it when it starts.
"""

import contextlib
import ctypes
import os
import sys

_FRAMES = 4
_LEFT_OUT = ("torch", "torch_npu", "functools.py", "contextlib.py")


def _call_site(text: int, room: int) -> None:
    """Writes the innermost lines outside torch, innermost first, to ``text`` of ``room`` bytes."""
    lines: list[str] = []
    frame = sys._getframe().f_back
    while frame is not None and len(lines) < _FRAMES:
        path = frame.f_code.co_filename.rpartition("site-packages/")[2]
        if path.split("/", 1)[0] not in _LEFT_OUT and os.path.basename(path) not in _LEFT_OUT:
            lines.append(f"{path}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    said = " < ".join(lines).encode()[:room]
    ctypes.memmove(text, said, len(said))


#: Held for as long as the device may call it.
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)(_call_site)


class _Listening:
    """A finder that finds nothing: the device is told before torch_npu is imported.

    Not sooner: once it is loaded it takes back what torch's CUDA build has registered.
    """

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torch_npu":
            sys.meta_path.remove(self)
            with contextlib.suppress(OSError):  # not a process of the engine
                ctypes.CDLL("libascendcl.so").memprof_sim_on_poisoned_read(_LISTENER)


if "MEMPROF_SIM_POISON" in os.environ:
    sys.meta_path.insert(0, _Listening())
