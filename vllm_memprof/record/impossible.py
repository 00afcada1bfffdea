"""Figures of a record that cannot be: they are taken out, so that they are unknown, and named.

A file that was damaged or edited may have any number; none of them is to change a report in
silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

#: A double holds every integer up to here, and no device has as many bytes.
_MOST = 1 << 53
#: Figures that are differences, or what an engine has left, which may be below zero.
_SIGNED = re.compile(
    "non_torch|increase|left_|kv_cache|available|delta|graph|planner|planned|headroom|residual"
    "|difference|unexplained|missing|other_processes"
)
_COUNTS = re.compile(
    "tokens|blocks|block_size|layers|max_model_len|prompt_tokens|output_tokens|kv_blocks_(used|total)"
    "|running|waiting|steps|seconds|folded|alloc_retries|ooms|world_size"
)
#: What is at most the other, in any reading; in a snapshot besides, where peaks are always known.
_AT_MOST = (
    ("allocated_bytes", "reserved_bytes"),
    ("device_free_bytes", "device_total_bytes"),
    ("kv_blocks_used", "kv_blocks_total"),
)
_PEAKS = (
    ("allocated_bytes", "allocated_peak_bytes"),
    ("reserved_bytes", "reserved_peak_bytes"),
    ("process_bytes", "device_total_bytes"),
)


def take_out(event: dict[str, Any]) -> list[str]:
    """Set the figures of an event that cannot be to None; return what was wrong, in words."""
    return list(_wrong(event))


@lru_cache(4096)
def _range(name: str) -> tuple[bool, bool]:
    """Return whether a figure of this name cannot be below zero, and whether it has a most."""
    size = name.endswith("bytes")
    low = (size and not _SIGNED.search(name)) or _COUNTS.fullmatch(name) is not None
    return low, size or low


def _wrong(held: dict[str, Any], signed: str = "") -> Iterator[str]:
    """Say what is wrong; a figure of the name ``signed`` may be below zero, of "delta" all."""
    for name, value in list(held.items()):
        if isinstance(value, dict):
            said = list(_wrong(value, name if name == "delta" else ""))
            yield from said
            if said and "peak_bytes" in value:  # a counter is known or not there
                del held[name]
        elif isinstance(value, list):
            for number, each in enumerate(value):
                if isinstance(each, dict):
                    yield from (f"{name} {number}, {said}" for said in _wrong(each, "bytes"))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            low, most = _range(name)
            low = low and signed not in (name, "delta")
            if (low and value < 0) or (most and not -_MOST < value < _MOST):
                held[name] = None
                yield f"{name} is {value}"
    for less, more in (
        ()
        if signed == "delta"
        else _AT_MOST + (_PEAKS if "t_ns" in held and "kind" not in held else ())
    ):
        one, other = held.get(less), held.get(more)
        if isinstance(one, (int, float)) and isinstance(other, (int, float)) and one > other:
            held[less] = held[more] = None
            yield f"{less} {one:,} is above {more} {other:,}"
