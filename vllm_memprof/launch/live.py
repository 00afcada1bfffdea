"""The display while the engine runs. All of it goes to stderr; stdout is left to the report.

``LiveView`` repaints a small table, one row per rank, and while the engine serves one line, with
the engine's output scrolling above it; or it takes the whole screen. ``PlainView`` prints a line
per finished phase, and now and then one while the engine serves. Both are fed from the launcher's
loop and, for output, from the log pump's thread.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from vllm_memprof.launch.keys import Keys
from vllm_memprof.launch.painting import (
    Shown,
    describe_memory,
    describe_phase,
    describe_serving,
    draw_ranks,
    draw_requests,
    draw_screen,
)
from vllm_memprof.launch.progress import EngineProgress
from vllm_memprof.text import join

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

#: Between two plain lines of a run that serves.
_PLAIN_NS = 60_000_000_000
#: Lines of memprof's own that the full screen shows.
_NOTES = 3
_MARK = "memprof "
#: Phases that come by the dozen: no line is printed of them.
_MINOR = ("communicator", "empty_cache")


class View:
    """Shows the progress of a run; this one shows nothing, for what only wants to know."""

    left = False  # the user has left it

    def update(self, progress: EngineProgress) -> None:
        pass

    def suspend(self) -> None:
        """Leave the terminal to others until the next update."""

    def output(self, chunk: bytes) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def _guarded(name: str) -> Callable[..., None]:
    """Return the method that calls that of each view, and drops a view at its first failure."""

    def call(self: GuardedView, *given: object) -> None:
        for view in list(self._views):
            try:
                getattr(view, name)(*given)
            except Exception as error:
                self._views.remove(view)
                if not isinstance(error, OSError):  # a mistake of ours, not a lost terminal
                    with contextlib.suppress(OSError, ValueError):
                        print(f"memprof: the progress display failed: {error!r}", file=sys.stderr)

    return call


class GuardedView(View):
    """Keeps the errors of views away from the run: a terminal that is gone must not end the engine.

    Args:
        views: what draws, and what else is told.
    """

    def __init__(self, *views: View) -> None:
        self._views = list(views)

    update = _guarded("update")
    suspend = _guarded("suspend")
    output = _guarded("output")
    note = _guarded("note")
    close = _guarded("close")


class PlainView(View):
    """A line per finished phase, for logs, pipes and ``--quiet``.

    Args:
        shown: its title is the first line.
        stream: where to; default stderr.
        title: whether there is one.
    """

    def __init__(self, shown: Shown, stream: BinaryIO | None = None, title: bool = True) -> None:
        self._shown = shown
        self._show_output = shown.output
        self._stream = stream or sys.stderr.buffer
        self._lock = threading.RLock()
        self._progress = EngineProgress()
        self._next_line_ns = 0
        self._last_line = ""
        self._seen: dict[str, int] = {}
        self._at_line_start = True
        if title:
            self.note(shown.say(shown.title))

    def update(self, progress: EngineProgress) -> None:
        self._progress, shown = progress, self._shown
        now_ns, lines = shown.clock(), list[str]()
        while shown.requests and progress.requests.fresh:
            said, memory = progress.requests.fresh.popleft(), describe_memory(progress, shown)
            lines.append(shown.say(said if memory is None else join(" | ", [said, memory])))
        self._print_phases(named_only=True)
        if progress.serves and now_ns >= self._next_line_ns:
            self._next_line_ns = now_ns + _PLAIN_NS
            line = describe_serving(progress, shown, now_ns)
            lines += [line] if line != self._last_line else []
            self._last_line = line
        for line in lines:
            self.note(f"{(now_ns - shown.start_ns) / 1e9:7.1f}s {line}")

    def _print_phases(self, named_only: bool) -> None:
        """Print what is new; phases of a worker that has not said its rank yet can wait."""
        for process in self._progress.processes:
            if named_only and process.label is None:
                continue
            for phase in process.done[self._seen.get(process.file, 0) :]:
                if phase.phase not in _MINOR:
                    self.note(describe_phase(process, phase, self._shown))
            self._seen[process.file] = len(process.done)

    def output(self, chunk: bytes) -> None:
        """Print a chunk of the engine's output, unchanged."""
        if self._show_output and chunk:
            with self._lock:
                self._write(chunk)
                self._at_line_start = chunk.endswith(b"\n")

    def note(self, text: str) -> None:
        """Print a line of memprof's own; never in the middle of a line of the engine."""
        with self._lock:
            self.end_line()
            self._write(text.encode(errors="replace") + b"\n")

    def end_line(self) -> None:
        """End a line of the engine that is half printed."""
        if not self._at_line_start:
            self._write(b"\n")
            self._at_line_start = True

    def close(self) -> None:
        self.update(self._progress)
        self._print_phases(named_only=False)

    def _write(self, data: bytes) -> None:
        try:
            self._stream.write(data)
            self._stream.flush()
        except (OSError, ValueError):
            self._show_output = False  # the terminal is gone; the run goes on


