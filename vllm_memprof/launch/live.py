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
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

from vllm_memprof.launch.keys import Keys
from vllm_memprof.launch.progress import DonePhase, EngineProgress, ProcessProgress
from vllm_memprof.launch.requests import Requests, describe_memory, render_requests
from vllm_memprof.launch.serving import describe_serving, render_status
from vllm_memprof.launch.status import RankBudget, Status, read_status
from vllm_memprof.redact import redact_text
from vllm_memprof.text import join, text
from vllm_memprof.units import format_gib

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

#: Readings of the view: column head, snapshot field.
READINGS = (
    (text("reserved"), "reserved_bytes"),
    (text("peak"), "allocated_run_peak_bytes"),
    (text("non-torch"), "non_torch_bytes"),
)
#: Phases that come by the dozen; they stay out of the lists of finished phases.
_MINOR = ("communicator", "empty_cache")
_REPAINT_NS = 200_000_000
#: Between two plain lines of a run that serves.
_PLAIN_NS = 60_000_000_000
#: Lines of the engine's output that the full screen may show.
_KEPT_LINES = 200
_MARK = "memprof "
#: Characters of the phase column: fixed, so that the table does not jump about.
_PHASE_WIDTH = len("mm_profile in profile_run")


@dataclass(frozen=True)
class Shown:
    """What a view has to know of the run beside its events."""

    title: str  # e.g. the model
    start_ns: int  # CLOCK_MONOTONIC at launch; times count from it
    output: bool = False  # repeat the engine's output
    sampled: bool = False  # the run samples its steps
    modelled: bool = False  # the profile of a simulated device sets memory outside torch
    foot: str = ""  # of the full screen: what Ctrl-C does
    leave: str = ""  # what q does there, where keys can be read
    clock: Callable[[], int] = time.monotonic_ns  # that of the events
    requests: bool = False  # show those that the driver of an offline run tells of
    say: Callable[[str], str] = str  # puts a text into the user's language

    def serving_line(self, status: Status, now_ns: int, width: int | None = None) -> str:
        """Return a run that serves as one line; see ``describe_serving``."""
        return describe_serving(
            status,
            now_ns,
            sampled=self.sampled,
            modelled=self.modelled,
            width=width,
            say=self.say,
        )


class View:
    """Shows the progress of a run; this one shows nothing, for what only wants to know."""

    def update(self, progress: EngineProgress, last_line: str = "") -> None:
        pass

    def suspend(self) -> None:
        pass

    def serve(self, budgets: Iterable[RankBudget]) -> None:
        pass

    def output(self, chunk: bytes) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class PlainView(View):
    """A line per finished phase, for logs, pipes and ``--quiet``.

    Args:
        shown: its title is the first line.
        stream: where to; default stderr.
    """

    def __init__(self, shown: Shown, stream: BinaryIO | None = None, title: bool = True) -> None:
        self._shown = shown
        self._show_output = shown.output
        self._stream = stream or sys.stderr.buffer
        self._lock = threading.Lock()
        self._progress: EngineProgress | None = None
        self._budgets: list[RankBudget] | None = None  # None: the engine does not serve yet
        self._next_line_ns = 0
        self._last_line = ""
        self._seen: dict[str, int] = {}
        self._at_line_start = True
        self._requests = Requests() if shown.requests else None
        if title:
            self.note(shown.say(shown.title))

    def update(self, progress: EngineProgress, last_line: str = "") -> None:
        self._progress = progress
        self._print_requests()
        self._print_phases(named_only=True)
        now_ns, shown = self._shown.clock(), self._shown
        if self._budgets is not None and now_ns >= self._next_line_ns:
            self._next_line_ns = now_ns + _PLAIN_NS
            line = shown.serving_line(read_status(progress, self._budgets), now_ns)
            if line != self._last_line:
                self._last_line = line
                self._note_at(now_ns, line)

    def serve(self, budgets: Iterable[RankBudget]) -> None:
        """The engine serves from here on."""
        self._budgets = list(budgets)

    def _note_at(self, now_ns: int, line: str) -> None:
        self.note(f"{(now_ns - self._shown.start_ns) / 1e9:7.1f}s {line}")

    def _print_requests(self) -> None:
        """Print a line per request that has ended."""
        if self._requests is None or self._progress is None:
            return
        for said in self._requests.fresh():
            memory = describe_memory(read_status(self._progress), self._shown.sampled)
            line = said if memory is None else join(" | ", [said, memory])
            self._note_at(self._shown.clock(), self._shown.say(line))

    def _print_phases(self, named_only: bool) -> None:
        """Print what is new; phases of a worker that has not said its rank yet can wait."""
        for process in self._progress.processes if self._progress else ():
            if named_only and process.label is None:
                continue
            for phase in process.done[self._seen.get(process.file, 0) :]:
                if phase.phase not in _MINOR:
                    said = describe_phase(process, phase, self._shown.start_ns, self._shown.say)
                    self.note(said)
            self._seen[process.file] = len(process.done)

    def output(self, chunk: bytes) -> None:
        """Print a chunk of the engine's output, unchanged."""
        if self._requests is not None:
            self._requests.feed(chunk, self._shown.clock())
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

    def end_line(self) -> None:
        """End a line of the engine that is half printed."""
        with self._lock:
            if not self._at_line_start:
                self._write(b"\n")
                self._at_line_start = True

    def close(self) -> None:
        self._print_requests()
        self._print_phases(named_only=False)

    def _write(self, data: bytes) -> None:
        try:
            self._stream.write(data)
            self._stream.flush()
        except (OSError, ValueError):
            self._show_output = False  # the terminal is gone; the run goes on


