"""How a run looks while it serves: one line, or a table of its ranks. Nothing here is estimated:
what was not sampled is said to be not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_memprof.launch.status import RankStatus, Serving, Status
from vllm_memprof.units import GIB, MIB, format_gib

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Columns of the table, in GiB: head, snapshot field.
COLUMNS = (
    ("reserved", "reserved_bytes"),
    ("peak", "allocated_run_peak_bytes"),
    ("non-torch", "non_torch_bytes"),
    ("free", "device_free_bytes"),
)
#: A sample of this age is said to be of that age.
_OLD_S = 5.0
NOT_SAMPLED = "requests, KV cache in use and growth are not measured without --sample"
_SHORT_NOT_SAMPLED = "not measured without --sample: requests, KV in use"
NO_SAMPLE_YET = "no step has been sampled yet"


def describe_serving(
    status: Status, now_ns: int, *, sampled: bool, modelled: bool, width: int | None = None
) -> str:
    """Return a run that serves as one line: what it does, then memory, then what is not known.

    Args:
        status: what is known.
        now_ns: CLOCK_MONOTONIC.
        sampled: the run samples its steps.
        modelled: the profile of a simulated device sets memory outside torch.
        width: characters at most; parts at the end are shortened, then left out. None: any.
    """
    parts = _parts(status, now_ns, sampled, modelled)
    for chosen in ([long for long, _ in parts], [short for _, short in parts]):
        line = " | ".join(chosen)
        if width is None or len(line) <= width:
            return line
    while len(chosen) > 1 and len(" | ".join(chosen)) > (width or 0):
        chosen.pop()
    return " | ".join(chosen)


def _parts(status: Status, now_ns: int, sampled: bool, modelled: bool) -> list[tuple[str, str]]:
    parts = [(_doing(status), _doing(status))]
    serving = status.serving
    if serving is not None and serving.kv_used_bytes is not None:
        used, size = format_gib(serving.kv_used_bytes), format_gib(serving.kv_bytes)
        parts.append((f"KV cache in use {used} of {size} GiB", f"KV {used}/{size}"))
    if status.lost_events:
        parts.append((f"{status.lost_events} events lost", f"lost {status.lost_events}"))
    most = status.highest("reserved_bytes")
    if most is not None:
        size = format_gib(most.reading("reserved_bytes"))
        who = f" ({most.label})" if len(status.ranks) > 1 else ""
        when = "" if serving is not None else " at the last phase"
        parts.append((f"reserved {size} GiB{who}{when}", f"reserved {size}"))
    if status.spare_bytes is not None:
        size, mark = format_gib(status.spare_bytes), " (m)" if modelled else ""
        parts.append((f"spare {size} GiB{mark}", f"spare {size}{mark}"))
    grows = describe_growth(status)
    if grows is not None:
        parts.append((grows, grows))
    if serving is None:
        missing = (NO_SAMPLE_YET, NO_SAMPLE_YET) if sampled else (NOT_SAMPLED, _SHORT_NOT_SAMPLED)
        parts.append(missing)
    elif (age := _age(serving, now_ns)) is not None:
        parts.append((f"sampled {age}", f"sampled {age}"))
    return parts


def _doing(status: Status) -> str:
    for rank in status.ranks:
        if rank.process.open:
            return f"{rank.label} {rank.process.where()}"
    serving = status.serving
    if serving is None or serving.running is None:
        return "serving"
    waiting = f", {serving.waiting} waiting" if serving.waiting else ""
    return f"{serving.running} running{waiting}"


def describe_growth(status: Status) -> str | None:
    """Return what grows the fastest, or that nothing does; None where it cannot be told yet."""
    if not status.growing:
        return "no growth" if status.growth_judged else None
    label, most = status.growing[0]
    rate = "-" if most.bytes_per_hour is None else f"{most.bytes_per_hour / MIB:,.0f}"
    full = "" if most.hours_until_full is None else f", full in {most.hours_until_full:,.1f} h"
    return f"growth {rate} MiB/h ({label} {most.owner}{full})"


def _age(serving: Serving, now_ns: int) -> str | None:
    """Return the age of a sample that is not of now."""
    seconds = (now_ns - serving.t_ns) / 1e9
    if seconds < _OLD_S:
        return None
    return f"{seconds:.0f} s ago" if seconds < 600 else f"{seconds / 60:.0f} min ago"


def render_status(
    status: Status, now_ns: int, width: int, *, sampled: bool, modelled: bool
) -> RenderableType:
    """Return a run that serves as a table, a row per rank, with its requests under it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, width=width, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline"
    )
    table.add_column("rank", no_wrap=True)
    table.add_column("phase", no_wrap=True, ratio=1, overflow="ellipsis")
    for head in ("reserved", "peak", "non-torch", "KV cache", "free", "spare"):
        table.add_column(head, justify="right", no_wrap=True, min_width=6)
    for rank in status.ranks:
        table.add_row(*_row(rank))
    note = "GiB. peak: allocated, since the process began. spare: device total less all that is "
    note += "held at the serving peak."
    if modelled:
        note += " A simulated device: its profile sets non-torch, and with it free and spare."
    lines = [Text(line, style="bold") for line in _requests(status, now_ns, sampled)]
    return Group(table, Text(), *lines, Text(note, style="dim"))


def _row(rank: RankStatus) -> list[RenderableType]:
    from rich.text import Text

    process = rank.process
    where = process.where() if process.open or process.shutting_down else "serving"
    phase = Text(where or "-", style="bold cyan" if process.open else "green")
    readings = {head: format_gib(rank.reading(name)) for head, name in COLUMNS}
    spare = rank.spare_bytes
    style = "" if spare is None or spare >= GIB else "yellow" if spare >= 0 else "bold red"
    return [
        rank.label,
        phase,
        readings["reserved"],
        readings["peak"],
        readings["non-torch"],
        format_gib(rank.granted_bytes),
        readings["free"],
        Text(format_gib(spare), style=style),
    ]


def _requests(status: Status, now_ns: int, sampled: bool) -> list[str]:
    serving = status.serving
    lost = [f"{status.lost_events} events could not be written"] if status.lost_events else []
    lost += [f"nothing is recorded of {who}" for who in status.blind]
    if serving is None:
        return [*lost, NO_SAMPLE_YET if sampled else NOT_SAMPLED]
    running, waiting = (
        "-" if count is None else str(count) for count in (serving.running, serving.waiting)
    )
    used, size = format_gib(serving.kv_used_bytes), format_gib(serving.kv_bytes)
    share = ""
    if serving.blocks_used is not None and serving.blocks:
        share = f" ({serving.blocks_used / serving.blocks:.1%} of the blocks)"
    age = _age(serving, now_ns)
    when = "" if age is None else f", sampled {age}"
    return [
        f"requests: {running} running, {waiting} waiting{when}",
        f"KV cache in use: {used} of {size} GiB{share}",
        *([] if (grows := describe_growth(status)) is None else [grows]),
        *lost,
    ]