class LiveView(PlainView):
    """A table that is repainted in place, and a line once the engine serves; or a full screen.

    The terminal belongs to the engine again while it is suspended, and once it is closed.

    Args:
        shown: of the run.
        screen: take the whole screen until ``q`` is pressed.
        table: of a run that serves show the table of ranks, not one line.
        console: on stderr by default.
    """

    def __init__(
        self,
        shown: Shown,
        screen: bool = False,
        table: bool = False,
        console: Console | None = None,
    ) -> None:
        from rich.console import Console

        super().__init__(shown, title=False)
        self._table = table
        self._console = console or Console(stderr=True, highlight=False)
        self._keys = Keys() if screen else None
        self._partial = b""
        self._notes: collections.deque[str] = collections.deque(maxlen=_NOTES)
        self._live: Live | None = None
        self._start()

    def update(self, progress: EngineProgress) -> None:
        if self._keys is not None and "q" in self._keys.pressed().lower():
            self.close()
            self._keys, self.left = None, True
        with self._lock:
            live = self._live or self._start()
            live.update(self._painting(progress, self._shown.clock()), refresh=True)

    def suspend(self) -> None:
        """Take the display away; what the engine prints is passed through unchanged."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None
                super().output(self._partial)
                self._partial = b""

    def output(self, chunk: bytes) -> None:
        """Scroll whole lines above the display; of a progress bar, print the last state."""
        with self._lock:
            if self._live is None:
                super().output(chunk)
                return
            if not self._shown.output or self._keys is not None:
                return
            from rich.text import Text

            whole, newline, self._partial = (self._partial + chunk).rpartition(b"\n")
            if newline:
                lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in whole.split(b"\n")]
                printed = b"\n".join(lines).decode(errors="replace")
                self._console.print(Text.from_ansi(printed), soft_wrap=True)

    def note(self, text: str) -> None:
        from rich.text import Text

        with self._lock:
            if self._live is None:
                super().note(text)
            elif self._keys is not None:
                self._notes.append(text)
            else:
                self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Take the display away for good, or until the next update."""
        self.suspend()
        if self._keys is not None:
            self._keys.close()

    def _start(self) -> Live:
        from rich.live import Live

        with self._lock:
            self.end_line()
            self._live = Live(console=self._console, auto_refresh=False,
                              screen=self._keys is not None,
                              transient=self._keys is None, redirect_stdout=False,
                              redirect_stderr=False, vertical_overflow="crop")  # fmt: skip
            self._live.start()
            return self._live

    def _painting(self, progress: EngineProgress, now_ns: int) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        shown, width = self._shown, self._console.width
        if self._keys is not None:
            lines = [*progress.output, *self._notes]
            return draw_screen(progress, shown, lines, now_ns, self._console, self._keys.there)
        if progress.serves and not self._table:
            said = describe_serving(progress, shown, now_ns, width - len(_MARK))
            parts = (_MARK, "bold"), (said, "reverse")
            return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
        table = draw_ranks(progress, shown, now_ns, width)
        if shown.requests and (progress.requests.total or 0) > 1:
            return Group(table, draw_requests(progress, shown, now_ns))
        last = next(filter(None, reversed([*progress.output])), "")
        if progress.serves or shown.output or not last:
            return table
        return Group(table, Text.from_ansi(last, style="dim", no_wrap=True, overflow="ellipsis"))
