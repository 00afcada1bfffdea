"""Questions that Dynamo asks for every layer of a model, answered once while a rank is planned.

None has to do with memory: how many CUDA devices there are (with a CUDA build of torch on another
device each answer loads NVML anew), which lines of source a function has that was traced before,
whether the instances of a class hide their dictionary, and whether a module that is imported inside
a function was to be patched at its import.

For the plan driver alone.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from vllm_memprof.engines.replaced import Replacement

_ASCEND_IMPORT = "vllm_ascend.patch.worker.patch_weight_utils"


def alike_questions_once() -> Iterator[Replacement]:
    """Yield what torch asks, as what remembers the answers; what a release lacks is left out."""
    import torch

    # it keeps its answer only once CUDA is initialised (2.8, 2.10); None: it has none yet
    if getattr(torch.cuda, "_cached_device_count", 0) is None:
        yield torch.cuda, "_cached_device_count", torch.cuda.device_count()
    # it adds to a set, and reads the file to know what (2.10)
    with suppress(ImportError):
        from torch._dynamo.package import SourceInfo

        yield SourceInfo, "add_code", once_for_each(SourceInfo.add_code)
    yield from hidden_dictionaries()
    # vllm-ascend looks at every import statement that is run, for two modules of models' weights
    # (0.23.0, patch_weight_utils.py): they are loaded by now, and Dynamo imports in its functions
    patch = sys.modules.get(_ASCEND_IMPORT)
    patched, plain = (getattr(patch, name, None) for name in ("patched_import", "original_import"))
    if plain is not None and builtins.__import__ is patched:
        yield builtins, "__import__", plain


def hidden_dictionaries() -> Iterator[Replacement]:
    """``inspect.getattr_static`` walks all bases of a class for it; it remembers from 3.12 on."""
    ask = getattr(inspect, "_shadowed_dict", None)
    if ask is not None and sys.version_info < (3, 12):
        yield inspect, "_shadowed_dict", remembering(ask)


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
