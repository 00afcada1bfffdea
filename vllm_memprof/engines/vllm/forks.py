"""A function that runs in a fork of this process, and its answer."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Fork:
    """Runs a function in a process of its own, at once.

    Args:
        function: raises nothing that should be seen: it has said so itself.
        name: of the process.
    """

    def __init__(self, function: Callable[[], Any], name: str | None = None) -> None:
        context = multiprocessing.get_context("fork")
        self._answer, answer = context.Pipe(duplex=False)
        self.process = context.Process(target=_run, args=(function, answer), name=name)
        self.process.start()
        answer.close()

    def answer(self) -> Any:
        """Wait for its end; returns what the function returned, None where it ended without."""
        answer = None
        with contextlib.suppress(EOFError), self._answer:
            answer = self._answer.recv()
        self.process.join()
        return answer


def _run(function: Callable[[], Any], answer: Connection) -> None:
    status = 1
    try:
        answer.send(function())
        status = 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
