"""Questions that Dynamo asks for every layer of a model, answered once while a rank is planned.

None has to do with memory: how many CUDA devices there are (with a CUDA build of torch on another
device each answer loads NVML anew), and which lines of source a function has that was traced
before. 13 of 99 samples while Qwen3-235B was traced and compiled.

For the plan driver alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def alike_questions_once() -> Iterator[None]:
    """Inside, torch remembers its count of CUDA devices, and which code's source it has noted."""
    with _device_count(), _sources():
        yield


@contextlib.contextmanager
def _device_count() -> Iterator[None]:
    """``torch.cuda.device_count`` keeps its answer only once CUDA is initialised. (2.8, 2.10)"""
    import torch

    known = getattr(torch.cuda, "_cached_device_count", 0)
    if known is not None:  # it keeps it already, or has no such place
        yield
        return
    torch.cuda._cached_device_count = torch.cuda.device_count()
    try:
        yield
    finally:
        torch.cuda._cached_device_count = None


@contextlib.contextmanager
def _sources() -> Iterator[None]:
    """``SourceInfo.add_code`` adds to a set, and reads the file to know what. (2.10)"""
    try:
        from torch._dynamo.package import SourceInfo
    except ImportError:  # a release without it
        yield
        return
    add_code = SourceInfo.add_code
    SourceInfo.add_code = once_for_each(add_code)
    try:
        yield
    finally:
        SourceInfo.add_code = add_code


def once_for_each(add: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return what calls ``add(to, what)`` for the first of equal pairs alone."""
    added: dict[int, tuple[Any, set[Any]]] = {}  # by the id of ``to``, which is kept alive

    def add_once(to: Any, what: Any) -> None:
        _, known = added.setdefault(id(to), (to, set()))
        if what not in known:
            add(to, what)
            known.add(what)

    return add_once
