"""How a run under way looks: lines, the table of its ranks, the full screen.

Nothing here is estimated: what was not sampled is said to be not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from vllm_memprof.launch.progress import EngineProgress, PhaseProgress, ProcessProgress
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import MIB, format_gib

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

NOT_SAMPLED = text("not measured without --sample: requests, KV cache in use, growth")
NO_SAMPLE_YET = text("no step has been sampled yet")
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
    said = shown.say(
        text(
            "{reserved:gib} GiB reserved, peak {peak:gib}, non-torch {non_torch:gib}",
            reserved=phase.snapshot.get("reserved_bytes"),
            peak=phase.snapshot.get("allocated_run_peak_bytes"),
            non_torch=phase.snapshot.get("non_torch_bytes"),
        )
    )
    if phase.start_t_ns is not None:
        said += f" ({(phase.end_t_ns - phase.start_t_ns) / 1e9:.1f} s)"
    if phase.error:
        said += f" {shown.say(text('FAILED: {error}', error=phase.error))}"
    at = f"{(phase.end_t_ns - shown.start_ns) / 1e9:7.1f}s"
    return f"{at} {process.name} {phase.phase} {said}"


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

    parts = _facts(progress, shown, now_ns, memory=True)
    while len(parts) > 1 and width and cell_len(shown.say(join(" | ", parts))) > width:
        parts.pop()
    return shown.say(join(" | ", parts))


def _facts(progress: EngineProgress, shown: Shown, now_ns: int, memory: bool = False) -> list[Text]:
    """Return what is known of a run that serves and what is not, what matters most first.

    Args:
        progress, shown, now_ns: as of ``describe_serving``.
        memory: what the table of ranks has in its columns as well.
    """
    load = progress.serving
    in_phase = next((each for each in progress.workers if each.open), None)
    doing = text("serving")
    if in_phase is not None:
        doing = text("{who} {where}", who=in_phase.name, where=in_phase.where() or "")
    elif load is not None and load.requests_running is not None:
        waiting = "-" if load.requests_waiting is None else load.requests_waiting
        running = load.requests_running
        doing = text("{running} running, {waiting} waiting", running=running, waiting=waiting)
    facts = [doing]
    if load is not None and load.kv_cache_used_bytes is not None:
        used, size = load.kv_cache_used_bytes, load.kv_cache_bytes
        facts.append(text("KV cache {used:gib} of {size:gib} GiB", used=used, size=size))
    if lost := sum(process.lost_events for process in progress.processes):
        facts.append(text("{lost} events lost", lost=lost))
    facts += [
        text("nothing is recorded of {who}: {why}", who=each.name, why=each.blind_because)
        for each in progress.processes
        if each.blind_because
    ]
    if memory and progress.headroom_bytes is not None:
        size, mark = progress.headroom_bytes, " (m)" if shown.modelled else ""
        facts.append(text("headroom {size:gib} GiB{mark}", size=size, mark=mark))
    if growing := progress.growing:
        who, most = growing[0]
        rate = "-" if most.bytes_per_hour is None else f"{most.bytes_per_hour / MIB:,.0f}"
        full: str = ""
        if most.hours_until_full is not None:
            full = text(", full in {hours:,.1f} h", hours=most.hours_until_full)
        owner = most.owner
        facts.append(
            text(
                "growth {rate} MiB/h ({who} {owner}{full})",
                rate=rate, who=who, owner=owner, full=full,
            )
        )  # fmt: skip
    elif progress.growth_judged:
        facts.append(text("no growth"))
    if load is None:
        facts.append(NO_SAMPLE_YET if shown.sampled else NOT_SAMPLED)
    elif (seconds := (now_ns - load.t_ns) / 1e9) >= _OLD_S:
        facts.append(text("sampled {seconds:.0f} s ago", seconds=seconds))
    if memory and (fullest := progress.fullest) is not None:
        size = fullest.readings["reserved_bytes"]
        facts.append(text("reserved {size:gib} GiB ({who})", size=size, who=fullest.name))
    return facts


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
    notes = [
        text(
            "GiB. peak: allocated, since the process began. headroom: device total less all that "
            "is held at the serving peak."
        )
    ]
    if shown.modelled:
        notes.append(
            text(
                "A simulated device: its profile sets non-torch, and with it free memory and "
                "headroom."
            )
        )
    facts = _facts(progress, shown, now_ns) if serves else []
    lines = [Painted(say(fact), style="bold") for fact in facts]
    return Group(head, table, *lines, Painted(" ".join(map(say, notes)), style="dim"))


def draw_requests(progress: EngineProgress, shown: Shown, now_ns: int) -> RenderableType:
    """Return a bar of the requests with the time that is left, and memory under it."""
    from rich.console import Group
    from rich.text import Text as Painted

    requests = progress.requests
    left = text("time left unknown")
    if requests.end_t_ns is not None:
        clock = timedelta(seconds=round(max(0, requests.end_t_ns - now_ns) / 1e9))
        left = text("{clock} left", clock=clock)
    done, total = requests.done, requests.total or 1
    bar = "━" * (_BAR_WIDTH * done // total)
    head = Painted.assemble(
        f"{shown.say(text('requests {done}/{total}', done=done, total=total))}  ",
        (f"{bar:─<{_BAR_WIDTH}}", "cyan"),
        f"  {shown.say(left)}",
    )
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
