"""Signals to the launcher, and their names."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def catch_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Hand SIGINT, SIGTERM and SIGHUP to ``note`` instead of ending the process. Main thread only.

    SIGHUP is left alone where it is ignored already (nohup).
    """
    caught = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        caught.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, frame: note(n)) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
