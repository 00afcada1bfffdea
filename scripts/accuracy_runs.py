"""The table of published runs: command lines and memory figures of starts on real NPUs.

In: a TOML file with a ``[[run]]`` for each. Out: `PublishedRun`. No engine and no plan here.

A figure keeps the digits that were printed: "43.40 GiB" stands for everything that rounds to it.
What the source does not tell is named in the row, never filled in.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from vllm_memprof.errors import UsageError
from vllm_memprof.units import GIB, MIB

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Figures of a start -> whether they are sizes in bytes; the others are counts.
FIGURES: dict[str, bool] = {
    "weights": True,
    "peak_activation": True,
    "non_torch": True,
    "kv_cache": True,
    "tokens": False,
    "concurrency": False,
    "graphs": True,
}
_UNITS = {"GiB": GIB, "MiB": MIB}
_PRINTED = re.compile(r"(-?\d+)(?:\.(\d+))? (GiB|MiB)")


@dataclass(frozen=True)
class PublishedFigure:
    """A published figure, bytes or a count, and the half of its last printed digit."""

    value: float
    half_unit: float = 0.0

    @property
    def low(self) -> float:
        return self.value - self.half_unit

    @property
    def high(self) -> float:
        return self.value + self.half_unit


@dataclass(frozen=True)
class StartLimit:
    """Two starts that differ in one option: the larger value did not start."""

    option: str  # without dashes
    starts: int
    fails: int


@dataclass(frozen=True)
class PublishedRun:
    """One row: a start on hardware as somebody published it."""

    id: str
    source: str
    release: str  # of vllm-ascend, as named or as its log lines tell
    device: str  # profile of the simulated device
    model: str
    engine: str = "vllm"
    args: list[str] = field(default_factory=list)
    added: list[str] = field(
        default_factory=list
    )  # defaults of that release, and what its log says
    why_added: str = ""
    env: dict[str, str] = field(default_factory=dict)
    stack: str | None = None  # nearest; None: the newest
    equation: str | None = None  # of the release, where the stack's is another one
    buffers_mib: int | None = None  # of every communicator, where the stack sizes them otherwise
    total_bytes: int | None = None  # of the device, where printed in bytes
    rank: int = 0
    published: dict[str, PublishedFigure] = field(default_factory=dict)
    limit: StartLimit | None = None
    fails: str = ""  # the start failed: kind of failure, as reports name it
    unknown: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    fitted: dict[str, str] = field(default_factory=dict)  # figure -> constants taken from this run
    explained: dict[str, str] = field(default_factory=dict)  # figure -> why its error is large
    unexplained: dict[str, str] = field(
        default_factory=dict
    )  # figure -> what is known of its error
    not_planned: str = ""  # why no stack can plan it
    inexact: bool = False  # counts for no statistic

    @property
    def engine_args(self) -> list[str]:
        return [*self.args, *self.added]

    @property
    def captures_graphs(self) -> bool:
        """Return True if the graphs have a published figure."""
        return "graphs" in self.published


def load_runs(path: Path) -> list[PublishedRun]:
    """Return the rows of a table.

    Raises:
        UsageError: the file cannot be read, is no TOML, or holds something else: with the row.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the published runs of {path}: {error}") from error
    return parse_runs(text, path)


def parse_runs(text: str, path: Path) -> list[PublishedRun]:
    """Return the rows of a table's text.

    Args:
        text: the TOML.
        path: where it is or will be, for messages.

    Raises:
        UsageError: as `load_runs`.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is no TOML: {error}") from error
    rows = table.get("run", [])
    if set(table) - {"run"} or not isinstance(rows, list):
        raise UsageError(f"{path} is no table of published runs: it has something beside [[run]]")
    runs = [_row(row, f"{path}, [[run]] {number}") for number, row in enumerate(rows, start=1)]
    names = [run.id for run in runs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{path} has two rows named {', '.join(twice)}")
    return runs


def parse_figure(name: str, given: object) -> PublishedFigure:
    """Return a figure: an integer is exact, "43.40 GiB" has the rounding of its digits.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        raise ValueError(f"{name} = {given!r} is no figure")
    if isinstance(given, float):
        digits = len(repr(given).partition(".")[2])
        return PublishedFigure(given, 0.5 * 10.0**-digits)
    if isinstance(given, int):
        return PublishedFigure(given)
    match = _PRINTED.fullmatch(given)
    if match is None or not FIGURES.get(name):
        raise ValueError(f'{name} = {given!r} is no size: bytes, or "43.40 GiB" as printed')
    whole, decimals, unit = match[1], match[2] or "", _UNITS[match[3]]
    return PublishedFigure(
        float(f"{whole}.{decimals or 0}") * unit, 0.5 * 10.0 ** -len(decimals) * unit
    )


def _row(row: Mapping[str, Any], where: str) -> PublishedRun:
    known = {each.name: each for each in fields(PublishedRun)}
    name = f"{where} ({row.get('id', 'without a name')})"
    if wrong := sorted(set(row) - set(known)):
        raise UsageError(f"{name} has unknown keys: {', '.join(wrong)}")
    for key in ("id", "source", "release", "device", "model"):
        if not isinstance(row.get(key), str) or not row[key]:
            raise UsageError(f"{name} needs {key}")
    values = dict(row)
    published = values.get("published", {})
    if wrong := sorted(set(published) - set(FIGURES)):
        hint = f"figures are {', '.join(FIGURES)}"
        raise UsageError(f"{name} has unknown figures: {', '.join(wrong)}", hint=hint)
    if not published and "limit" not in values and "fails" not in values:
        raise UsageError(f"{name} has neither a figure nor a limit, and does not say how it fails")
    try:
        values["published"] = {key: parse_figure(key, each) for key, each in published.items()}
        if "limit" in values:
            values["limit"] = StartLimit(**values["limit"])
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from error
    if bool(values.get("added")) != bool(values.get("why_added")):
        raise UsageError(f"{name}: added arguments and why_added go together")
    return PublishedRun(**values)
