"""Single keys from the terminal, while a full-screen view shows. Standard library only."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from typing import Any


class Keys:
    """Reads keys without Enter and without echo; Ctrl-C stays a signal.

    Where stdin is no terminal, or belongs to another job, there are no keys. Call ``close``: the
    terminal is given back as it was.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._before: list[Any] = []
        with contextlib.suppress(OSError, ValueError, termios.error):
            fd = sys.stdin.fileno()
            if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp():
                self._before = termios.tcgetattr(fd)
                tty.setcbreak(fd)
                self._fd = fd

    @property
    def there(self) -> bool:
        return self._fd is not None

    def pressed(self) -> str:
        """Return the keys pressed since the last call, without waiting."""
        if self._fd is None or not select.select([self._fd], [], [], 0)[0]:
            return ""
        try:
            return os.read(self._fd, 64).decode(errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(fd, termios.TCSADRAIN, self._before)
