"""Dataclasses to JSON and back: one description of a type serves both, and its JSON Schema.

The fields of a dataclass are the keys of its object, in their order. What differs is written beside
the field or property:

- ``metadata={"json": "name"}``: the key has another name; ``{"json": False}``: no key.
- ``metadata={"json": OPTIONAL}``: the key is left out while the field has its default.
- ``metadata={"json": INLINE}``: the keys of the field's own object stand in this object.
- ``metadata={"json": Spread("side", ("low", "high"))}``: a tuple of objects that differ in this
  field, each under the key that the field names; ``null`` for one that is missing.
- ``@property @computed``: a key that is written and not read.
- ``SCHEMA: ClassVar[str]`` of the class itself: the first key, ``schema``, which has to be this.

Types: dataclasses, str, int, float, bool, None, lists, tuples, dicts with keys str or int,
unions of these, and ``object`` for JSON that nobody has described. Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache, cached_property, partial
from typing import Annotated, Any, TypeVar, Union

INLINE, OPTIONAL = object(), object()
UNIONS, MAPPINGS = (Union, types.UnionType), (dict, Mapping)
_SCALARS = {str, int, float, bool, type(None)}

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Spread:
    """Objects of a tuple under the keys that one of their fields names."""

    by: str
    sides: tuple[str, ...]


@dataclass(frozen=True)
class Allowed:
    """What a value may be besides its type, for ``Annotated``; for the schema alone."""

    values: tuple[str, ...] = ()
    minimum: int | None = None


#: Bytes of something that cannot be negative.
Size = Annotated[int, Allowed(minimum=0)]


def left_out(default: Any = None) -> Any:
    """Return an OPTIONAL field with this default, or with what this type makes."""
    how = {"json": OPTIONAL}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=how)
    return dataclasses.field(default=default, metadata=how)


def computed(method: _F) -> _F:
    """Mark the function of a property whose value belongs into the JSON."""
    method.__dict__["in_json"] = True
    return method


@dataclass(frozen=True)
class Key:
    """A field of a dataclass, or a computed property, as a key of its object."""

    name: str  # of the attribute
    key: str  # in the JSON
    type: Any
    how: object = None  # None | OPTIONAL | INLINE | computed | a Spread
    default: object = None  # MISSING: there is none

    @cached_property
    def decode(self) -> Callable[[Any], Any]:
        return _decoder(self.type)

    @property
    def inlined(self) -> Any:
        """The class of an INLINE object, which may be missing as a whole where None is allowed."""
        return next(
            each for each in (self.type, *typing.get_args(self.type)) if isinstance(each, type)
        )


@cache
def keys_of(cls: Any) -> tuple[Key, ...]:
    """Return the keys of a dataclass: its fields, then its computed properties."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found: list[Key] = []
    for field in dataclasses.fields(cls):
        how = field.metadata.get("json")
        made = field.default_factory
        default = field.default if made is MISSING else made()
        if isinstance(how, str):
            found.append(Key(field.name, how, hints[field.name], None, default))
        elif how is not False:
            found.append(Key(field.name, field.name, hints[field.name], how, default))
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if isinstance(member, property) and getattr(member.fget, "in_json", False):
                kind = typing.get_type_hints(member.fget, include_extras=True)["return"]
                found.append(Key(name, name, kind, computed))
    return tuple(found)


