"""The lines of event files."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_memprof.redact import may_hold_secret, redact_data

Event = dict[str, Any]


def parse_events(data: bytes) -> tuple[list[Event], int]:
    """Return the events of a file's lines, and how many lines are none."""
    lines = [line for line in data.split(b"\n") if line.strip()]
    events = [event for line in lines if (event := parse_event(line)) is not None]
    return events, len(lines) - len(events)


def parse_event(line: bytes) -> Event | None:
    """Return the event of a line, secrets replaced; None where it is no JSON object, as if cut."""
    try:
        event = msgspec.json.decode(line, type=Event)
    except (ValueError, RecursionError):
        return None
    return redact_data(event) if may_hold_secret(line.decode("latin-1")) else event
