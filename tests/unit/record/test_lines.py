"""The lines of event files: whole ones, and what is none."""

from __future__ import annotations

import pytest

from vllm_memprof.record.lines import parse_event, parse_events


def test_a_line_is_one_object() -> None:
    assert parse_event(b'{"kind": "phase", "t_ns": 1}') == {"kind": "phase", "t_ns": 1}


@pytest.mark.parametrize(
    "line",
    [b"", b'{"kind": "pha', b"[1]", b"1", b"null", b"\xff\x00junk", b'{"x": NaN}', b"[" * 10**5],
)
def test_anything_else_is_none(line: bytes) -> None:
    assert parse_event(line) is None


def test_lines_of_a_file_are_counted_where_they_are_none() -> None:
    assert parse_events(b'{"a": 1}\n\n[2]\n{"b": {"c": 3}}\n{"d"') == (
        [{"a": 1}, {"b": {"c": 3}}],
        2,
    )


def test_secrets_are_replaced() -> None:
    assert parse_event(b'{"detail": "--api-key sk-1234567890abcdefghij"}') == {
        "detail": "--api-key ***"
    }