def describe_phase(
    process: ProcessProgress, phase: DonePhase, start_ns: int, say: Callable[[str], str] = str
) -> str:
    """Return ``  12.3s TP0 weight_load 9.17 GiB reserved, peak 9.17, non-torch 0.35 (2.1 s)``;
    unknown is ``-``."""
    figures = text(
        "{reserved:gib} GiB reserved, peak {peak:gib}, non-torch {non_torch:gib}",
        reserved=phase.snapshot.get("reserved_bytes"),
        peak=phase.snapshot.get("allocated_run_peak_bytes"),
        non_torch=phase.snapshot.get("non_torch_bytes"),
    )
    took = (
        "" if phase.start_t_ns is None else f" ({(phase.end_t_ns - phase.start_t_ns) / 1e9:.1f} s)"
    )
    failed = f" {say(text('FAILED: {error}', error=phase.error))}" if phase.error else ""
    at = f"{(phase.end_t_ns - start_ns) / 1e9:7.1f}s"
    return f"{at} {process.name} {phase.phase} {say(figures)}{took}{failed}"


class GuardedView(View):
    """Keeps the errors of views away from the run: a terminal that is gone must not end the engine.

    Args:
        views: what draws, and what else is told; each is dropped at its first failure.
    """

    def __init__(self, *views: View) -> None:
        self._views = list(views)

    def update(self, progress: EngineProgress, last_line: str = "") -> None:
        self._each(lambda view: view.update(progress, last_line))

    def suspend(self) -> None:
        self._each(lambda view: view.suspend())

    def serve(self, budgets: Iterable[RankBudget]) -> None:
        known = list(budgets)
        self._each(lambda view: view.serve(known))

    def output(self, chunk: bytes) -> None:
        self._each(lambda view: view.output(chunk))

    def note(self, text: str) -> None:
        self._each(lambda view: view.note(text))

    def close(self) -> None:
        self._each(lambda view: view.close())

    def _each(self, action: Callable[[View], None]) -> None:
        for view in list(self._views):
            try:
                action(view)
            except Exception as error:
                self._views.remove(view)
                if not isinstance(error, OSError):  # a mistake of ours, not a lost terminal
                    with contextlib.suppress(OSError, ValueError):
                        print(f"memprof: the progress display failed: {error!r}", file=sys.stderr)


