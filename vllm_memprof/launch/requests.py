"""Requests of an offline run: its driver's lines enter, a progress bar and plain lines leave."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_memprof.launch.status import Status
from vllm_memprof.redact import redact_text
from vllm_memprof.text import Text, text

if TYPE_CHECKING:
    from rich.console import RenderableType

_TO_RUN = re.compile(r"requests to run: (\d+)")
_ENDED = re.compile(r"request (\d+)/(\d+): (.*)")
_FIGURES = re.compile(r"(\d+) prompt tokens, (\d+) output tokens, ([\d.]+) s, (\d+) s left")
#: Bytes of a line at most; a longer one is none of the driver's.
_LONGEST = 4096
_BAR_WIDTH = 28


class Requests:
    """How many requests have ended, of how many, and for how long the others will take.

    Fed from the thread that reads the engine's output, read from the launcher's loop.
    """

    def __init__(self) -> None:
        self.done = 0
        self.total: int | None = None  # None: the driver has not said
        self._left: tuple[int, float] | None = None  # CLOCK_MONOTONIC, seconds left then
        self._partial = b""
        self._fresh: list[Text] = []
        self._lock = threading.Lock()

    def feed(self, chunk: bytes, now_ns: int) -> None:
        """Take in a chunk of the engine's output."""
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        self._partial = self._partial[-_LONGEST:]
        for raw in lines:
            if not raw.startswith(b"request"):
                continue
            line = raw[:_LONGEST].decode(errors="replace").rstrip()
            if to_run := _TO_RUN.fullmatch(line):
                self.total = int(to_run[1])
            ended = _ENDED.fullmatch(line)
            if ended is None:
                continue
            self.done, self.total, what = int(ended[1]), int(ended[2]), ended[3]
            counts = {"done": self.done, "total": self.total}
            said = text("request {done}/{total}: {what}", **counts, what=redact_text(what))
            if figures := _FIGURES.fullmatch(what):
                prompt, output, took, left = figures.groups()
                self._left = now_ns, float(left)
                said = text(
                    "request {done}/{total}: {prompt} prompt tokens, {output} output tokens, "
                    "{took} s, {left} s left",
                    **counts,
                    prompt=prompt,
                    output=output,
                    took=took,
                    left=left,
                )
            with self._lock:
                self._fresh.append(said)

    def fresh(self) -> list[Text]:
        """Return a line for each request that has ended since the last call."""
        with self._lock:
            lines, self._fresh = self._fresh, []
        return lines

    def left_s(self, now_ns: int) -> float | None:
        """Return the seconds that are left, by the mean of the requests so far; None: unknown."""
        if self._left is None:
            return None
        at_ns, seconds = self._left
        return max(0.0, seconds - (now_ns - at_ns) / 1e9)


def describe_memory(status: Status, sampled: bool) -> Text | None:
    """Return the memory of the rank that holds the most, now and at its peak; None: unknown.

    Args:
        status: what is known.
        sampled: steps are sampled; otherwise the readings are of the last phase.
    """
    most = status.highest("reserved_bytes")
    if most is None:
        return None
    memory = text(
        "{who}: allocated {allocated:gib} GiB (peak {allocated_peak:gib}), "
        "reserved {reserved:gib} (peak {reserved_peak:gib})",
        who=most.label,
        allocated=most.reading("allocated_bytes"),
        allocated_peak=most.reading("allocated_run_peak_bytes"),
        reserved=most.reading("reserved_bytes"),
        reserved_peak=most.reading("reserved_run_peak_bytes"),
    )
    return memory if sampled else text("{what} at the last phase", what=memory)


def render_requests(
    requests: Requests, status: Status, now_ns: int, *, sampled: bool, say: Callable[[str], str]
) -> RenderableType:
    """Return a bar of the requests with the time that is left, and memory under it."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text as Painted

    left_s = requests.left_s(now_ns)
    left = text("time left unknown")
    if left_s is not None:
        minutes, seconds = divmod(round(left_s), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        left = text("{clock} left", clock=clock)
    total = requests.total or 0
    bar = Table.grid(padding=(0, 2, 0, 0))
    bar.add_row(
        say(text("requests {done}/{total}", done=requests.done, total=total)),
        ProgressBar(total, requests.done, width=_BAR_WIDTH, complete_style="cyan"),
        say(left),
    )
    memory = describe_memory(status, sampled)
    note = say(text("GiB; peaks since the process began, its start-up included"))
    lines = [] if memory is None else [Painted(say(memory), no_wrap=True, overflow="ellipsis")]
    return Group(bar, *lines, Painted(note, style="dim", no_wrap=True, overflow="ellipsis"))
