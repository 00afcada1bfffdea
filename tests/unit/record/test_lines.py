"""One line of an event file."""

from __future__ import annotations

import pytest

from vllm_memprof.record.lines import parse_event


def test_an_event_is_an_object() -> None:
    assert parse_event(b'{"kind": "phase", "t_ns": 1}') == {"kind": "phase", "t_ns": 1}


@pytest.mark.parametrize("line", [b"", b'{"kind": "ph', b"[1]", b"3", b"\xff{}", b"[" * 100_000])
def test_anything_else_is_none(line: bytes) -> None:
    assert parse_event(line) is None
