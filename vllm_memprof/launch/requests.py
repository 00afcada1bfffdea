"""Requests of an offline run: how many have ended, by the lines that its driver prints."""

from __future__ import annotations

import re
from collections import deque

from vllm_memprof.text import Text, text

_TO_RUN = re.compile(r"requests to run: (\d+)")
_ENDED = re.compile(r"request (\d+)/(\d+): (.*)")
_FIGURES = re.compile(r"(\d+) prompt tokens, (\d+) output tokens, ([\d.]+) s, (\d+) s left")


class Requests:
    """How many requests have ended, of how many, and until when the others will.

    Fed from the thread that reads the engine's output, read from the launcher's loop.
    """

    def __init__(self) -> None:
        self.done = 0
        self.total: int | None = None  # None: the driver has not said
        self.end_t_ns: int | None = None  # CLOCK_MONOTONIC, by the mean of the requests so far
        self.fresh: deque[Text] = deque()  # a line for each that has ended, until it is shown

    def read(self, line: str, now_ns: int) -> None:
        """Take in a line of the engine's output."""
        if to_run := _TO_RUN.fullmatch(line):
            self.total = int(to_run[1])
        ended = _ENDED.fullmatch(line)
        if ended is None:
            return
        self.done, self.total, what = int(ended[1]), int(ended[2]), ended[3]
        if figures := _FIGURES.fullmatch(what):
            prompt, output, took, left = figures.groups()
            self.end_t_ns = now_ns + int(left) * 1_000_000_000
            what = text(
                "{prompt} prompt tokens, {output} output tokens, {took} s, {left} s left",
                prompt=prompt,
                output=output,
                took=took,
                left=left,
            )
        counts = {"done": self.done, "total": self.total}
        self.fresh.append(text("request {done}/{total}: {what}", **counts, what=what))
