"""Dataclasses to JSON and back, and their JSON Schema: one description of a type serves all three.

The fields of a dataclass are the keys of its object, in their order. What differs is written beside
the field or property:

- ``metadata={"json": "name"}``: the key has another name; ``{"json": False}``: no key.
- ``metadata={"json": OPTIONAL}``: the key is left out while the field has its default.
- ``metadata={"json": INLINE}``: the keys of the field's own object stand in this object.
- ``metadata={"json": Spread("side")}``: a tuple of objects that differ in this field, each under
  the key that the field names; ``null`` for one that is missing.
- ``@property @computed``: a key that is written and not read.
- ``SCHEMA: ClassVar[str]``: the first key, ``schema``, which has to be this.

Types: dataclasses, str, int, float, bool, None, lists, tuples, dicts with keys str or int,
unions of these, and ``object`` for JSON that nobody has described. Standard library only.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import tokenize
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, Union

INLINE, OPTIONAL = object(), object()
_NONE = object()  # of a field without a default

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
_Code = Callable[[Any], Any]


@dataclass(frozen=True)
class Spread:
    """Objects of a tuple under the keys that one of their fields names."""

    by: str


@dataclass(frozen=True)
class Allowed:
    """What a value may be besides its type, for ``Annotated``; for the schema alone."""

    values: tuple[str, ...] = ()
    minimum: int | None = None


#: Bytes of something that cannot be negative.
Size = Annotated[int, Allowed(minimum=0)]


def computed(method: _F) -> _F:
    """Mark the function of a property whose value belongs into the JSON."""
    method.__dict__["in_json"] = True
    return method


def to_json(value: Any, lazy: Sequence[str] = ()) -> Any:
    """Return a dataclass object as what ``json`` takes.

    Args:
        value: a dataclass object, or a list of them.
        lazy: fields that are lists; an iterator that makes one element at a time stands for each.
    """
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    kind: Any = type(value)
    data = _encoder(kind)(value, lazy)
    for name in lazy:
        data[name] = (to_json(item) for item in getattr(value, name))
    return data


def from_json(cls: type[_T], data: object) -> _T:
    """Return the object that was written. Keys that the class does not have are ignored.

    Raises:
        ValueError: a key is missing or holds something else, with the way to it.
    """
    kind: Any = cls
    made: _T = _decoder(kind)(data)
    return made


def json_schema(cls: type[Any]) -> dict[str, object]:
    """Return the JSON Schema (2020-12) of a dataclass. Objects are open: keys may be added."""
    definitions: dict[str, object] = {}
    schema = _object_schema(cls, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": cls.__dict__.get("SCHEMA", cls.__name__),
        **schema,
        "$defs": dict(sorted(definitions.items())),
    }


@dataclass(frozen=True)
class _Key:
    """A field, or a computed property."""

    name: str  # of the attribute
    key: str  # in the JSON
    type: Any
    how: object = None  # None | OPTIONAL | INLINE | a Spread
    default: object = _NONE
    computed: bool = False

    @property
    def special(self) -> bool:
        """Whether the key is more than the field under its own name."""
        return self.computed or self.how is not None or self.key != self.name

    @property
    def required(self) -> bool:
        return self.default is _NONE and not self.computed


@cache
def _keys(cls: Any) -> tuple[list[_Key], list[str]]:
    """Return the keys of a class, and the fields that it keeps out of the JSON."""
    types_of = typing.get_type_hints(cls, include_extras=True)
    found: list[_Key] = []
    hidden: list[str] = []
    for field in dataclasses.fields(cls):
        how = field.metadata.get("json")
        if how is False:
            hidden.append(field.name)
            continue
        default = _NONE if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        key = how if isinstance(how, str) else field.name
        how = None if isinstance(how, str) else how
        found.append(_Key(field.name, key, types_of[field.name], how, default))
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if isinstance(member, property) and getattr(member.fget, "in_json", False):
                hints = typing.get_type_hints(member.fget, include_extras=True)
                found.append(_Key(name, name, hints["return"], computed=True))
    return found, hidden


# --- to JSON


@cache
def _encoder(cls: Any) -> Callable[..., dict[str, Any]]:
    keys, hidden = _keys(cls)
    schema: str | None = cls.__dict__.get("SCHEMA")
    codes: dict[str, _Code] = {
        key.name: code for key in keys if (code := _code(key.type)) is not None
    }
    if not hidden and schema is None and not any(key.special for key in keys):

        def encode_alike(value: Any, but: Sequence[str] = ()) -> dict[str, Any]:
            """Copy the fields, which are the keys: several times as fast as one by one."""
            data: dict[str, Any] = vars(value).copy()
            for name, code in codes.items():
                data[name] = None if name in but else code(data[name])
            return data

        return encode_alike
    writers = [(key.name, _writer(key)) for key in keys]

    def encode(value: Any, but: Sequence[str] = ()) -> dict[str, Any]:
        data: dict[str, Any] = {} if schema is None else {"schema": schema}
        for name, write in writers:
            if name in but:
                data[name] = None
            else:
                write(data, getattr(value, name))
        return data

    return encode


def _writer(key: _Key) -> Callable[[dict[str, Any], Any], None]:
    """Return what writes a value of a field into an object."""
    code = _code(key.type)

    def write(data: dict[str, Any], value: Any) -> None:
        data[key.key] = value if code is None else code(value)

    def write_changed(data: dict[str, Any], value: Any) -> None:
        if value != key.default:
            write(data, value)

    def write_inline(data: dict[str, Any], value: Any) -> None:
        assert code is not None
        data.update(code(value) or {})

    def write_spread(data: dict[str, Any], value: Any) -> None:
        assert code is not None
        data.update(dict.fromkeys(sides))
        for item in code(value):
            data[item.pop(by)] = item

    if isinstance(key.how, Spread):
        by, sides = key.how.by, _sides(key)
        return write_spread
    return {OPTIONAL: write_changed, INLINE: write_inline}.get(key.how, write)


def _sides(key: _Key) -> tuple[str, ...]:
    """Return the keys that the objects of a tuple are spread over."""
    assert isinstance(key.how, Spread)
    hint = typing.get_type_hints(typing.get_args(key.type)[0], include_extras=True)[key.how.by]
    values: tuple[str, ...] = typing.get_args(hint)[1].values
    return values


@cache
def _code(hint: Any) -> _Code | None:
    """Return what makes a value of a type JSON; None where it is JSON as it is."""
    hint, _ = _bare(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _encoder(typing.cast(Any, hint))
    if origin in _UNIONS:
        codes = [code for arg in args if (code := _code(arg)) is not None]
        if len(codes) > 1:
            raise TypeError(f"{hint}: a union of several objects")
        return _of_known(codes[0]) if codes else None
    if origin in (list, tuple):
        item = _code(args[0])
        return _of_items(item) if item is not None else None if origin is list else list
    return _of_values(args[0], _code(args[1])) if origin in _MAPPINGS else None


def _of_known(code: _Code) -> _Code:
    return lambda value: None if value is None else code(value)


def _of_items(code: _Code) -> _Code:
    return lambda values: [code(value) for value in values]


def _of_values(key: Any, code: _Code | None) -> _Code:
    if code is not None:
        return lambda data: {str(name): code(value) for name, value in data.items()}
    return dict if key is str else lambda data: {str(name): data[name] for name in data}


_UNIONS = (Union, types.UnionType)
_MAPPINGS = (dict, Mapping)


def _bare(hint: Any) -> tuple[Any, Allowed | None]:
    """Return a type without its annotation, and the annotation."""
    if typing.get_origin(hint) is Annotated:
        bare, allowed = typing.get_args(hint)
        return bare, allowed
    return hint, None


# --- from JSON


@cache
def _decoder(hint: Any) -> _Code:
    hint, _ = _bare(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _object_decoder(hint)
    if origin in _UNIONS:
        return _union_decoder(hint, args)
    if origin in (list, tuple):
        item = _decoder(args[0])

        def decode_list(data: object) -> Any:
            if not isinstance(data, list):
                raise ValueError(f"a list is wanted, not {_shown(data)}")
            return origin([_at(i, item, value) for i, value in enumerate(data)])

        return decode_list
    if origin in _MAPPINGS:
        item, key = _decoder(args[1]), args[0]

        def decode_dict(data: object) -> Any:
            if not isinstance(data, dict):
                raise ValueError(f"an object is wanted, not {_shown(data)}")
            return {key(name): _at(name, item, value) for name, value in data.items()}

        return decode_dict
    if hint in (object, Any):
        return lambda data: data
    return _scalar_decoder(hint)


def _scalar_decoder(hint: Any) -> _Code:
    wanted = (int, float) if hint is float else type(None) if hint is None else hint

    def decode(data: object) -> Any:
        if not isinstance(data, wanted) or (isinstance(data, bool) and hint is not bool):
            raise ValueError(f"{hint.__name__} is wanted, not {_shown(data)}")
        return data

    return decode


def _union_decoder(hint: Any, args: tuple[Any, ...]) -> _Code:
    decoders = [_decoder(arg) for arg in args if arg is not type(None)]

    def decode(data: object) -> Any:
        if data is None and type(None) in args:
            return None
        problem: ValueError | None = None
        for decoder in decoders:
            try:
                return decoder(data)
            except ValueError as exc:
                problem = exc
        assert problem is not None
        raise problem

    return decode


def _object_decoder(cls: Any) -> _Code:
    keys = [key for key in _keys(cls)[0] if not key.computed]
    schema = cls.__dict__.get("SCHEMA")

    def decode(data: object) -> Any:
        if not isinstance(data, dict):
            raise ValueError(f"an object is wanted, not {_shown(data)}")
        if schema is not None and data.get("schema") != schema:
            raise ValueError(f"schema {data.get('schema')!r}, this memprof reads {schema!r}")
        values: dict[str, Any] = {}
        for key in keys:
            if isinstance(key.how, Spread):
                values[key.name] = _gathered(key, data)
            elif key.how is INLINE:
                values[key.name] = _inlined(key, data)
            elif key.key in data:
                values[key.name] = _at(key.key, _decoder(key.type), data[key.key])
            elif key.required:
                raise ValueError(f"{key.key!r} is missing")
        return cls(**values)

    return decode


def _gathered(key: _Key, data: Mapping[str, Any]) -> tuple[Any, ...]:
    assert isinstance(key.how, Spread)
    element, by = typing.get_args(key.type)[0], key.how.by
    return tuple(
        _at(side, _decoder(element), {**data[side], by: side})
        for side in _sides(key)
        if data.get(side) is not None
    )


def _inlined(key: _Key, data: Mapping[str, Any]) -> Any:
    objects = [arg for arg in (key.type, *typing.get_args(key.type)) if hasattr(arg, "__mro__")]
    cls: Any = next(arg for arg in objects if dataclasses.is_dataclass(arg))
    missing = [inner.key for inner in _keys(cls)[0] if inner.required and inner.key not in data]
    return None if missing and cls is not key.type else _decoder(cls)(data)


def _at(place: str | int, decode: _Code, value: object) -> Any:
    try:
        return decode(value)
    except ValueError as exc:
        raise ValueError(f"{place}: {exc}") from exc


def _shown(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- the schema


def _object_schema(cls: Any, definitions: dict[str, object]) -> dict[str, object]:
    properties: dict[str, object] = {}
    required: list[str] = []
    if "SCHEMA" in cls.__dict__:
        properties["schema"] = {"const": cls.__dict__["SCHEMA"]}
        required.append("schema")
    comments = _comments(cls)
    for key in _keys(cls)[0]:
        if isinstance(key.how, Spread):
            element = typing.get_args(key.type)[0]
            inner = _reference(element, definitions, but=key.how.by)
            for side in _sides(key):
                properties[side] = {"anyOf": [inner, {"type": "null"}]}
                required.append(side)
        elif key.how is INLINE:
            args = (key.type, *typing.get_args(key.type))
            inlined = next(arg for arg in args if dataclasses.is_dataclass(arg))
            inner = _object_schema(typing.cast(Any, inlined), definitions)
            properties |= typing.cast(Any, inner["properties"])
            if inlined is key.type:
                required += typing.cast(Any, inner["required"])
        else:
            described = _type_schema(key.type, definitions)
            if key.name in comments:
                described = {**described, "description": comments[key.name]}
            properties[key.key] = described
            if key.how is not OPTIONAL:
                required.append(key.key)
    doc = (cls.__doc__ or "").split("\n\n")[0].replace("\n    ", " ")
    return {
        "description": doc,
        "type": "object",
        "required": required,
        "properties": properties,
    }


def _reference(
    cls: Any, definitions: dict[str, object], but: str | None = None
) -> dict[str, object]:
    if cls.__name__ not in definitions:
        definitions[cls.__name__] = {}  # a type may hold itself
        schema = _object_schema(cls, definitions)
        if but is not None:
            typing.cast(Any, schema["properties"]).pop(but)
            typing.cast(Any, schema["required"]).remove(but)
        definitions[cls.__name__] = schema
    return {"$ref": f"#/$defs/{cls.__name__}"}


_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def _type_schema(hint: Any, definitions: dict[str, object]) -> dict[str, object]:
    hint, allowed = _bare(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if allowed is not None and allowed.values:
        return {"enum": list(allowed.values)}
    if hint in _NAMES:
        minimum = {} if allowed is None else {"minimum": allowed.minimum}
        return {"type": _NAMES[hint], **minimum}
    if dataclasses.is_dataclass(hint):
        return _reference(hint, definitions)
    if origin in _UNIONS:
        each = [_type_schema(arg, definitions) for arg in args]
        names = [schema.pop("type") for schema in each if set(schema) <= {"type", "minimum"}]
        if len(names) < len(each):
            found = [_type_schema(arg, definitions) for arg in args]
            return {"anyOf": found}
        merged = {key: value for schema in each for key, value in schema.items()}
        return {
            "type": [name for name in names if name != "integer" or "number" not in names],
            **merged,
        }
    if origin in (list, tuple):
        return {"type": "array", "items": _type_schema(args[0], definitions)}
    if origin in _MAPPINGS:
        values = _type_schema(args[1], definitions)
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    return {}


def _comments(cls: Any) -> dict[str, str]:
    """Return the comment at the end of each field's line."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            lines = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        name, depth = None, 0
        for token in tokenize.generate_tokens(io.StringIO(lines).readline):
            if token.type == tokenize.INDENT:
                depth += 1
            elif token.type == tokenize.DEDENT:
                depth -= 1
            elif token.type == tokenize.NAME and depth == 1 and token.start[1] == 4:
                name = token.string
            elif token.type == tokenize.COMMENT and depth == 1 and name is not None:
                text = token.string.lstrip("# ")
                found[name] = f"{found[name]} {text}" if name in found else text
            elif token.type == tokenize.NEWLINE:
                name = None
    return found
