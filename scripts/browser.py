"""Drive a headless Chromium for tests and screenshots.

For the tests of the page and for its screenshots. Nothing is installed: ``find_browser`` says what
there is.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    # no name resolves: the network is off
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """Return the path of a Chromium or Chrome, or ``MEMPROF_BROWSER``; None without one."""
    names = [os.environ["MEMPROF_BROWSER"]] if os.environ.get("MEMPROF_BROWSER") else NAMES
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page.

    Args:
        path: of the program, see ``find_browser``.
        timeout: seconds that an answer may take.
    """

    def __init__(self, path: str, timeout: float = 120) -> None:
        self._path, self._timeout = path, timeout
        self.events: list[dict[str, Any]] = []
        self._rest = b""
        self._last_id = 0
        self._session: str | None = None

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(
            prefix="memprof-browser-", ignore_cleanup_errors=True
        )
        to_browser, self._write = (_high(fd) for fd in os.pipe())
        self._read, from_browser = (_high(fd) for fd in os.pipe())

        def connect() -> None:  # the browser reads commands from 3 and answers on 4
            os.dup2(to_browser, 3)
            os.dup2(from_browser, 4)

        command = [self._path, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=connect,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            targets = self.call("Target.getTargets")["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)[
                "sessionId"
            ]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
            offline = {
                "offline": True,
                "latency": 0,
                "downloadThroughput": 0,
                "uploadThroughput": 0,
            }
            self.call("Network.emulateNetworkConditions", **offline)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol and its result.

        Raises:
            RuntimeError: the browser refuses it, ended, or does not answer in time.
        """
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._timeout
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error'].get('message')}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            if not chunk:
                raise RuntimeError(
                    f"{self._path}: no answer to {waiting_for}" + ("" if ready else " in time")
                )
            self._rest += chunk
        text, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, page: Path) -> None:
        """Loads a file from the disk and waits until it is complete."""
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait(
            lambda: (
                self.value("document.readyState") == "complete"
                and self.value("location.protocol") == "file:"
            )
        )

    def wait(self, done: Callable[[], bool]) -> None:
        """Asks until it is so.

        Raises:
            RuntimeError: it does not come about in time.
        """
        deadline = time.monotonic() + self._timeout
        while not done():
            if time.monotonic() > deadline:
                raise RuntimeError("the page does not get there in time")
            time.sleep(0.1)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression evaluates to, a promise included."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """A key, down and up, where the focus is. ``code`` is its Windows virtual key code."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """The window's size in CSS pixels, and the colour scheme that the reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.value("new Promise(done => requestAnimationFrame(() => setTimeout(done, 300)))")

    def screenshot(self, target: Path, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        target.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Return console errors, warnings, exceptions, dialogs, requests for non-files so far."""
        self.value("1")  # what came before has arrived
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown" or method == "Page.javascriptDialogOpening":
                found.append(f"{method}: {params}")
            elif method == "Runtime.consoleAPICalled" and params["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(f"console: {params['args']}")
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(f"log: {params['entry']}")
            elif method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "blob:", "about:")):
                    found.append(f"request: {url}")
        return found


def _high(fd: int) -> int:
    """The same file under a number that 3 and 4 cannot collide with."""
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return copy
