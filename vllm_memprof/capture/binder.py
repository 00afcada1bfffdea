"""Put wrappers on the hook table's targets: rows enter, wrapped functions and states leave.

Nothing is imported to bind it. A module that is already loaded is bound at once, any other right
after its own import has run, through an entry in ``sys.meta_path``. The loader found by the import
system is left in place; only its ``exec_module`` is lent for that one execution. Wrappers go into
the defining class's ``__dict__`` and keep static and class methods as they are.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.hook import Hook

Wrap = Callable[[Hook, Callable[..., Any]], Callable[..., Any]]

#: In place of a module: the object that a model's class was made into.
LOADED = "<loaded>"
#: States of a binding; of several targets of a row, the one in the first of these counts.
STATES = ("overwritten", "bound", "released", "error", "missing", "pending")


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
        self.hook, self.target = hook, target
        self.module_name, _, path = target.partition(":")
        self.parents, _, self.attribute = path.rpartition(".")
        self.watched = hook.after or self.module_name  # module whose import makes it final
        self.state = "pending"
        self.owner: Any = None
        self.detail: str | None = None
        self._original: Any = None
        self._wrapper: Any = None

    @property
    def is_open(self) -> bool:
        return self.state in ("pending", "missing")

    def bind(self, wrap: Wrap, owner: Any) -> None:
        """Wrap the attribute where it is defined; a second call does nothing."""
        if isinstance(owner, type) and self.attribute not in vars(owner):
            # the class that the module has defined, where one derived from it has taken its name
            name = self.module_name, self.parents
            known = (base for base in owner.__mro__ if (base.__module__, base.__qualname__) == name)
            owner = next(known, owner)
        found = None if owner is None else vars(owner).get(self.attribute)
        if found is None and owner is not None and not isinstance(owner, type):
            found = getattr(owner, self.attribute, None)  # of C modules, not in their __dict__
        if found is None:
            self.state = "missing"
            return
        is_method = isinstance(found, (staticmethod, classmethod))
        function = found.__func__ if is_method else found
        if is_ours(function):
            return
        wrapper = wrap(self.hook, function)
        vars(wrapper)[_SENTINEL] = wrapper
        self.owner, self._original = owner, found
        self._wrapper = type(found)(wrapper) if is_method else wrapper
        setattr(owner, self.attribute, self._wrapper)
        self.state = "bound"

    def replaced_by(self) -> Any:
        """Return what was put in the wrapper's place and does not call through it, else None."""
        found = vars(self.owner).get(self.attribute)
        inner = inspect.unwrap(found, stop=lambda each: each is self._wrapper)
        return None if inner is self._wrapper else found

    def unbind(self) -> None:
        """Take the wrapper off, unless another one lies over it."""
        if self.owner is not None and vars(self.owner).get(self.attribute) is self._wrapper:
            setattr(self.owner, self.attribute, self._original)
            self.state = "released"


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
        self._wrap, self._on_error = wrap, on_error
        self._watched = {binding.watched for binding in self.bindings}
        self._finding: set[str] = set()

    def install(self) -> None:
        """Bind what is loaded, watch for the rest."""
        self._bind_loaded()
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if fullname not in self._watched or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)  # by all other finders
        finally:
            self._finding.discard(fullname)
        loader = reach(spec, "loader")
        execute = reach(loader, "exec_module")
        if execute is not None:

            @functools.wraps(execute)
            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                execute(module)
                self._bind_loaded(fullname)

            try:
                loader.exec_module = exec_module
            except AttributeError as error:
                self._on_error(f"bind {fullname}", error)
        return spec

    def _bind_loaded(self, executed: str = "") -> None:
        """Bind what has not been found so far, in modules that are loaded or were just executed."""
        for binding in self.bindings:
            module = sys.modules.get(binding.watched)
            is_loaded = module is not None and not reach(module, "__spec__._initializing")
            if binding.is_open and (is_loaded or binding.watched == executed):
                self._bind(binding, reach(sys.modules.get(binding.module_name), binding.parents))

    def bind_instance(self, instance: object | None) -> None:
        """Bind methods that the class really used overrides, and what appeared since."""
        self._bind_loaded()
        bound = [binding for binding in self.bindings if isinstance(binding.owner, type)]
        for cls in type(instance).__mro__:
            for binding in bound:
                owner, name = binding.owner, binding.attribute
                if cls is not owner and issubclass(cls, owner) and name in vars(cls):
                    override = Binding(binding.hook, f"{cls.__module__}:{cls.__qualname__}.{name}")
                    self._bind(override, cls)
                    if override.state == "bound":
                        self.bindings.append(override)

    def bind_model(self, runner: object | None) -> None:
        """Bind what is hooked on the model, below whatever the runner has wrapped around it."""
        get_model = reach(runner, "get_model")
        model = reach(runner, "model") if get_model is None else get_model()
        for binding in self.bindings:
            if binding.module_name == LOADED and binding.is_open:
                owners = (cls for cls in type(model).__mro__ if binding.attribute in vars(cls))
                self._bind(binding, next(owners, None))

    def is_bound(self, hook_id: str) -> bool:
        """Return True if any target of a row has its wrapper."""
        return any(each.hook.id == hook_id and each.state == "bound" for each in self.bindings)

    def check(self) -> None:
        """Bind again, once, what was overwritten; it stays marked with the new owner's name."""
        for binding in self.bindings:
            if binding.state == "bound" and (other := binding.replaced_by()) is not None:
                culprit = getattr(other, "__module__", "?")
                self._bind(binding, binding.owner)
                binding.state, binding.detail = "overwritten", f"replaced by {culprit}; bound again"

    def release(self, moment: str) -> None:
        """Take off the rows that are only wanted until this moment."""
        for binding in self.bindings:
            if binding.hook.until == moment:
                binding.unbind()

    def _bind(self, binding: Binding, owner: Any) -> None:
        try:
            binding.bind(self._wrap, owner)
        except Exception as error:
            binding.state, binding.detail = "error", str(error)
            self._on_error(f"bind {binding.target}", error)