class LiveView(View):
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

        self._shown = shown
        self._table = table
        self._console = console or Console(stderr=True, highlight=False)
        self._keys = Keys() if screen else None
        self._budgets: list[RankBudget] | None = None  # None: the engine does not serve yet
        self._painted_ns = 0
        self._partial = b""
        self._kept: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._output_lock = threading.RLock()
        self._plain = PlainView(replace(shown, requests=False), title=False)
        self._requests = Requests() if shown.requests else None
        self._live: Live | None = None
        self.left = False  # the full screen was left with q
        self._start()

    def update(self, progress: EngineProgress, last_line: str = "") -> None:
        if self._keys is not None and "q" in self._keys.pressed().lower():
            self._leave_screen()
        with self._output_lock:
            painted_ns = time.monotonic_ns()
            if self._live is None or painted_ns - self._painted_ns < _REPAINT_NS:
                return
            self._painted_ns = painted_ns
            painting = self._painting(progress, last_line, self._shown.clock())
            self._live.update(painting, refresh=True)

    def suspend(self) -> None:
        """Take the display away; what the engine prints is passed through unchanged."""
        with self._output_lock:
            if self._live is not None:
                self._live.stop()
                self._live = None
                self._plain.output(self._partial)
                self._partial = b""

    def serve(self, budgets: Iterable[RankBudget]) -> None:
        """Show again: the engine serves from here on."""
        self._budgets = list(budgets)
        self._painted_ns = 0
        self._start()

    def output(self, chunk: bytes) -> None:
        """Scroll whole lines above the display; of a progress bar, print the last state."""
        if self._requests is not None:
            self._requests.feed(chunk, self._shown.clock())
        with self._output_lock:
            if self._live is None:
                self._plain.output(chunk)
                return
            if not self._shown.output and self._keys is None:
                return
            from rich.text import Text

            whole, newline, self._partial = (self._partial + chunk).rpartition(b"\n")
            if newline:
                lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in whole.split(b"\n")]
                printed = b"\n".join(lines).decode(errors="replace")
                if self._keys is not None:
                    self._kept.extend(map(redact_text, printed.splitlines()))
                else:
                    self._console.print(Text.from_ansi(printed), soft_wrap=True)

    def note(self, text: str) -> None:
        from rich.text import Text

        with self._output_lock:
            if self._live is None:
                self._plain.note(text)
            elif self._keys is not None:
                self._kept.append(text)
            else:
                self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Take the display away for good."""
        self.suspend()
        if self._keys is not None:
            self._keys.close()

    def _start(self) -> None:
        from rich.live import Live

        with self._output_lock:
            if self._live is None:
                self._plain.end_line()
                self._live = Live(console=self._console, auto_refresh=False,
                                  screen=self._keys is not None,
                                  transient=self._keys is None, redirect_stdout=False,
                                  redirect_stderr=False, vertical_overflow="crop")  # fmt: skip
                self._live.start()

    def _leave_screen(self) -> None:
        self.suspend()
        assert self._keys is not None
        self._keys.close()
        self._keys = None
        self.left = True
        if self._shown.output and self._kept:
            said = text(
                "the last of {count} lines that the engine printed meanwhile; all of them are in "
                "engine.log",
                count=len(self._kept),
            )
            self._plain.note(f"memprof: {self._shown.say(said)}")
            for line in list(self._kept)[-5:]:
                self._plain.note(line)
        self._kept.clear()
        self._painted_ns = 0
        self._start()

    def _painting(self, progress: EngineProgress, last_line: str, now_ns: int) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        shown, width = self._shown, self._console.width
        if self._keys is not None:
            return render_screen(
                progress,
                self._budgets,
                shown,
                list(self._kept),
                now_ns,
                self._console,
                self._keys.there,
            )
        if self._budgets is None:
            table = render_progress(progress, shown, now_ns, width)
            if self._requests is not None and (self._requests.total or 0) > 1:
                status, sampled = read_status(progress), shown.sampled
                below = render_requests(
                    self._requests, status, now_ns, sampled=sampled, say=shown.say
                )
                return Group(table, below)
            if shown.output or not last_line:
                return table
            line = Text.from_ansi(last_line, style="dim", no_wrap=True, overflow="ellipsis")
            return Group(table, line)
        if self._table:
            return serving_table(progress, self._budgets, shown, now_ns, width)
        status = read_status(progress, self._budgets)
        said = shown.serving_line(status, now_ns, width - len(_MARK))
        return Text.assemble((_MARK, "bold"), (said, "reverse"), no_wrap=True, overflow="ellipsis")


def render_progress(
    progress: EngineProgress, shown: Shown, now_ns: int, width: int
) -> RenderableType:
    """Return the table of the live view: per rank the phase under way, its seconds, readings in
    GiB, finished phases."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    say = shown.say
    head = _head(shown, now_ns)
    workers = progress.workers
    if not workers:
        started = [process.name for process in progress.processes if process.matters]
        waiting = text("engine is starting; no rank has reported yet")
        if started:
            waiting = text(
                "engine is starting ({names} up); no rank has reported yet",
                names=join(", ", started),
            )
        return Group(head, Text(say(waiting), style="dim"))
    table = Table(
        box=None, width=width, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline"
    )
    table.add_column(say(text("rank")), no_wrap=True)
    table.add_column(say(text("phase")), no_wrap=True, width=_PHASE_WIDTH, overflow="ellipsis")
    table.add_column("s", justify="right", no_wrap=True, width=5)
    for name, _ in READINGS:
        table.add_column(say(name), justify="right", no_wrap=True, min_width=6)
    table.add_column(say(text("done")), no_wrap=True, ratio=1, overflow="ellipsis")
    for process in workers:
        table.add_row(*_row(process, now_ns, say))
    note = say(text("reserved, peak (allocated) and non-torch in GiB"))
    return Group(head, table, Text(note, style="dim"))


