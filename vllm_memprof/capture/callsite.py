"""The caller of a function: the first frame that is not a forwarder, and the call chain."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from types import FrameType

from vllm_memprof.engines import ENGINES

_OURS = ("/vllm_memprof/capture/", "/vllm_memprof/engines/")
#: Path fragments of frames that only forward ``empty_cache``.
_FORWARDERS = (
    *_OURS,
    "/torch/",
    "/torch_npu/",
    *(path for row in ENGINES.values() for path in row.forwarders),
    "/contextlib.py",
)
#: Path fragments of frames that a call chain leaves out.
_NOT_IN_CHAIN = (*_OURS, "/torch/", "/torch_npu/", "/contextlib.py")
#: Frames that a call chain lists, from the innermost outwards.
_CHAIN_LENGTH = 8
#: Functions that a worker or a model runner runs a step in.
_STEP = ("execute_model", "sample_tokens", "forward_batch_generation", "execute_forward")


def find_site(frame: FrameType | None) -> tuple[str | None, str | None]:
    """Return the call site, e.g. ``("worker.py:459", "NPUWorker._init_device")``, or two Nones."""
    for each in outwards(frame):
        if not any(fragment in each.f_code.co_filename for fragment in _FORWARDERS):
            return site_of(each), name_of(each)
    return None, None


def call_chain(frame: FrameType | None) -> list[str]:
    """Return callers, innermost first: ``["vllm.utils.mem_utils:memory_profiling", ...]``."""
    return chain_of(outwards(frame), _CHAIN_LENGTH)


def chain_of(frames: Iterable[FrameType], length: int) -> list[str]:
    """Return the functions of frames in their order, without torch's, ``length`` at most."""
    functions = (
        f"{frame.f_globals.get('__name__', '?')}:{name_of(frame)}"
        for frame in frames
        if not is_left_out(frame)
    )
    return list(islice(functions, length))


def is_left_out(frame: FrameType) -> bool:
    """Return True for a frame of torch, of memprof, or of a context manager's machinery."""
    return any(fragment in frame.f_code.co_filename for fragment in _NOT_IN_CHAIN)


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def in_step(frame: FrameType | None) -> bool:
    """Return True if the call comes from inside a step of the model."""
    return any(each.f_code.co_name in _STEP for each in outwards(frame))


def site_of(frame: FrameType) -> str:
    """Return the file and the line that a frame is at."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def name_of(frame: FrameType) -> str:
    """Return the qualified name of a frame's function."""
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))  # from Python 3.11 on
