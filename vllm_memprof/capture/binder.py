"""Put wrappers on the hook table's targets: rows enter, wrapped functions and states leave.

Nothing is imported to bind it. A module that is already loaded is bound at once, any other right
after its own import has run, through an entry in ``sys.meta_path``. The loader found by the import
system is left in place; only its ``exec_module`` is lent for that one execution. Wrappers go into
the defining class's ``__dict__`` and keep static and class methods as they are.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.hook import Hook

Wrap = Callable[[Hook, Callable[..., Any]], Callable[..., Any]]

PENDING, BOUND, MISSING = "pending", "bound", "missing"
OVERWRITTEN, RELEASED = "overwritten", "released"


#: Set on every wrapper to the wrapper itself: functools.wraps copies attributes, so that mere
#: presence proves nothing.
_SENTINEL = "__memprof__"


def is_ours(function: Any) -> bool:
    """Return True if this very function is one of our wrappers."""
    return getattr(function, _SENTINEL, None) is function


class Binding:
    """One target of one row.

    ``owner`` is the class or module that holds the attribute once it is found.
    """

    def __init__(self, hook: Hook, target: str) -> None:
        self.hook = hook
        self.target = target
        self.module_name, _, path = target.partition(":")
        self.parents, self.attribute = path.split(".")[:-1], path.split(".")[-1]
        self.state = PENDING
        self.owner: Any = None
        self.original: Any = None
        self.wrapper: Any = None
        self.detail: str | None = None

    def resolve_owner(self) -> Any:
        module = sys.modules.get(self.module_name)
        return reach(module, ".".join(self.parents)) if self.parents else module

    def bind(self, wrap: Wrap, owner: Any = None) -> None:
        """Wrap the attribute where it is defined; a second call does nothing."""
        owner = self.resolve_owner() if owner is None else owner
        if isinstance(owner, type) and self.attribute not in vars(owner):
            # the class that the module has defined, where one derived from it has taken its name
            name = self.module_name, ".".join(self.parents)
            known = (base for base in owner.__mro__ if (base.__module__, base.__qualname__) == name)
            owner = next(known, owner)
        found = None if owner is None else vars(owner).get(self.attribute)
        if found is None and owner is not None and not isinstance(owner, type):
            found = getattr(owner, self.attribute, None)  # of C modules, not in their __dict__
        if found is None:
            self.state = MISSING
            return
        is_method = isinstance(found, (staticmethod, classmethod))
        function = found.__func__ if is_method else found
        if is_ours(function):
            return
        wrapper = wrap(self.hook, function)
        vars(wrapper)[_SENTINEL] = wrapper
        self.owner, self.original = owner, found
        self.wrapper = type(found)(wrapper) if is_method else wrapper
        setattr(owner, self.attribute, self.wrapper)
        self.state = BOUND

    def current(self) -> Any:
        return vars(self.owner).get(self.attribute)

    def is_overwritten(self) -> bool:
        """Return True if the wrapper was replaced by something that does not call through it."""
        current: Any = self.current()
        for _ in range(32):  # a chain of decorators over the wrapper still calls it
            if current is self.wrapper:
                return False
            current = getattr(current, "__wrapped__", None)
        return True

    def unbind(self) -> None:
        """Take the wrapper off, unless another one lies over it."""
        if self.wrapper is not None and self.current() is self.wrapper:
            setattr(self.owner, self.attribute, self.original)
            self.state = RELEASED


class Binder(importlib.abc.MetaPathFinder):
    """All bindings of a process.

    Args:
        hooks: rows in force.
        wrap: makes the wrapper of a row around a function.
        on_error: told about a binding that failed.
    """

    def __init__(
        self, hooks: Sequence[Hook], wrap: Wrap, on_error: Callable[[str, BaseException], None]
    ) -> None:
        self.bindings = [Binding(hook, target) for hook in hooks for target in hook.targets]
        self._wrap = wrap
        self._on_error = on_error
        self._watched: dict[str, list[Binding]] = {}
        for binding in self.bindings:
            self._watched.setdefault(binding.hook.after or binding.module_name, []).append(binding)
        self._finding: set[str] = set()

    def install(self) -> None:
        """Bind what is loaded, watch for the rest."""
        for name in self._watched:
            module = sys.modules.get(name)
            initialising = reach(module, "__spec__._initializing")
            if module is not None and not initialising:
                self._bind_module(name)
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Take everything off again (tests)."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for binding in self.bindings:
            binding.unbind()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._watched or fullname in self._finding:
            return None
        self._finding.add(fullname)
        spec: importlib.machinery.ModuleSpec | None = None
        try:
            for other in list(sys.meta_path):
                if other is not self and hasattr(other, "find_spec"):
                    spec = other.find_spec(fullname, path, target)
                    if spec is not None:
                        break
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            self._bind_after_execution(fullname, spec.loader)
        return spec

    def bind_pending(self) -> None:
        """Try again what has not been found so far and whose module is loaded now."""
        for binding in self.bindings:
            if binding.state in (PENDING, MISSING) and binding.resolve_owner() is not None:
                self._bind(binding)

    def bind_overrides(self, instance: object) -> None:
        """Bind methods that the class really instantiated overrides in a bound class."""
        bound = [binding for binding in self.bindings if isinstance(binding.owner, type)]
        for cls in type(instance).__mro__:
            for binding in bound:
                owner, name = binding.owner, binding.attribute
                if cls is not owner and issubclass(cls, owner) and name in vars(cls):
                    override = Binding(binding.hook, f"{cls.__module__}:{cls.__qualname__}.{name}")
                    self._bind(override, cls)
                    if override.state == BOUND:
                        self.bindings.append(override)

    def bind_live(self, prefix: str, instance: object) -> None:
        """Bind rows whose target begins so to the class that defines this object's method."""
        for binding in self.bindings:
            if binding.target.startswith(prefix) and binding.state == PENDING:
                for owner in type(instance).__mro__:
                    if binding.attribute in vars(owner):
                        self._bind(binding, owner)
                        break

    def check(self) -> None:
        """Bind again, once, what was overwritten; it stays marked with the new owner's name."""
        for binding in self.bindings:
            if binding.state == BOUND and binding.is_overwritten():
                culprit = getattr(binding.current(), "__module__", "?")
                self._bind(binding)
                binding.state, binding.detail = OVERWRITTEN, f"replaced by {culprit}; bound again"

    def release(self, moment: str) -> None:
        """Take off the rows that are only wanted until this moment."""
        for binding in self.bindings:
            if binding.hook.until == moment:
                binding.unbind()

    def of(self, hook: Hook) -> list[Binding]:
        return [binding for binding in self.bindings if binding.hook.id == hook.id]

    def _bind_after_execution(self, fullname: str, loader: Any) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        @functools.wraps(execute)
        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            self._bind_module(fullname)

        try:
            loader.exec_module = exec_module
        except AttributeError as error:
            self._on_error(f"bind {fullname}", error)

    def _bind_module(self, name: str) -> None:
        for binding in self._watched[name]:
            if binding.state in (PENDING, MISSING):
                self._bind(binding)

    def _bind(self, binding: Binding, owner: Any = None) -> None:
        try:
            binding.bind(self._wrap, owner)
        except Exception as error:
            binding.state, binding.detail = "error", str(error)
            self._on_error(f"bind {binding.target}", error)
