"""Tensors of a model, as a checkpoint has them and as a worker holds them: rows of a few dozen.

Names differ by numbers alone, so tensors of one name, dtype and shape are one row, and each number
of the name is ``*``. Standard library only: engine processes make these rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
PARAMETER, BUFFER, ATTRIBUTE = KINDS = ("parameter", "buffer", "attribute")
SHARED = "shared"


@dataclass(frozen=True)
class TensorRow:
    """Tensors that differ in the numbers of their names. Sizes are of all of them, in bytes."""

    name: str  # with * for numbers
    dtype: str  # as torch spells it
    shape: list[int]  # of one
    count: int = 1
    bytes: int = 0  # of a worker: of their storages, each of which is in one row
    #: The first numbers of their names: of layers, where it has any.
    layers: list[int] = field(default_factory=list)
    #: Of a worker: the allocator's blocks behind them; None: they were not found.
    block_bytes: int | None = None
    #: parameter; buffer, which no checkpoint has; attribute, a tensor beside both; shared, of no
    #: module of the model.
    kind: str = PARAMETER
    draft: bool = False  # of the model that drafts
    #: Integers of the module that holds them, as the engine names them.
    facts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model's files, by their headers."""

    rows: list[TensorRow] = field(default_factory=list)


@dataclass(frozen=True)
class Loaded:
    """What one worker holds once its model is loaded: a ``weights`` event."""

    rows: list[TensorRow]
    #: The model's configuration, as the engine has it.
    config: dict[str, Any] = field(default_factory=dict)
    #: Ranks that divide a model: tp, pp, dp.
    ranks: dict[str, int] = field(default_factory=dict)
    #: Weights that a description quantises: name with * -> type -> layers.
    quantized: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    expandable: bool | None = None  # the allocator's segments grow; None: it was not read


def folded(name: str) -> tuple[str, list[int]]:
    """Return a tensor's name with ``*`` for its numbers, and the first of them, if there is one."""
    return _NUMBER.sub("*", name), [int(number) for number in _NUMBER.findall(name)[:1]]


def fold(tensors: Iterable[tuple[str, Mapping[str, Any], Mapping[str, int | None]]]) -> list[Any]:
    """Return tensors as the keys of ``TensorRow``.

    Args:
        tensors: name, what tensors of one row have in common, and sizes that are added up.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for full, common, sizes in tensors:
        name, layer = folded(full)
        key = name, repr(common)
        if (row := rows.get(key)) is None:
            row = rows[key] = {"name": name, **common, "count": 0, "layers": set()}
            row |= dict.fromkeys(sizes, 0)
        row["count"] += 1
        row["layers"].update(layer)
        for size, more in sizes.items():
            row[size] = None if None in (row[size], more) else row[size] + more
    return [{**row, "layers": sorted(row["layers"])} for row in rows.values()]
