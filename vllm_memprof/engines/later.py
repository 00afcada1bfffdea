"""Modules that an engine imports at its start and a plan does not use, executed at their first use.

``import pandas`` waits by itself. ``from module import Name`` gets a class of that name which, when
it is called, executes the module and calls what the module has.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
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

    __spec__: Any

    def __getattr__(self, name: str) -> Any:
        promised = self.__spec__.loader.promised
        if name in _ASKED_OF_ALL or f"-{name}" in promised:
            raise AttributeError(name)
        if name in promised:
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


def _execute(module: Any) -> None:
    module.__class__ = ModuleType
    module.__spec__.loader = module.__loader__ = own = module.__spec__.loader.own
    others = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    own.exec_module(module)
    vars(module).update(others)  # patches of who imported it


@contextlib.contextmanager
def loaded_later(modules: Mapping[str, Collection[str]]) -> Iterator[None]:
    """Inside, importing these modules does not execute them; their first use does, also after.

    Args:
        modules: by name, what is imported from them and can wait too: classes, functions. With "-"
            before it, what somebody looks for and passes over: it is missing until then.
    """

    def find_spec(name: str, *where: Any) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, *where) if name in modules else None
        if spec is not None:
            spec.loader = _Loader(spec.loader, modules[name])  # type: ignore[assignment]
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
