"""Every reporter's output on the recorded runs, letter for letter. ``make golden`` rewrites it."""

from __future__ import annotations

import pytest

from tests.golden.update import CHECKS, DIFFS, GOLDEN, HERE, KEPT, main, output


@pytest.fixture(scope="module", autouse=True)
def update(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden", default=False):
        main()


@pytest.mark.parametrize("name", sorted({*GOLDEN, *DIFFS, *CHECKS}))
def test_golden(name: str) -> None:
    wanted = (HERE / name).read_text(encoding="utf-8")
    assert output(name) == wanted, "make golden rewrites it; read the diff before you commit it"


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in HERE.iterdir() if path.is_file() and path.suffix not in KEPT} == {
        *GOLDEN,
        *DIFFS,
        *CHECKS,
    }
