"""How a run looks while it serves: one line, or a table of its ranks. Nothing here is estimated:
what was not sampled is said to be not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_memprof.launch.status import ServingStatus, Status
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import GIB, MIB, format_gib

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    Say = Callable[[str], str]

#: A sample of this age is said to be of that age.
_OLD_S = 5.0
NOT_SAMPLED = text("requests, KV cache in use and growth are not measured without --sample")
_SHORT_NOT_SAMPLED = text("not measured without --sample: requests, KV in use")
NO_SAMPLE_YET = text("no step has been sampled yet")


def describe_serving(
    status: Status,
    now_ns: int,
    *,
    sampled: bool,
    modelled: bool,
    width: int | None = None,
    say: Say = str,
) -> str:
    """Return a run that serves as one line: what it does, then memory, then what is not known.

    Args:
        status: what is known.
        now_ns: CLOCK_MONOTONIC.
        sampled: the run samples its steps.
        modelled: the profile of a simulated device sets memory outside torch.
        width: columns at most; parts at the end are shortened, then left out. None: any.
        say: puts a text into a language.
    """
    from rich.cells import cell_len

    parts = _parts(status, now_ns, sampled, modelled)
    for chosen in ([say(long) for long, _ in parts], [say(short) for _, short in parts]):
        line = " | ".join(chosen)
        if width is None or cell_len(line) <= width:
            return line
    while len(chosen) > 1 and cell_len(" | ".join(chosen)) > (width or 0):
        chosen.pop()
    return " | ".join(chosen)


def _parts(status: Status, now_ns: int, sampled: bool, modelled: bool) -> list[tuple[str, str]]:
    parts = [(_doing(status), _doing(status))]
    serving = status.serving
    if serving is not None and serving.kv_used_bytes is not None:
        used, size = serving.kv_used_bytes, serving.kv_bytes
        long = text("KV cache in use {used:gib} of {size:gib} GiB", used=used, size=size)
        parts.append((long, text("KV {used:gib}/{size:gib}", used=used, size=size)))
    if (lost := status.lost_events) > 0:
        parts.append((text("{lost} events lost", lost=lost), text("lost {lost}", lost=lost)))
    most = status.highest("reserved_bytes")
    if most is not None:
        size = most.reading("reserved_bytes")
        long = text("reserved {size:gib} GiB", size=size)
        if len(status.ranks) > 1:
            long = text("{what} ({who})", what=long, who=most.label)
        if serving is None:
            long = text("{what} at the last phase", what=long)
        parts.append((long, text("reserved {size:gib}", size=size)))
    if status.headroom_bytes is not None:
        size, mark = status.headroom_bytes, " (m)" if modelled else ""
        long = text("headroom {size:gib} GiB{mark}", size=size, mark=mark)
        parts.append((long, text("headroom {size:gib}{mark}", size=size, mark=mark)))
    grows = describe_growth(status)
    if grows is not None:
        parts.append((grows, grows))
    if serving is None:
        missing = (NO_SAMPLE_YET, NO_SAMPLE_YET) if sampled else (NOT_SAMPLED, _SHORT_NOT_SAMPLED)
        parts.append(missing)
    elif (age := _age(serving, now_ns)) is not None:
        sample = text("sampled {age}", age=age)
        parts.append((sample, sample))
    return parts


def _doing(status: Status) -> str:
    for rank in status.ranks:
        if rank.process.open:
            return text("{who} {where}", who=rank.label, where=rank.process.where() or "")
    serving = status.serving
    if serving is None or serving.running is None:
        return text("serving")
    running = text("{count} running", count=serving.running)
    if not serving.waiting:
        return running
    return join(", ", [running, text("{count} waiting", count=serving.waiting)])


def describe_growth(status: Status) -> Text | None:
    """Return what grows the fastest, or that nothing does; None where it cannot be told yet."""
    if not status.growing:
        return text("no growth") if status.growth_judged else None
    label, most = status.growing[0]
    rate = "-" if most.bytes_per_hour is None else f"{most.bytes_per_hour / MIB:,.0f}"
    if most.hours_until_full is None:
        return text("growth {rate} MiB/h ({who} {owner})", rate=rate, who=label, owner=most.owner)
    return text(
        "growth {rate} MiB/h ({who} {owner}, full in {hours:,.1f} h)",
        rate=rate,
        who=label,
        owner=most.owner,
        hours=most.hours_until_full,
    )


def _age(serving: ServingStatus, now_ns: int) -> Text | None:
    """Return the age of a sample that is not of now."""
    seconds = (now_ns - serving.t_ns) / 1e9
    if seconds < _OLD_S:
        return None
    if seconds < 600:
        return text("{seconds:.0f} s ago", seconds=seconds)
    return text("{minutes:.0f} min ago", minutes=seconds / 60)


def render_status(
    status: Status, now_ns: int, width: int, *, sampled: bool, modelled: bool, say: Say = str
) -> RenderableType:
    """Return a run that serves as a table, a row per rank, with its requests under it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text as Painted

    table = Table(
        box=None, width=width, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline"
    )
    table.add_column(say(text("rank")), no_wrap=True)
    table.add_column(say(text("phase")), no_wrap=True, ratio=1, overflow="ellipsis")
    for head in (
        text("reserved"),
        text("peak"),
        text("non-torch"),
        text("KV cache"),
        text("free"),
        text("headroom"),
    ):
        table.add_column(say(head), justify="right", no_wrap=True, min_width=6)
    for rank in status.ranks:
        process, headroom = rank.process, rank.headroom_bytes
        where = process.where() if process.open or process.shutting_down else text("serving")
        style = (
            "" if headroom is None or headroom >= GIB else "yellow" if headroom >= 0 else "bold red"
        )
        table.add_row(
            rank.label,
            Painted(say(where or "-"), style="bold cyan" if process.open else "green"),
            format_gib(rank.reading("reserved_bytes")),
            format_gib(rank.reading("allocated_run_peak_bytes")),
            format_gib(rank.reading("non_torch_bytes")),
            format_gib(rank.granted_bytes),
            format_gib(rank.reading("device_free_bytes")),
            Painted(format_gib(headroom), style=style),
        )
    notes = [
        text(
            "GiB. peak: allocated, since the process began. headroom: device total less all that "
            "is held at the serving peak."
        )
    ]
    if modelled:
        notes.append(
            text(
                "A simulated device: its profile sets non-torch, and with it free memory and "
                "headroom."
            )
        )
    lines = [Painted(say(line), style="bold") for line in _requests(status, now_ns, sampled)]
    note = " ".join(map(say, notes))
    return Group(table, Painted(), *lines, Painted(note, style="dim"))


def _requests(status: Status, now_ns: int, sampled: bool) -> list[str]:
    serving = status.serving
    lost: list[str] = []
    if status.lost_events:
        lost.append(text("{lost} events could not be written", lost=status.lost_events))
    lost += [text("nothing is recorded of {who}", who=who) for who in status.blind]
    if serving is None:
        return [*lost, NO_SAMPLE_YET if sampled else NOT_SAMPLED]
    running, waiting = (
        "-" if count is None else str(count) for count in (serving.running, serving.waiting)
    )
    used, size = serving.kv_used_bytes, serving.kv_bytes
    kv = text("KV cache in use: {used:gib} of {size:gib} GiB", used=used, size=size)
    if serving.blocks_used is not None and serving.blocks:
        share = serving.blocks_used / serving.blocks
        kv = text("{kv} ({share:.1%} of the blocks)", kv=kv, share=share)
    doing = text("requests: {running} running, {waiting} waiting", running=running, waiting=waiting)
    age = _age(serving, now_ns)
    return [
        doing if age is None else join(", ", [doing, text("sampled {age}", age=age)]),
        kv,
        *([] if (grows := describe_growth(status)) is None else [grows]),
        *lost,
    ]
