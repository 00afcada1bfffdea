"""Documents of the recorded runs, letter for letter. ``make golden`` rewrites them."""

from __future__ import annotations

import pytest

from tests.golden.update import GOLDEN, HERE, main, output, present


@pytest.fixture(scope="module", autouse=True)
def update(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden", default=False):
        main()


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden(name: str) -> None:
    wanted = (HERE / name).read_text(encoding="utf-8")
    assert output(name) == wanted, "make golden rewrites it; read the diff before you commit it"


def test_every_file_is_compared() -> None:
    assert present() == GOLDEN
