"""The only place where bytes become GiB, and text becomes bytes. GiB is 2**30."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import TypeVar

#: An amount in the unit that its name says; None: unknown, and never 0 instead.
Amount = int | None
Number = TypeVar("Number", int, float)
T = TypeVar("T")
K = TypeVar("K")

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_SUFFIX = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}
_SUFFIX |= {"k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
_SIZE = re.compile(r"^\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


def format_gib(size_bytes: int | float | None, digits: int = 2) -> str:
    """Return bytes as GiB text without the unit, ``-`` where the figure is unknown."""
    if size_bytes is None:
        return "-"
    return f"{size_bytes / GIB:,.{digits}f}"


def format_signed_gib(size_bytes: int | float | None, digits: int = 4) -> str:
    """Return a difference as GiB text with its sign."""
    sign = "+" if size_bytes and size_bytes > 0 else ""
    return sign + format_gib(size_bytes, digits)


def format_size(size_bytes: int | float | None) -> str:
    """Return bytes for a sentence: ``44.05 GiB``, ``22 MiB`` below 0.1 GiB, ``-`` if unknown."""
    if size_bytes is None:
        return "-"
    if abs(size_bytes) >= 0.1 * GIB:
        return f"{size_bytes / GIB:,.2f} GiB"
    return f"{size_bytes / MIB:.0f} MiB" if abs(size_bytes) >= MIB else f"{size_bytes:,.0f} bytes"


def format_rate(size_bytes: float | None, digits: int = 3) -> str:
    """Return signed bytes per request or hour as MiB text, ``+1.000``.

    ``0`` if it is nothing in these digits, ``-`` where it is unknown.
    """
    if size_bytes is None:
        return "-"
    return f"{size:+,.{digits}f}" if (size := round(size_bytes / MIB, digits)) else "0"


def format_ms(seconds: float | None) -> str:
    """Return seconds as milliseconds, ``-`` where they are unknown."""
    return "-" if seconds is None else f"{seconds * 1000:.2f}"


def format_bytes(size_bytes: int | None) -> str:
    """Return exact bytes with thousands separators, ``-`` where the figure is unknown."""
    if size_bytes is None:
        return "-"
    return f"{size_bytes:,}"


def parse_size(text: str) -> int:
    """Return the bytes of ``"43.5GiB"``, ``"512MiB"``, ``"4096"``.

    Raises:
        ValueError: not a size; decimal units (GB, MB) are refused because engines write GB and
            mean GiB.
    """
    match = _SIZE.match(text)
    if match is None or match.group(2).lower() not in _SUFFIX:
        raise ValueError(f"not a size: {text!r} (write bytes, or KiB, MiB, GiB)")
    number = float(match.group(1).replace(",", "").replace("_", ""))
    return round(number * _SUFFIX[match.group(2).lower()])


def only_known(figures: Iterable[T | None]) -> list[T]:
    """Return the figures that are known, in their order."""
    return [figure for figure in figures if figure is not None]


def known_items(figures: Mapping[K, T | None]) -> dict[K, T]:
    """Return the figures that are known, by their names."""
    return {name: figure for name, figure in figures.items() if figure is not None}


def minus(left: Number | None, right: Number | None) -> Number | None:
    """Return ``left - right``; None where either is unknown."""
    return None if left is None or right is None else left - right


def either(*figures: int | None) -> int | None:
    """Return the first figure that is known; None where none is."""
    return next(iter(only_known(figures)), None)


def floor_zero(figure: int | None) -> int | None:
    """Return a figure, 0 in place of one below; None where it is unknown."""
    return None if figure is None else max(0, figure)


def largest(figures: Iterable[int | None]) -> int | None:
    """Return the largest of those that are known; None where none is."""
    return max(only_known(figures), default=None)


def smallest(figures: Iterable[int | None]) -> int | None:
    """Return the smallest of those that are known; None where none is."""
    return min(only_known(figures), default=None)


def sum_or_none(sizes: Iterable[Number | None]) -> Number | None:
    """Return the sum of sizes, None where one of them is unknown; 0 of none."""
    known = list(sizes)
    return None if None in known else sum(only_known(known))


def product_or_none(*figures: int | None) -> int | None:
    """Return the product of figures, None where one of them is unknown."""
    return None if None in figures else prod(figure or 0 for figure in figures)


def sum_known(sizes: Iterable[Number | None]) -> Number | None:
    """Return the sum of the sizes that are known; None where none is."""
    known = only_known(sizes)
    return sum(known) if known else None


def one_line(text: str, limit: int = 500) -> str:
    """Return any text as one line of at most ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
