"""The option ``--update-golden``: rewrite the golden files instead of comparing with them."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/golden from what the reporters say now",
    )
