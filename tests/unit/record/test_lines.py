"""One line of an event file."""

from __future__ import annotations

import pytest

from vllm_memprof.record.lines import parse_event, parse_events


def test_an_event_is_an_object() -> None:
    assert parse_event(b'{"kind": "phase", "t_ns": 1}') == {"kind": "phase", "t_ns": 1}


@pytest.mark.parametrize("line", [b"", b'{"kind": "ph', b"[1]", b"3", b"\xff{}", b"[" * 100_000])
def test_anything_else_is_none(line: bytes) -> None:
    assert parse_event(line) is None


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [b'{"a": 1}', b'{"a": 2}'],
        [b'{"a": 1}', b'{"a": 2'],
        [b'{"a": 1', b'"b": 2}'],
        [b'{"a": 1}, {"a": 2}', b'{"a": 3}'],
        [b"[1", b"2]", b'{"a": 1}, {"a": 2}'],
        [b'{"a": 1}', b"\xff{}", b'{"a": 2}'],
    ],
)
def test_lines_of_a_file_are_read_as_one_by_one(lines: list[bytes]) -> None:
    assert parse_events(lines) == [parse_event(line) for line in lines]
