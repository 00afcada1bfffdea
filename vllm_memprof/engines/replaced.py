"""Attributes that are others for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

#: Module or class, the name of its attribute, and what that is for a while.
Replacement = tuple[Any, str, Any]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, the attribute of a module or a class is ``value``.

    It is put back as it lay there: a class or static method as one, and not bound.
    """
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def all_replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Inside, each of these attributes is another one."""
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(replaced(owner, name, value))
        yield
