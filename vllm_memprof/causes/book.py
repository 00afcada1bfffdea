"""The book of errors: families of errors and what to change, read once from TOML files.

``errors`` has a file per origin; what one engine alone says and is changed by stands in its folder
(``failures.toml``). Each may have ``rows``, with ``defaults`` of them, and ``cures`` and
``patterns`` by name; the alternatives of a pattern in several files count together. A pattern is
one or several alternatives, of which ``@name`` is a pattern by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from vllm_memprof.causes import values
from vllm_memprof.engines import ENGINES
from vllm_memprof.files import read_table
from vllm_memprof.record.cause import KINDS, Cure
from vllm_memprof.text import titled

#: How near a row is to the root: of rows that match side by side the last of these counts.
WRAPPER, ROOT = "wrapper", "root"
RANKS = (WRAPPER, "symptom", ROOT)
#: Marks that the reader puts into the text where it knows more than one line says.
SERVING, AFTER_ANOTHER = "[[serving]]", "[[after a start that did not end]]"
#: Files after those of the engines. Of rows that match the same line the first counts.
_GENERAL = (
    *("words", "cures", "engines", "connectors", "host", "communication", "setup"),
    *("device_memory", "refused", "cann"),
)


@dataclass(frozen=True)
class Row:
    """One family of errors."""

    kind: str  # of record.cause.KINDS
    title: str  # what is wrong, in a sentence
    pattern: str  # of a line, or of several; a dot stays within its line
    example: str  # lines by which a reader knows it
    cures: tuple[Cure, ...]
    source: str = ""  # of the cure: a thread or documentation
    rank: str = ROOT
    beside: str = ""  # must stand around it, too
    unless: str = ""  # must not
    certain: bool = True  # the message itself says so
    memory: bool | None = None  # whether it is short; None: as the kind says
    quiet: bool = False  # it may stand in a line of level INFO or WARNING
    holds: Callable[..., bool] | None = None  # whether the figures of ``pattern`` bear it out
    #: What computes the value of a cure from the figures of ``pattern``.
    values: Mapping[Cure, Callable[..., str]] = field(default_factory=dict)

    @property
    def is_memory(self) -> bool:
        """Return whether memory of any sort was short."""
        return KINDS[self.kind] if self.memory is None else self.memory


class Book(NamedTuple):
    """All rows by origin, and what the reader knows lines by."""

    origins: Mapping[str, Sequence[Row]]
    patterns: Mapping[str, str]
    words: Mapping[str, Sequence[str]]


@cache
def read_book() -> Book:
    """Return the book, its files read."""
    general = Path(__file__).with_name("errors")
    places = {name: row.folder / "failures.toml" for name, row in ENGINES.items()}
    places |= {name: general / f"{name}.toml" for name in _GENERAL}
    found = {name: read_table(place) for name, place in places.items() if place.exists()}
    patterns: dict[str, str] = {}
    cures: dict[str, dict[str, Cure]] = {}
    for origin, file in found.items():
        for name, pattern in file.get("patterns", {}).items():
            each = _joined(pattern)
            patterns[name] = f"{patterns[name]}|{each}" if name in patterns else each
        for name, cure in file.get("cures", {}).items():
            said = {key: titled(cure[key]) for key in ("why", "action") if key in cure}
            engine = origin if origin in ENGINES else None
            cures.setdefault(name, {})[origin] = Cure(**{"engine": engine} | cure | said)
    origins: dict[str, list[Row]] = {}
    for origin, file in found.items():
        for row in file.get("rows", ()):
            entry = file.get("defaults", {}) | row
            computed = entry.get("values", {})
            # a row of an engine has its cures, any other those of every engine
            own = {
                cure: computed.get(name)
                for name in entry["cures"]
                for owner, cure in cures[name].items()
                if owner == origin or origin not in cures[name]
            }
            entry |= {
                "title": titled(entry["title"]),
                "holds": getattr(values, entry.get("holds", ""), None),
                "cures": tuple(own),
                "values": {cure: getattr(values, name) for cure, name in own.items() if name},
            }
            for name in ("pattern", "beside", "unless"):
                entry[name] = _joined(entry.get(name, ""), patterns)
            origins.setdefault(origin, []).append(Row(**entry))
    return Book(origins, patterns, found["words"]["words"])


def _joined(pattern: str | tuple[str, ...], named: Mapping[str, str] | None = None) -> str:
    alternatives = (pattern,) if isinstance(pattern, str) else pattern
    return "|".join((named or {}).get(each.removeprefix("@"), each) for each in alternatives)
