"""Writes JSON piece by piece, so that a report of hundreds of ranks is never whole in memory.

A value is spread over lines down to some level; below that an object is one line, and a list has a
line per element. The encoder in C does nearly all of the work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from vllm_memprof.record.codec import to_json

#: Levels with a line per key: in a report, down to the keys of a phase or of a reading of the
#: device.
LEVELS = 5
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def json_pieces(value: Any, levels: int = LEVELS) -> Iterator[str]:
    """JSON text of a value, in pieces that make one document with a newline at its end.

    Args:
        value: what ``json`` takes; an iterator stands for a list, used one element at a time.
        levels: objects at this depth and below are one line each; the whole is depth 0.

    Raises:
        ValueError: a figure that JSON cannot hold (NaN), met only when its piece is asked for.
    """
    yield from _pieces(value, 0, levels)
    yield "\n"


def _pieces(value: Any, depth: int, levels: int) -> Iterator[str]:
    if isinstance(value, dict) and value and depth < levels:
        yield from _joined(
            ((f"{_encode(str(key))}: ", item) for key, item in value.items()), "{}", depth, levels
        )
    elif isinstance(value, Iterator) or (
        isinstance(value, list) and any(isinstance(i, (dict, list)) for i in value)
    ):
        yield from _joined((("", item) for item in value), "[]", depth, levels)
    else:
        yield _encode(value)


def _joined(
    items: Iterator[tuple[str, Any]], brackets: str, depth: int, levels: int
) -> Iterator[str]:
    before = brackets[0]
    for name, item in items:
        yield f"{before}\n{' ' * (depth + 1)}{name}"
        yield from _pieces(item, depth + 1, levels)
        before = ","
    yield f"\n{' ' * depth}{brackets[1]}" if before == "," else brackets


def render_result_json(found: object) -> str:
    """Return a result but a report as text; the first key names the schema."""
    return json.dumps(to_json(found), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
