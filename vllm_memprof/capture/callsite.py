"""The caller of a function: the first frame that is not a forwarder, and the call chain."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from types import FrameType

from vllm_memprof.capture.attributes import NAMES
from vllm_memprof.engines import ENGINES

_NOT_IN_CHAIN = NAMES["not_in_chain"]
#: Path fragments of frames that only forward ``empty_cache``.
FORWARDERS = (*_NOT_IN_CHAIN, *(path for row in ENGINES.values() for path in row.forwarders))


def find_site(
    frames: Iterable[FrameType], left_out: tuple[str, ...] = _NOT_IN_CHAIN
) -> tuple[str | None, str | None]:
    """Return the first call site, e.g. ``("worker.py:459", "NPUWorker._init_device")``, or None.

    Args:
        frames: innermost first.
        left_out: path fragments of frames that are none.
    """
    frame = next(_without(left_out, frames), None)
    if frame is None:
        return None, None
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}", _name_of(frame)


def chain_of(frames: Iterable[FrameType], length: int) -> list[str]:
    """Return the functions of frames in their order: ``["vllm.utils.mem_utils:memory_profiling"]``,
    ``length`` at most."""
    return [
        f"{frame.f_globals.get('__name__', '?')}:{_name_of(frame)}"
        for frame in islice(_without(_NOT_IN_CHAIN, frames), length)
    ]


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _without(left_out: tuple[str, ...], frames: Iterable[FrameType]) -> Iterator[FrameType]:
    for frame in frames:
        if not any(fragment in frame.f_code.co_filename for fragment in left_out):
            yield frame


def _name_of(frame: FrameType) -> str:
    """Return the qualified name of a frame's function."""
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))  # from Python 3.11 on