def render_screen(
    progress: EngineProgress,
    budgets: Iterable[RankBudget] | None,
    shown: Shown,
    output: Sequence[str],
    now_ns: int,
    console: Console,
    keys: bool,
) -> RenderableType:
    """Return the full screen: the ranks, the engine's last lines, a foot that names the keys.

    Args:
        progress: the events so far.
        budgets: accounting's figures; None: the engine is not ready.
        shown: of the run.
        output: lines of the engine, the last ones are shown.
        now_ns: CLOCK_MONOTONIC.
        console: whose size is filled.
        keys: q can be read.
    """
    from rich.layout import Layout
    from rich.text import Text

    width = console.width
    if budgets is None:
        upper = render_progress(progress, shown, now_ns, width)
    else:
        upper = serving_table(progress, budgets, shown, now_ns, width)
    height = len(console.render_lines(upper, console.options.update(width=width)))
    room = max(0, console.height - height - 2)
    lines = "\n".join(list(output)[-room:] if room else [])
    # a space: an empty text is no renderable to a layout
    log = Text.from_ansi(lines or " ", style="dim", no_wrap=True, overflow="ellipsis")
    hints = [*([shown.leave] if keys else []), shown.foot]
    foot = f" {'   '.join(map(shown.say, hints))} "
    layout = Layout()
    layout.split_column(
        Layout(upper, size=max(1, min(height + 1, console.height - 2))),
        Layout(log, ratio=1, minimum_size=0),
        Layout(Text(foot, style="bold", no_wrap=True, overflow="ellipsis"), size=1),
    )
    return layout


def serving_table(
    progress: EngineProgress,
    budgets: Iterable[RankBudget],
    shown: Shown,
    now_ns: int,
    width: int,
) -> RenderableType:
    """Return the ranks of a run that serves, under its title."""
    from rich.console import Group

    table = render_status(
        read_status(progress, budgets),
        now_ns,
        width,
        sampled=shown.sampled,
        modelled=shown.modelled,
        say=shown.say,
    )
    return Group(_head(shown, now_ns), table)


def _head(shown: Shown, now_ns: int) -> Text:
    from rich.text import Text

    seconds = f"  {(now_ns - shown.start_ns) / 1e9:.0f} s"
    return Text.assemble((shown.say(shown.title), "bold"), seconds, no_wrap=True,
                         overflow="ellipsis")  # fmt: skip


def _row(process: ProcessProgress, now_ns: int, say: Callable[[str], str]) -> list[RenderableType]:
    from rich.text import Text

    if process.open:
        phase = Text(process.open[-1].phase, style="bold cyan")
        if len(process.open) > 1:
            phase.append(f" {say(text('in {phase}', phase=process.open[0].phase))}", style="cyan")
        seconds = f"{max(0, now_ns - process.open[-1].t_ns) / 1e9:.1f}"
    else:
        phase, seconds = Text("…", style="dim"), ""
    readings = [format_gib(process.readings.get(field)) for _, field in READINGS]
    done = dict.fromkeys(
        entry.phase for entry in reversed(process.done) if entry.phase not in _MINOR
    )
    return [process.name, phase, seconds, *readings, Text(" ".join(done), style="green")]
