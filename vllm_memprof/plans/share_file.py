"""Instances of ``memprof share`` in a TOML file: ``[[instance]]`` with ``model``, and ``args`` and
``want`` where they are needed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from vllm_memprof.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SUFFIX = ".toml"
_KEYS = ("model", "args", "want")


@dataclass(frozen=True)
class Typed:
    """One instance, as the user wrote it."""

    model: str
    engine_args: list[str] = field(default_factory=list)
    wants: list[str] = field(default_factory=list)


def read_instances(path: Path) -> list[Typed]:
    """Return the instances of a file, in their order.

    Raises:
        UsageError: it cannot be read, or has something else than instances.
    """
    hint = '[[instance]] with model = "...", and optional args = [...] and want = [...]'
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"memprof share cannot read {path}: {error}", hint=hint) from error
    rows = content.pop("instance", None)
    if content or not isinstance(rows, list) or not rows:
        what = ", ".join(content) if content else "no [[instance]]"
        raise UsageError(f"{path}: {what}", hint=hint)
    return [_typed(row, f"{path}, instance {number}", hint) for number, row in enumerate(rows, 1)]


def _typed(row: object, where: str, hint: str) -> Typed:
    if not isinstance(row, dict) or not isinstance(row.get("model"), str):
        raise UsageError(f"{where}: model is missing", hint=hint)
    for name, found in row.items():
        if name not in _KEYS:
            raise UsageError(f"{where}: {name} is not known", hint=hint)
        strings = isinstance(found, list) and all(isinstance(each, str) for each in found)
        if name != "model" and not strings:
            raise UsageError(f"{where}: {name} is not a list of strings")
    return Typed(*(row.get(name, []) for name in _KEYS))
