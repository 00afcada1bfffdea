"""The display while the engine runs. All of it goes to stderr; stdout is left to the report.

``LiveView`` repaints a small table, one row per rank, with the engine's output scrolling above it;
``PlainView`` prints a line per finished phase. Both are fed from the launcher's loop and, for
output, from the log pump's thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from vllm_memprof.launch.progress import DonePhase, EngineProgress, ProcessProgress
from vllm_memprof.units import format_gib

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

#: Readings of the view: column head, snapshot field.
READINGS = (
    ("reserved", "reserved_bytes"),
    ("peak", "allocated_run_peak_bytes"),
    ("non-torch", "non_torch_bytes"),
)
#: Phases that come by the dozen; they stay out of the lists of finished phases.
_MINOR = ("communicator", "empty_cache")
_REPAINT_NS = 200_000_000
#: Characters of the phase column: fixed, so that the table does not jump about.
_PHASE_WIDTH = len("mm_profile in profile_run")


class PlainView:
    """A line per finished phase, for logs, pipes and ``--quiet``.

    Args:
        title: first line, e.g. the model and the run folder; None prints none.
        start_ns: CLOCK_MONOTONIC at launch; times of the lines count from it.
        show_output: repeat the engine's output.
        stream: where to; default stderr.
    """

    def __init__(
        self, title: str | None, start_ns: int, show_output: bool, stream: BinaryIO | None = None
    ) -> None:
        self._start_ns = start_ns
        self._show_output = show_output
        self._stream = stream or sys.stderr.buffer
        self._lock = threading.Lock()
        self._progress: EngineProgress | None = None
        self._seen: dict[str, int] = {}
        self._at_line_start = True
        if title is not None:
            self.note(title)

    def update(self, progress: EngineProgress, last_line: str = "") -> None:
        self._progress = progress
        self._print_phases(named_only=True)

    def _print_phases(self, named_only: bool) -> None:
        """Print what is new; phases of a worker that has not said its rank yet can wait."""
        for process in self._progress.processes if self._progress else ():
            if named_only and process.label is None:
                continue
            for phase in process.done[self._seen.get(process.file, 0) :]:
                if phase.phase not in _MINOR:
                    self.note(describe_phase(process, phase, self._start_ns))
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
            self._write(
                (b"" if self._at_line_start else b"\n") + text.encode(errors="replace") + b"\n"
            )
            self._at_line_start = True

    def close(self) -> None:
        self._print_phases(named_only=False)

    def _write(self, data: bytes) -> None:
        try:
            self._stream.write(data)
            self._stream.flush()
        except (OSError, ValueError):
            self._show_output = False  # the terminal is gone; the run goes on


def describe_phase(process: ProcessProgress, phase: DonePhase, start_ns: int) -> str:
    """Return ``  12.3s TP0 weight_load 9.17 GiB reserved, peak 9.17, non-torch 0.35 (2.1 s)``;
    unknown is ``-``."""
    figures = ", ".join(
        f"{head} {format_gib(phase.snapshot.get(name))}" for head, name in READINGS[1:]
    )
    took = (
        "" if phase.start_t_ns is None else f" ({(phase.end_t_ns - phase.start_t_ns) / 1e9:.1f} s)"
    )
    failed = f" FAILED: {phase.error}" if phase.error else ""
    at = f"{(phase.end_t_ns - start_ns) / 1e9:7.1f}s"
    reserved = format_gib(phase.snapshot.get("reserved_bytes"))
    return f"{at} {process.name} {phase.phase} {reserved} GiB reserved, {figures}{took}{failed}"


class GuardedView:
    """Keeps the errors of a view away from the run: a terminal that is gone must not end the
    engine.

    Args:
        view: what draws; dropped at its first failure.
    """

    def __init__(self, view: PlainView | LiveView) -> None:
        self._view: PlainView | LiveView | None = view

    def update(self, progress: EngineProgress, last_line: str = "") -> None:
        if (view := self._view) is not None:
            self._try(lambda: view.update(progress, last_line))

    def output(self, chunk: bytes) -> None:
        if (view := self._view) is not None:
            self._try(lambda: view.output(chunk))

    def note(self, text: str) -> None:
        if (view := self._view) is not None:
            self._try(lambda: view.note(text))

    def close(self) -> None:
        if (view := self._view) is not None:
            self._try(view.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._view = None
            if not isinstance(error, OSError):  # a mistake of ours, not a lost terminal
                with contextlib.suppress(OSError, ValueError):
                    print(f"memprof: the progress display failed: {error!r}", file=sys.stderr)


class LiveView:
    """A table that is repainted in place.

    The terminal belongs to the engine again once it is closed.

    Args:
        title, start_ns, show_output: as for ``PlainView``.
        console: on stderr by default.
    """

    def __init__(
        self, title: str, start_ns: int, show_output: bool, console: Console | None = None
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._start_ns = start_ns
        self._show_output = show_output
        self._console = console or Console(stderr=True, highlight=False)
        self._painted_ns = 0
        self._partial = b""
        self._output_lock = threading.Lock()
        self._plain: PlainView | None = None
        self._live = Live(console=self._console, auto_refresh=False, transient=True,
                          redirect_stdout=False, redirect_stderr=False,
                          vertical_overflow="crop")  # fmt: skip
        self._live.start()

    def update(self, progress: EngineProgress, last_line: str = "") -> None:
        now_ns = time.monotonic_ns()
        if self._plain is None and now_ns - self._painted_ns >= _REPAINT_NS:
            self._painted_ns = now_ns
            table = render_progress(
                progress, self._title, self._start_ns, now_ns, self._console.width
            )
            self._live.update(self._with_last_line(table, last_line), refresh=True)

    def output(self, chunk: bytes) -> None:
        """Scroll whole lines above the table; of a progress bar, print the last state."""
        if not self._show_output:
            return
        with self._output_lock:
            if self._plain is not None:
                self._plain.output(chunk)
                return
            from rich.text import Text

            whole, newline, self._partial = (self._partial + chunk).rpartition(b"\n")
            if newline:
                lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in whole.split(b"\n")]
                text = Text.from_ansi(b"\n".join(lines).decode(errors="replace"))
                self._console.print(text, soft_wrap=True)

    def note(self, text: str) -> None:
        from rich.text import Text

        if self._plain is not None:
            self._plain.note(text)
        else:
            self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Take the table away; what the engine prints from here on is passed through unchanged."""
        with self._output_lock:
            if self._plain is not None:
                return
            self._live.stop()
            self._plain = PlainView(None, self._start_ns, self._show_output)
            if self._partial:
                self._plain.output(self._partial)

    def _with_last_line(self, table: RenderableType, last_line: str) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        if self._show_output or not last_line:
            return table
        line = Text.from_ansi(last_line, style="dim", no_wrap=True, overflow="ellipsis")
        return Group(table, line)


