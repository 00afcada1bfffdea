"""How a run under way looks: lines, the table of its ranks, the full screen.

Nothing here is estimated: what was not sampled is said to be not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from vllm_memprof.files import read_own
from vllm_memprof.launch.progress import EngineProgress, PhaseProgress, ProcessProgress
from vllm_memprof.text import Text, join, said, text
from vllm_memprof.units import MIB, format_gib

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WORDS = read_own(__file__, "words.toml")
#: A sample of this age is said to be of that age.
_OLD_S = 5.0
_BAR_WIDTH = 28


@dataclass(frozen=True)
class Shown:
    """What a view has to know of the run beside its state."""

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


def describe_phase(process: ProcessProgress, phase: PhaseProgress, shown: Shown) -> str:
    """Return ``  12.3s TP0 weight_load 9.17 GiB reserved, peak 9.17, non-torch 0.35 (2.1 s)``;
    unknown is ``-``."""
    words = shown.say(
        text(
            "{reserved:gib} GiB reserved, peak {peak:gib}, non-torch {non_torch:gib}",
            reserved=phase.snapshot.get("reserved_bytes"),
            peak=phase.snapshot.get("allocated_run_peak_bytes"),
            non_torch=phase.snapshot.get("non_torch_bytes"),
        )
    )
    if phase.start_t_ns is not None:
        words += f" ({(phase.end_t_ns - phase.start_t_ns) / 1e9:.1f} s)"
    if phase.error:
        words += f" {shown.say(text('FAILED: {error}', error=phase.error))}"
    at = f"{(phase.end_t_ns - shown.start_ns) / 1e9:7.1f}s"
    return f"{at} {process.name} {phase.phase} {words}"


def describe_memory(progress: EngineProgress, shown: Shown) -> Text | None:
    """Return the memory of the rank that holds the most, now and at its peak; None: unknown."""
    most = progress.fullest
    if most is None:
        return None
    memory = text(
        "{who}: allocated {allocated:gib} GiB (peak {allocated_peak:gib}), "
        "reserved {reserved:gib} (peak {reserved_peak:gib})",
        who=most.name,
        allocated=most.readings.get("allocated_bytes"),
        allocated_peak=most.readings.get("allocated_run_peak_bytes"),
        reserved=most.readings.get("reserved_bytes"),
        reserved_peak=most.readings.get("reserved_run_peak_bytes"),
    )
    return memory if shown.sampled else text("{what} at the last phase", what=memory)


def describe_serving(
    progress: EngineProgress, shown: Shown, now_ns: int, width: int | None = None
) -> str:
    """Return a run that serves as one line.

    Args:
        progress: what is known.
        shown: of the run.
        now_ns: CLOCK_MONOTONIC.
        width: columns at most; parts at the end are left out. None: any.
    """
    from rich.cells import cell_len

    full, known = progress.fullest, _known(progress, shown, now_ns)
    known["headroom_bytes"] = progress.headroom_bytes
    if full is not None:
        known |= {"fullest": full.name, "reserved_bytes": full.readings["reserved_bytes"]}
    parts = said(_WORDS["serving"], known)
    while len(parts) > 1 and width and cell_len(shown.say(join(" | ", parts))) > width:
        parts.pop()
    return shown.say(join(" | ", parts))


def _known(progress: EngineProgress, shown: Shown, now_ns: int) -> dict[str, object]:
    """Return what is known of a run that serves, by the names of ``words.toml``."""
    load, processes = progress.serving, progress.processes
    known: dict[str, object] = {
        "modelled": shown.modelled,
        "awaited": load is None and shown.sampled,
        "unsampled": load is None,
        "growth_judged": progress.growth_judged,
        "lost": sum(process.lost_events for process in processes) or None,
        "blind": ", ".join(f"{p.name}: {p.blind_because}" for p in processes if p.blind_because),
    }
    for process in progress.workers:
        if process.open and "who" not in known:
            known |= {"who": process.name, "where": process.where()}
    if load is not None:
        age_s = (now_ns - load.t_ns) / 1e9
        known |= {**vars(load), "age_s": age_s if age_s >= _OLD_S else None}
    for rank, most in progress.growing[:1]:
        rate = None if most.bytes_per_hour is None else most.bytes_per_hour / MIB
        known |= {**vars(most), "rank": rank, "mib_per_hour": rate}
    return known


def draw_ranks(progress: EngineProgress, shown: Shown, now_ns: int, width: int) -> RenderableType:
    """Return a table with a row per rank: of a start-up its phases, of a run that serves what is
    left, with what it does under it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text as Painted

    say, serves = shown.say, progress.serves
    seconds = f"  {(now_ns - shown.start_ns) / 1e9:.0f} s"
    head = Painted.assemble((say(shown.title), "bold"), seconds, no_wrap=True, overflow="ellipsis")
    if not progress.workers and not serves:
        up = join(", ", [process.name for process in progress.processes if process.matters] or "-")
        starting = text("engine is starting ({names} up); no rank has reported yet", names=up)
        return Group(head, Painted(say(starting), style="dim"))
    table = Table(
        box=None, width=width, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline"
    )
    table.add_column(say(text("rank")), no_wrap=True)
    table.add_column(say(text("phase")), no_wrap=True, ratio=1, overflow="ellipsis")
    sizes = [text("reserved"), text("peak"), text("non-torch")]
    sizes += [text("KV cache"), text("free"), text("headroom")] if serves else []
    for name in sizes:
        table.add_column(say(name), justify="right", no_wrap=True, min_width=6)
    for process in progress.workers:
        readings, left = process.readings, process.headroom_bytes
        where = say(process.where() or "-")
        if process.open:
            where += f", {max(0, now_ns - (process.open[-1].start_t_ns or now_ns)) / 1e9:.1f} s"
        elif serves and not process.shutting_down:
            where = say(text("serving"))
        cells = [
            readings.get("reserved_bytes"),
            readings.get("allocated_run_peak_bytes"),
            readings.get("non_torch_bytes"),
            None if process.budget is None else process.budget.kv_cache_granted_bytes,
            readings.get("device_free_bytes"),
            left,
        ]
        style = "bold red" if left is not None and left < 0 else ""
        table.add_row(process.name, where, *map(format_gib, cells[: len(sizes)]), style=style)
    facts = said(_WORDS["serving"], _known(progress, shown, now_ns)) if serves else []
    notes = said(_WORDS["ranks"], {"modelled": shown.modelled})
    lines = [Painted(say(fact), style="bold") for fact in facts]
    return Group(head, table, *lines, Painted(" ".join(map(say, notes)), style="dim"))


