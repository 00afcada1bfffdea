"""Writes the JSON Schemas of memprof's JSON files, from the types that they are written from.

    python scripts/write_schemas.py

A test compares the files with the types.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import tokenize
import typing
from pathlib import Path
from typing import Any

from vllm_memprof.accounting.model import Report
from vllm_memprof.check.outcomes import CheckResult
from vllm_memprof.compare.diff import Diff
from vllm_memprof.holders.rows import Who
from vllm_memprof.plans.calibrated import Calibrated
from vllm_memprof.plans.rows import Fit, Sweep
from vllm_memprof.plans.share import DeviceShare
from vllm_memprof.record.codec import INLINE, MAPPINGS, OPTIONAL, UNIONS, Spread, bare, keys_of

FOLDER = Path(__file__).parents[1] / "vllm_memprof" / "report" / "schemas"
TYPES = (Report, Diff, CheckResult, Sweep, Fit, DeviceShare, Who, Calibrated)

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def json_schema(cls: type[Any]) -> dict[str, object]:
    """Return the JSON Schema (2020-12) of a dataclass. Objects are open: keys may be added."""
    definitions: dict[str, object] = {}
    schema = _object_schema(cls, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": getattr(cls, "SCHEMA", cls.__name__),
        **schema,
        "$defs": dict(sorted(definitions.items())),
    }


def _object_schema(cls: Any, definitions: dict[str, object]) -> dict[str, Any]:
    properties: dict[str, object] = {}
    required: list[str] = []
    if "SCHEMA" in vars(cls):
        properties["schema"] = {"const": cls.SCHEMA}
        required.append("schema")
    comments = _comments(cls)
    for key in keys_of(cls):
        if isinstance(key.how, Spread):
            inner = _reference(typing.get_args(key.type)[0], definitions, but=key.how.by)
            properties.update(
                {side: {"anyOf": [inner, {"type": "null"}]} for side in key.how.sides}
            )
            required += key.how.sides
        elif key.how is INLINE:
            schema = _object_schema(key.inlined, definitions)
            properties |= schema["properties"]
            required += schema["required"] if key.inlined is key.type else []
        else:
            described = _type_schema(key.type, definitions)
            if key.name in comments:
                described = {**described, "description": comments[key.name]}
            properties[key.key] = described
            if key.how is not OPTIONAL:
                required.append(key.key)
    return {
        "description": (cls.__doc__ or "").split("\n\n")[0].replace("\n    ", " "),
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
            schema["properties"].pop(but)
            schema["required"].remove(but)
        definitions[cls.__name__] = schema
    return {"$ref": f"#/$defs/{cls.__name__}"}


def _type_schema(hint: Any, definitions: dict[str, object]) -> dict[str, object]:
    hint, allowed = bare(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if allowed is not None and allowed.values:
        return {"enum": list(allowed.values)}
    if hint in _NAMES:
        minimum = {} if allowed is None else {"minimum": allowed.minimum}
        return {"type": _NAMES[hint], **minimum}
    if dataclasses.is_dataclass(hint):
        return _reference(hint, definitions)
    if origin in UNIONS:
        each = [_type_schema(arg, definitions) for arg in args]
        if not all(set(schema) <= {"type", "minimum"} for schema in each):
            return {"anyOf": each}
        names = [schema.pop("type") for schema in each]
        merged = {key: value for schema in each for key, value in schema.items()}
        wanted = [name for name in names if name != "integer" or "number" not in names]
        return {"type": wanted, **merged}
    if origin in (list, tuple):
        return {"type": "array", "items": _type_schema(args[0], definitions)}
    if origin in MAPPINGS:
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


def schemas() -> dict[str, str]:
    """Return the schemas by the name of their file: ``memprof.report/2`` is ``report-2``."""
    found = {}
    for cls in TYPES:
        name = cls.SCHEMA.removeprefix("memprof.").replace("/", "-")
        text = json.dumps(json_schema(cls), indent=1, ensure_ascii=False)
        found[f"{name}.schema.json"] = text + "\n"
    return found


def main() -> None:
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name, text in schemas().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
