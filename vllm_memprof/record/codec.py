"""Dataclasses to JSON and back. Not for engine workers: ``msgspec`` reads and describes the types.

The fields of a dataclass are the keys of its object, then its ``computed`` properties, which are
written and not read. ``SCHEMA: ClassVar[str]`` of the class itself is its first key, ``schema``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


def one_of(*values: str) -> msgspec.Meta:
    """Return what a text may be, for ``Annotated`` and the schema alone."""
    return msgspec.Meta(extra_json_schema={"enum": list(values)})


def computed(method: _F) -> _F:
    """Mark the function of a property whose value belongs into the JSON."""
    method.__dict__["in_json"] = True
    return method


@cache
def keys_of(cls: Any) -> tuple[str, ...]:
    """Return the keys of a dataclass: its fields, then its computed properties."""
    names = [field.name for field in dataclasses.fields(cls)]
    for base in reversed(cls.__mro__):
        properties = [each for each in vars(base).items() if isinstance(each[1], property)]
        names += [name for name, each in properties if hasattr(each.fget, "in_json")]
    return tuple(names)


def to_json(value: object) -> Any:
    """Return a dataclass object, or what holds some, as ``json`` takes it."""
    if value is None or isinstance(value, (str, int, float)):  # most by far
        return value
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    kind: Any = type(value)
    made = {name: to_json(getattr(value, name)) for name in keys_of(kind)}
    schema = vars(kind).get("SCHEMA")
    return made if schema is None else {"schema": schema, **made}


def from_json(cls: type[_T], data: Any) -> _T:
    """Return the object that was written. Keys that the class does not have are ignored.

    Raises:
        ValueError: a key is missing or holds something else, with the way to it.
    """
    schema = getattr(cls, "SCHEMA", None)
    if schema is not None and isinstance(data, dict) and data.get("schema") != schema:
        raise ValueError(f"schema {data.get('schema')!r}, this memprof reads {schema!r}")
    return msgspec.convert(data, cls, str_keys=True)
