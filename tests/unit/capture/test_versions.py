from __future__ import annotations

import pytest

from vllm_memprof.capture.versions import in_range


@pytest.mark.parametrize(
    ("version", "spec", "expected"),
    [
        ("0.23.0", ">=0.23,<0.24", True),
        ("0.23.0+empty", ">=0.23", True),
        ("0.24", ">=0.23,<0.24", False),
        ("0.25.1rc1", ">=0.25.1", True),
        ("0.9.2", "<0.11", True),
        ("0.11.0", "<0.12", True),
        ("v0.23.0.dev3+g1", ">=0.23,<0.23.1", True),
        ("1", ">=1.0.0,<1.0.1", True),
        (None, "<0.12", True),
        ("dev", ">=0.23", True),
    ],
)
def test_ranges(version: str | None, spec: str, expected: bool) -> None:
    assert in_range(version, spec) is expected


def test_an_unreadable_range_is_a_mistake_of_the_table() -> None:
    with pytest.raises(KeyError):
        in_range("0.23.0", "~=0.23")