def draw_requests(progress: EngineProgress, shown: Shown, now_ns: int) -> RenderableType:
    """Return a bar of the requests with the time that is left, and memory under it."""
    from rich.console import Group
    from rich.text import Text as Painted

    requests = progress.requests
    known: dict[str, object] = {"done": requests.done, "total": requests.total or 1}
    if requests.end_t_ns is not None:
        left_s = max(0, requests.end_t_ns - now_ns) / 1e9
        known["clock"] = timedelta(seconds=round(left_s))
    count, left = map(shown.say, said(_WORDS["requests"], known))
    bar = "━" * (_BAR_WIDTH * requests.done // (requests.total or 1))
    head = Painted.assemble(f"{count}  ", (f"{bar:─<{_BAR_WIDTH}}", "cyan"), f"  {left}")
    note = text("GiB; peaks since the process began, its start-up included")
    lines = [head, Painted(shown.say(describe_memory(progress, shown) or "-"))]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines, Painted(shown.say(note), "dim", no_wrap=True, overflow="ellipsis"))


def draw_screen(
    progress: EngineProgress,
    shown: Shown,
    output: Sequence[str],
    now_ns: int,
    console: Console,
    keys: bool,
) -> RenderableType:
    """Return the full screen: the ranks, the engine's last lines, a foot that names the keys.

    Args:
        progress: what is known.
        shown: of the run.
        output: lines of the engine, the last ones are shown.
        now_ns: CLOCK_MONOTONIC.
        console: whose size is filled.
        keys: q can be read.
    """
    from rich.layout import Layout
    from rich.text import Text as Painted

    upper = draw_ranks(progress, shown, now_ns, console.width)
    height = len(console.render_lines(upper))
    room = max(0, console.height - height - 2)
    # a space: an empty text is no renderable to a layout
    lines = "\n".join(list(output)[-room:] if room else []) or " "
    log = Painted.from_ansi(lines, style="dim", no_wrap=True, overflow="ellipsis")
    hints = [*([shown.leave] if keys else []), shown.foot]
    foot = f" {'   '.join(map(shown.say, hints))} "
    layout = Layout()
    layout.split_column(
        Layout(upper, size=max(1, min(height + 1, console.height - 2))),
        Layout(log, ratio=1, minimum_size=0),
        Layout(Painted(foot, style="bold", no_wrap=True, overflow="ellipsis"), size=1),
    )
    return layout
