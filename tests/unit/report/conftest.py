"""A headless browser for the tests of what a person opens in one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, browsing, find_browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        if os.environ.get("MEMPROF_REQUIRE_BROWSER"):
            pytest.fail("MEMPROF_REQUIRE_BROWSER is set, and no Chromium or Chrome was found")
        pytest.skip("no Chromium or Chrome on this machine (apt-get install chromium)")
    with browsing(path) as browser:
        yield browser
