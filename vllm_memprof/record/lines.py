"""One line of an event file. Standard library only."""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]


def parse_events(lines: list[bytes]) -> list[Event | None]:
    """Return the event of each line, as ``parse_event`` does; a whole file in one go."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        found = []
    if len(found) == len(lines) and all(isinstance(event, dict) for event in found):
        return found  # type: ignore[no-any-return]
    return [parse_event(line) for line in lines]


def parse_event(line: bytes) -> Event | None:
    """Return the event of a line; None where it is no JSON object, e.g. because it was cut."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None