def to_json(value: Any, lazy: Sequence[str] = ()) -> Any:
    """Return a dataclass object as what ``json`` takes.

    Args:
        value: a dataclass object, or a list of them.
        lazy: fields that are lists; an iterator that makes one element at a time stands for each.
    """
    kind: Any = type(value)
    if kind in _SCALARS:
        return value
    if kind in (list, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    schema = vars(kind).get("SCHEMA")
    data: dict[str, Any] = {} if schema is None else {"schema": schema}
    for key in keys_of(kind):
        item, how = getattr(value, key.name), key.how
        if how is OPTIONAL and item == key.default:
            continue
        made = (to_json(each) for each in item) if key.name in lazy else to_json(item)
        if how is INLINE:
            data.update(made or {})
        elif isinstance(how, Spread):
            data.update(dict.fromkeys(how.sides))
            data.update((each.pop(how.by), each) for each in made)
        else:
            data[key.key] = made
    return data


def from_json(cls: type[_T], data: object) -> _T:
    """Return the object that was written. Keys that the class does not have are ignored.

    Raises:
        ValueError: a key is missing or holds something else, with the way to it.
    """
    kind: Any = cls
    made: _T = _decoder(kind)(data)
    return made


def from_event(cls: type[_T], event: Mapping[str, Any]) -> _T:
    """Return the object that a line of a record tells of.

    What is null or missing there has its default; None where the field has no default.

    Raises:
        ValueError: as ``from_json``.
    """
    kind: Any = cls
    values = ((each.key, event.get(each.key), each.default) for each in keys_of(kind))
    known = {key: value for key, value, own in values if value is not None or own is MISSING}
    return from_json(cls, known)


@cache
def _decoder(hint: Any) -> Callable[[Any], Any]:
    """Return what makes a value of a type from JSON."""
    hint = bare(hint)[0]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return partial(_object, hint)
    if hint in (object, Any):
        return lambda data: data
    if origin in (list, tuple):
        item = _decoder(args[0])
        return lambda data: origin(
            [_at(i, item, value) for i, value in enumerate(_checked({list}, "a list", data))]
        )
    if origin in MAPPINGS:
        key, item = args[0], _decoder(args[1])
        return lambda data: {
            key(name): _at(name, item, value)
            for name, value in _checked({dict}, "an object", data).items()
        }
    kinds = [bare(each)[0] for each in (args if origin in UNIONS else (hint,))]
    if _SCALARS.issuperset(kinds):
        allowed = {*kinds, int} if float in kinds else set(kinds)
        return partial(_checked, allowed, kinds[0].__name__)
    first, *others = map(_decoder, kinds)

    def decode_union(data: Any) -> Any:
        try:
            return first(data)
        except ValueError:
            for decode in others:
                try:
                    return decode(data)
                except ValueError:
                    continue
            raise

    return decode_union


def bare(hint: Any) -> tuple[Any, Allowed | None]:
    """Return a type without its annotation, and the annotation."""
    if typing.get_origin(hint) is Annotated:
        kind, allowed = typing.get_args(hint)
        return kind, allowed
    return hint, None


def _checked(kinds: set[type], wanted: str, data: Any) -> Any:
    kind = str if isinstance(data, str) else type(data)
    if kind not in kinds or (kind is float and not math.isfinite(data)):
        text = repr(data)
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise ValueError(f"{wanted} is wanted, not {shown}")
    return data


def _object(cls: Any, data: Any) -> Any:
    _checked({dict}, "an object", data)
    schema = vars(cls).get("SCHEMA")
    if schema is not None and data.get("schema") != schema:
        raise ValueError(f"schema {data.get('schema')!r}, this memprof reads {schema!r}")
    values: dict[str, Any] = {}
    for key in keys_of(cls):
        how = key.how
        if isinstance(how, Spread):
            item = _decoder(typing.get_args(key.type)[0])
            values[key.name] = tuple(
                _at(side, item, {**data[side], how.by: side})
                for side in how.sides
                if data.get(side) is not None
            )
        elif how is INLINE:
            wanted = (each.key for each in keys_of(key.inlined) if each.default is MISSING)
            if key.default is MISSING or all(name in data for name in wanted):
                values[key.name] = _object(key.inlined, data)
        elif key.key in data and how is not computed:
            values[key.name] = _at(key.key, key.decode, data[key.key])
        elif key.default is MISSING:
            raise ValueError(f"{key.key!r} is missing")
    return cls(**values)


def _at(place: str | int, decode: Callable[[Any], Any], value: object) -> Any:
    try:
        return decode(value)
    except ValueError as exc:
        raise ValueError(f"{place}: {exc}") from exc
