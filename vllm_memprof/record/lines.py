"""The lines of event files."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

from vllm_memprof.record.impossible import take_out
from vllm_memprof.redact import may_hold_secret, redact_data
from vllm_memprof.text import plain_data

Event = dict[str, Any]
#: What lines of one kind differ by: numbers, not digits at the end of a word. No word by which
#: secrets are found has so many digits, unless it is escaped. And names of a record in which such a
#: word stands.
_NOT_SECRET = re.compile(rb'(?<=[:,\[ ])\d{4,}|"(?:hook|values|\w*seconds)":')
_MOST_KEPT = 8192  # bytes of a line


@lru_cache(2048)
def _may_hold_secret(line: bytes) -> bool:
    return may_hold_secret(line.decode("latin-1"))


def parse_events(data: bytes, wrong: list[str] | None = None) -> tuple[list[Event], int]:
    """Return the events of a file's lines, and how many lines are none.

    Args:
        data: of the file.
        wrong: gets what was taken out because it cannot be, with the number of its line.
    """
    events, dropped = list[Event](), 0
    for number, line in enumerate(data.split(b"\n"), 1):
        event = parse_event(line) if line.strip() else None
        if event is not None:
            events.append(event)
            said = take_out(event)
            if wrong is not None:
                wrong += [f"line {number}: {each}" for each in said]
        else:
            dropped += bool(line.strip())
    return events, dropped


def parse_event(line: bytes) -> Event | None:
    """Return the event of a line, secrets replaced, texts plain; None where it is no JSON object,
    as if cut.
    """
    try:
        event = msgspec.json.decode(line, type=Event)
        if escaped := b"\\u" in line or not line.isascii():
            event = plain_data(event)
        look = _may_hold_secret if len(line) < _MOST_KEPT else _may_hold_secret.__wrapped__
        may = look(line if escaped else _NOT_SECRET.sub(b"0", line))
        return redact_data(event) if may else event
    except (ValueError, RecursionError):
        return None
