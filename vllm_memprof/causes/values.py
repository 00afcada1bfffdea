"""What the figures of a message bear out, and what they compute. Sizes are GiB, as printed."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor

Groups = Mapping[str, str | None]
_UNITS = {"TiB": 1024.0, "GiB": 1.0, "GB": 1.0, "MiB": 1 / 1024, "MB": 1 / 1024, "KiB": 1 / 1048576}


def gib(groups: Groups, name: str) -> float | None:
    """Return a size of a message: the group ``name``, its unit in ``name_unit``, else GiB."""
    for key in (name, f"{name}2"):  # the second form of a message
        number = groups.get(key)
        if number is not None:
            return float(number.replace(",", "")) * _UNITS[groups.get(f"{key}_unit") or "GiB"]
    return None


def _outside(groups: Groups) -> float | None:
    """Return what neither is free nor belongs to this process."""
    total, free = gib(groups, "total"), gib(groups, "free")
    own = gib(groups, "own") or gib(groups, "reserved")
    allocated, idle = gib(groups, "allocated"), gib(groups, "idle")
    if own is None and allocated is not None and idle is not None:
        own = allocated + idle
    return None if total is None or free is None or own is None else total - free - own


def has_neighbour(groups: Groups) -> bool:
    """Whether others use more of the device than contexts and rounding.

    That is 1 GiB of a process that the message names, else a quarter of the device.
    """
    other, total = _outside(groups), gib(groups, "total")
    named = gib(groups, "other")
    if named is not None and groups.get("own"):
        return named >= 1
    return other is not None and total is not None and other > 0.25 * total


def another_engine(groups: Groups) -> bool:
    """Whether as much is in use as one takes that was started alike, of most of a device."""
    free, total, asked = gib(groups, "free"), gib(groups, "total"), gib(groups, "asked")
    if free is None or total is None or asked is None:
        return False
    return asked >= 0.5 * total and asked <= total - free <= 1.15 * asked


def is_empty(groups: Groups) -> bool:
    """Whether no more of the device is in use than this process's own context takes."""
    free, total = gib(groups, "free"), gib(groups, "total")
    return free is not None and total is not None and total - free < max(0.5, 0.015 * total)


def gap_suffices(groups: Groups) -> bool:
    """Whether what is reserved and not allocated would have held what was asked for, by far."""
    asked, idle = gib(groups, "asked"), gib(groups, "idle")
    if idle is None:
        reserved, allocated = gib(groups, "reserved"), gib(groups, "allocated")
        idle = None if reserved is None or allocated is None else reserved - allocated
    total = gib(groups, "total") or 0
    return asked is not None and idle is not None and idle >= max(asked, 2, 0.05 * total)


def full_of_small(groups: Groups) -> bool:
    """Whether torch alone fills the device and a small block was one too many."""
    asked, total = gib(groups, "asked"), gib(groups, "total")
    allocated = gib(groups, "allocated")
    if asked is None or total is None or allocated is None:
        return False
    return asked < 1 and allocated > 0.97 * total


def is_large(groups: Groups) -> bool:
    """Whether a host cache is so large that several workers hardly fit into a host."""
    return (gib(groups, "size") or 0) >= 100


def longest(groups: Groups) -> str:
    """Return the longest request that fits: as the engine estimates, else by proportion."""
    if estimate := groups.get("estimate"):
        return estimate.replace(",", "")
    length, needed, there = groups.get("length"), gib(groups, "needed"), gib(groups, "there")
    if length is None or not needed or there is None:
        return ""
    tokens = floor(float(length.replace(",", "")) * there / needed) // 128 * 128
    return str(tokens) if tokens > 0 else ""


def stored(groups: Groups) -> str:
    """Return the tokens that the KV cache stores."""
    return (groups.get("stored") or "").replace(",", "")


def share_of_free(groups: Groups) -> str:
    """Return the highest share of which all is free, rounded down to 0.01."""
    free, total = gib(groups, "free"), gib(groups, "total")
    share = floor(100 * free / total) / 100 if free is not None and total else 0
    return f"{share:.2f}" if share >= 0.05 else ""
