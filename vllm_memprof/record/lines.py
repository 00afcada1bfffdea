"""One line of an event file. Standard library only."""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]


def parse_event(line: bytes) -> Event | None:
    """Return the event of a line; None where it is no JSON object, e.g. because it was cut."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None
