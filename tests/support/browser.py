"""A headless Chromium for the tests of what a person opens in one, through Playwright.

Nothing is installed: ``find_browser`` says what there is. The network is off.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
#: No name resolves, and no dialog of a first start comes.
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_LOCAL = ("file:", "data:", "blob:", "about:")


def find_browser() -> str | None:
    """Return the path of a Chromium or Chrome, or ``MEMPROF_BROWSER``; None without one."""
    names = [os.environ["MEMPROF_BROWSER"]] if os.environ.get("MEMPROF_BROWSER") else NAMES
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One page, and what it complained of: errors, warnings, dialogs, requests for non-files."""

    def __init__(self, page: Page, timeout: float) -> None:
        self.page = page
        self.complaints: list[str] = []
        self._timeout = timeout
        page.set_default_timeout(timeout * 1000)
        page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        page.on("console", self._console)
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        page.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(f"console: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith(_LOCAL):
            self.complaints.append(f"request: {request.url}")

    def open(self, file: Path) -> None:
        """Load a file from the disk and wait until it is complete."""
        self.page.goto(file.resolve().as_uri())

    def wait(self, done: Callable[[], bool]) -> None:
        """Ask until it is so; TimeoutError where it does not come about in time."""
        deadline = time.monotonic() + self._timeout
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError("the page does not get there in time")
            self.page.wait_for_timeout(100)

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression evaluates to, a promise included."""
        return self.page.evaluate(expression)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Set the window's size in CSS pixels, and the colour scheme that the reader prefers."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="dark" if dark else "light")


@contextmanager
def browsing(path: str, timeout: float = 120) -> Iterator[Browser]:
    """Yield a browser of the program at ``path``; an answer may take ``timeout`` seconds."""
    with sync_playwright() as playwright:
        program = playwright.chromium.launch(
            executable_path=path, args=[*FLAGS], chromium_sandbox=False
        )
        yield Browser(program.new_page(), timeout)
        program.close()
