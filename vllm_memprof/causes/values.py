"""What the figures of a message bear out, and what they compute.

A function takes figures by their names in the pattern of its row; sizes are GiB. It is asked where
all that it needs are in the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from math import floor
from typing import TypeVar

_GIB = {"TiB": 1024.0, "GiB": 1.0, "MiB": 1 / 1024, "KiB": 1 / 1048576}
_Answer = TypeVar("_Answer")


def ask(
    function: Callable[..., _Answer], groups: Mapping[str, str | None], otherwise: _Answer
) -> _Answer:
    """Return what a function makes of the figures of a message, ``otherwise`` where it lacks some.

    Args:
        function: of this module.
        groups: of the pattern: ``x_unit`` is the unit of ``x``, and ``x2`` is ``x`` in the second
            form of the message.
        otherwise: where a figure that it needs is not there.
    """
    figures: dict[str, float] = {}
    for name, number in groups.items():
        if number and not name.endswith("_unit"):
            size = float(number.replace(",", "")) * _GIB[groups.get(f"{name}_unit") or "GiB"]
            figures[name.removesuffix("2")] = size
    if {"allocated", "idle"} <= figures.keys():
        figures["reserved"] = figures["allocated"] + figures["idle"]
    elif {"allocated", "reserved"} <= figures.keys():
        figures["idle"] = figures["reserved"] - figures["allocated"]
    wanted = signature(function).parameters.values()
    if any(each.default is each.empty and each.name not in figures for each in wanted):
        return otherwise
    return function(**{each.name: figures[each.name] for each in wanted if each.name in figures})


def has_neighbour(
    total: float,
    free: float,
    own: float | None = None,
    reserved: float | None = None,
    other: float | None = None,
) -> bool:
    """Return whether others use more of the device than contexts and rounding.

    That is 1 GiB of a process that the message names, else a quarter of the device.
    """
    if own and other is not None:
        return other >= 1
    process = own or reserved
    return process is not None and total - free - process > 0.25 * total


def another_engine(free: float, total: float, asked: float) -> bool:
    """Return whether as much is in use as one takes that was started alike, of most of a device."""
    return asked >= 0.5 * total and asked <= total - free <= 1.15 * asked


def is_empty(free: float, total: float) -> bool:
    """Return whether no more of the device is in use than this process's own context takes."""
    return total - free < max(0.5, 0.015 * total)


def gap_suffices(asked: float, idle: float, total: float = 0) -> bool:
    """Return whether what is reserved, not allocated would have held what was asked for, by far."""
    return idle >= max(asked, 2, 0.05 * total)


def over_limit(asked: float, reserved: float, allowed: float) -> bool:
    """Return whether the limit that the process was given, not the device, is too small."""
    return asked + reserved > allowed


def full_of_small(asked: float, total: float, allocated: float) -> bool:
    """Return whether torch alone fills the device and a small block was one too many."""
    return asked < 1 and allocated > 0.97 * total


def is_large(size: float) -> bool:
    """Return whether a host cache is so large that several workers hardly fit into a host."""
    return size >= 100


def grew(first: float, last: float) -> bool:
    """Return whether clearly more is in use after the last sleep than after the first."""
    return last > 1.2 * first + 1


def longest(length: float, needed: float, there: float, estimate: float | None = None) -> str:
    """Return the longest request that fits: as the engine estimates, else by proportion."""
    if estimate is not None:
        return f"{estimate:.0f}"
    tokens = floor(length * there / needed) // 128 * 128 if needed else 0
    return str(tokens) if tokens > 0 else ""


def as_said(said: float) -> str:
    """Return the figure that the message names."""
    return f"{said:.0f}"


def half_as_many(requests: float) -> str:
    """Return half of the requests that were run at a time, 256 at most."""
    return str(min(256, int(requests) // 2))


def share_of_free(free: float, total: float) -> str:
    """Return the highest share of which all is free, rounded down to 0.01."""
    share = floor(100 * free / total) / 100 if total else 0
    return f"{share:.2f}" if share >= 0.05 else ""