def render_progress(
    progress: EngineProgress, title: str, start_ns: int, now_ns: int, width: int
) -> RenderableType:
    """Return the table of the live view: per rank the phase under way, its seconds, readings in
    GiB, finished phases."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Text.assemble(
        (title, "bold"), f"  {(now_ns - start_ns) / 1e9:.0f} s", no_wrap=True, overflow="ellipsis"
    )
    workers = progress.workers
    if not workers:
        started = [process.name for process in progress.processes if process.matters]
        waiting = (
            f"engine is starting ({', '.join(started)} up)" if started else "engine is starting"
        )
        return Group(head, Text(f"{waiting}; no rank has reported yet", style="dim"))
    table = Table(
        box=None, width=width, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline"
    )
    table.add_column("rank", no_wrap=True)
    table.add_column("phase", no_wrap=True, width=_PHASE_WIDTH, overflow="ellipsis")
    table.add_column("s", justify="right", no_wrap=True, width=5)
    for name, _ in READINGS:
        table.add_column(name, justify="right", no_wrap=True, min_width=6)
    table.add_column("done", no_wrap=True, ratio=1, overflow="ellipsis")
    for process in workers:
        table.add_row(*_row(process, now_ns))
    return Group(head, table, Text("reserved, peak (allocated) and non-torch in GiB", style="dim"))


def _row(process: ProcessProgress, now_ns: int) -> list[RenderableType]:
    from rich.text import Text

    if process.open:
        phase = Text(process.open[-1].phase, style="bold cyan")
        if len(process.open) > 1:
            phase.append(f" in {process.open[0].phase}", style="cyan")
        seconds = f"{max(0, now_ns - process.open[-1].t_ns) / 1e9:.1f}"
    else:
        phase, seconds = Text("…", style="dim"), ""
    readings = [format_gib(process.readings.get(field)) for _, field in READINGS]
    done = dict.fromkeys(
        entry.phase for entry in reversed(process.done) if entry.phase not in _MINOR
    )
    return [process.name, phase, seconds, *readings, Text(" ".join(done), style="green")]
