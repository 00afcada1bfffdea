"""Questions that Dynamo asks for every layer of a model, answered once while a rank is planned.

None has to do with memory: how many CUDA devices there are (with a CUDA build of torch on another
device each answer loads NVML anew), which lines of source a function has that was traced before,
whether the instances of a class hide their dictionary, and whether a module that is imported inside
a function was to be patched at its import.

For the plan driver alone.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from vllm_memprof.engines.replaced import replaced

_ASCEND_IMPORT = "vllm_ascend.patch.worker.patch_weight_utils"


@contextlib.contextmanager
def alike_questions_once() -> Iterator[None]:
    """Inside, torch remembers what it has asked already."""
    with _device_count(), _sources(), _hidden_dictionaries(), _plain_imports():
        yield


@contextlib.contextmanager
def _device_count() -> Iterator[None]:
    """``torch.cuda.device_count`` keeps its answer only once CUDA is initialised. (2.8, 2.10)"""
    import torch

    known = getattr(torch.cuda, "_cached_device_count", 0)
    if known is not None:  # it keeps it already, or has no such place
        yield
        return
    with replaced(torch.cuda, "_cached_device_count", torch.cuda.device_count()):
        yield


@contextlib.contextmanager
def _sources() -> Iterator[None]:
    """``SourceInfo.add_code`` adds to a set, and reads the file to know what. (2.10)"""
    try:
        from torch._dynamo.package import SourceInfo
    except ImportError:  # a release without it
        yield
        return
    with replaced(SourceInfo, "add_code", once_for_each(SourceInfo.add_code)):
        yield


@contextlib.contextmanager
def _hidden_dictionaries() -> Iterator[None]:
    """``inspect.getattr_static`` walks all bases of a class for it; it remembers from 3.12 on."""
    ask = getattr(inspect, "_shadowed_dict", None)
    if ask is None or sys.version_info >= (3, 12):
        yield
        return
    with replaced(inspect, "_shadowed_dict", remembering(ask)):
        yield


@contextlib.contextmanager
def _plain_imports() -> Iterator[None]:
    """vllm-ascend looks at every import statement that is run, for two modules of models' weights.
    (0.23.0, ``patch_weight_utils.py``) They are loaded by now, and Dynamo imports in its functions.
    """
    patch = sys.modules.get(_ASCEND_IMPORT)
    patched, plain = (getattr(patch, name, None) for name in ("patched_import", "original_import"))
    if plain is None or builtins.__import__ is not patched:
        yield
        return
    with replaced(builtins, "__import__", plain):
        yield


def once_for_each(add: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return what calls ``add(to, what)`` for the first of equal pairs alone."""
    added: dict[int, tuple[Any, set[Any]]] = {}  # by the id of ``to``, which is kept alive

    def add_once(to: Any, what: Any) -> None:
        _, known = added.setdefault(id(to), (to, set()))
        if what not in known:
            add(to, what)
            known.add(what)

    return add_once


def remembering(ask: Callable[[type], Any]) -> Callable[[type], Any]:
    """Return what asks once for each class."""
    known: dict[int, tuple[type, Any]] = {}  # by the id of the class, which is kept alive

    def answer(of: type) -> Any:
        found = known.get(id(of))
        if found is None:
            found = known[id(of)] = (of, ask(of))
        return found[1]

    return answer
