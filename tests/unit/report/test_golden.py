"""Every reporter's output on the recorded runs, letter for letter. ``python -m tests.golden.update`` rewrites it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.update import GOLDEN, HERE, outputs

OUTPUTS = dict(outputs())


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden(name: str) -> None:
    path: Path = HERE / name
    assert OUTPUTS[path] == path.read_text(encoding="utf-8"), "run: python -m tests.golden.update, and read the diff"


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in HERE.iterdir() if path.is_file() and path.suffix != ".py"} == set(GOLDEN)
