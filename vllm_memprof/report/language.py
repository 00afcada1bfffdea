"""Reports in other languages: the same figures, names and flags, with the words of a catalogue.

A catalogue is a folder ``lang/<name>/`` of flat TOML files, one per area, with the English template
as the key and its translation as the value; both have the same parameters. A template that no file
has is printed in English.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from vllm_memprof.files import read_table
from vllm_memprof.text import Text, plain, translate

_HERE = Path(__file__).parent
ENGLISH, CHINESE = "en", "zh"
LANGUAGES = (ENGLISH, CHINESE)

Value = TypeVar("Value")


@dataclass(frozen=True)
class Language:
    """Puts texts, and whatever holds texts, into a language; English leaves them as they are."""

    name: str
    catalogue: Mapping[str, str]  # English template -> translated template

    def __call__(self, value: Value) -> Value:
        """Return a str, list, tuple or dataclass with each ``Text`` in it translated, and every
        other text plain: whatever is drawn comes through here.
        """
        return cast(Value, self._translated(value))

    def _translated(self, value: Any) -> Any:
        if isinstance(value, Text):
            return value if self.name == ENGLISH else translate(value, self.catalogue)
        if isinstance(value, str):
            return plain(value)
        if isinstance(value, (list, tuple)):
            made = [*map(self._translated, value)]
            same = all(one is other for one, other in zip(made, value, strict=True))
            return value if same else type(value)(made)
        if is_dataclass(value) and not isinstance(value, type):
            held = {f.name: getattr(value, f.name) for f in fields(value)}
            changed = {name: self._translated(each) for name, each in held.items()}
            same = all(changed[name] is held[name] for name in held)
            return value if same else replace(value, **changed)
        return value


@cache
def language(name: str) -> Language:
    """Return a language by its name.

    Raises:
        ValueError: not one of ``LANGUAGES``.
    """
    if name not in LANGUAGES:
        raise ValueError(f"{name!r} is not a language of the reports: {', '.join(LANGUAGES)}")
    if name == ENGLISH:
        return Language(name, {})
    return Language(
        name, {key: word for area in areas(name).values() for key, word in area.items()}
    )


def areas(name: str) -> dict[str, dict[str, str]]:
    """Return the files of a catalogue: area -> English template -> translated template."""
    return {path.stem: read_table(path) for path in (_HERE / "lang" / name).glob("*.toml")}
