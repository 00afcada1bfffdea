"""Modules that an engine imports at its start and a plan does not use, executed at their first use.

``import pandas`` waits by itself. ``from module import Name`` gets a class of that name which, when
it is called, executes the module and calls what the module has.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

#: What somebody who walks over all modules asks for, and a module may lack; the last in vllm-ascend
#: 0.30 (patch_triton.py).
_ASKED_OF_ALL = ("__path__", "__warningregistry__", "__wrapped__", "fused_q_kv_rmsnorm")


class _Promise(type):
    """Type of what stands for a class or a function of a module that was not executed."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        module = sys.modules[cls.__module__]
        if isinstance(module, _Later):
            _execute(module)
        return getattr(module, cls.__name__)(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        module = sys.modules[cls.__module__]
        return not isinstance(module, _Later) and isinstance(instance, vars(module)[cls.__name__])


class _Later(ModuleType):
    """A module that is executed when somebody asks for something that it defines."""

    def __getattr__(self, name: str) -> Any:
        if name in _ASKED_OF_ALL:
            raise AttributeError(name)
        if name in _loader_of(self).promised:
            return _Promise(name, (), {"__module__": self.__name__})
        _execute(self)
        return getattr(self, name)


class _Loader:
    def __init__(self, own: Any, promised: Collection[str]) -> None:
        self.own, self.promised = own, promised

    def create_module(self, spec: ModuleSpec) -> None:
        """Have it made as any other."""

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Later

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)  # where its source is, whether it is a package


class _Finder:
    def __init__(self, modules: Mapping[str, Collection[str]]) -> None:
        self.modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in self.modules else None
        if spec is not None:
            spec.loader = _Loader(spec.loader, self.modules[name])  # type: ignore[assignment]
        return spec


def _loader_of(module: ModuleType) -> _Loader:
    found = module.__spec__.loader if module.__spec__ else None
    assert isinstance(found, _Loader)
    return found


def _execute(module: ModuleType) -> None:
    own = _loader_of(module).own
    module.__class__ = ModuleType
    module.__spec__.loader = module.__loader__ = own  # type: ignore[union-attr]
    own.exec_module(module)


@contextlib.contextmanager
def loaded_later(modules: Mapping[str, Collection[str]]) -> Iterator[None]:
    """Inside, importing these modules does not execute them; their first use does, also after.

    Args:
        modules: by name, what is imported from them and can wait too: classes, functions.
    """
    finder = _Finder(modules)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
