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

import msgspec

from vllm_memprof.accounting.model import Report
from vllm_memprof.check.outcomes import CheckResult
from vllm_memprof.compare.diff import Diff
from vllm_memprof.holders.rows import Who
from vllm_memprof.plans.calibrated import Calibrated
from vllm_memprof.plans.model import Fit, Sweep
from vllm_memprof.plans.share import DeviceShare
from vllm_memprof.record.codec import keys_of

FOLDER = Path(__file__).parents[1] / "vllm_memprof" / "report" / "schemas"
TYPES = (Report, Diff, CheckResult, Sweep, Fit, DeviceShare, Who, Calibrated)


def json_schema(cls: Any) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a dataclass. Objects are open: keys may be added.

    ``msgspec`` describes the fields; their comments, what is computed and the name of the schema
    are added. Every key is always written.
    """
    classes = {each.__name__: each for each in _classes(cls)}
    (top,), found = msgspec.json.schema_components(
        [cls], schema_hook=lambda kind: {"description": "any JSON"}, ref_template="#/$defs/{name}"
    )
    for name, schema in found.items():
        if name not in classes:  # a TypedDict says all itself
            schema.pop("title")
            continue
        of, names = classes[name], list(keys_of(classes[name]))
        properties = schema["properties"]
        for key in set(names) - properties.keys():
            hint = typing.get_type_hints(getattr(of, key).fget, include_extras=True)["return"]
            (properties[key],), _ = msgspec.json.schema_components(
                [hint], ref_template="#/$defs/{name}"
            )
        for key, comment in _comments(of).items():
            if key in properties:
                properties[key] = {**properties[key], "description": comment}
        for each in properties.values():
            each.pop("default", None)
        schema["properties"] = {key: properties[key] for key in names}
        schema["description"] = (of.__doc__ or "").split("\n\n")[0].replace("\n    ", " ")
        schema["required"] = names
        schema.pop("title")
    whole = found.pop(top["$ref"].rpartition("/")[2])
    whole["properties"] = {"schema": {"const": cls.SCHEMA}, **whole["properties"]}
    whole["required"] = ["schema", *whole["required"]]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": cls.SCHEMA}
    return {**head, **whole, "$defs": dict(sorted(found.items()))}


def _classes(kind: Any) -> set[Any]:
    """Return the dataclasses that a type is made of."""
    if not dataclasses.is_dataclass(kind):
        return set().union(*map(_classes, typing.get_args(kind)))
    hints = typing.get_type_hints(kind, include_extras=True)
    return {kind}.union(*map(_classes, hints.values()))


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
    """Return the schemas by the name of their file: ``memprof.report/3`` is ``report-3``."""
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
