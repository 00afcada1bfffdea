"""The document of who holds the devices: rows of devices, of processes, of what is left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_memprof.document import (
    BAD,
    GOOD,
    MUTED,
    PLAIN,
    TOTAL,
    Document,
    Head,
    Line,
    Row,
    Section,
)
from vllm_memprof.holders.rows import (
    ELSEWHERE,
    ENDED,
    HolderRow,
    Who,
)
from vllm_memprof.tables import modelled
from vllm_memprof.text import join, text
from vllm_memprof.units import format_gib, one_line, sum_or_none

#: From this width on a process has its user and the time of its start beside it.
_WIDE = 100
#: Characters of a command line, by width of the table.
_COMMAND, _WIDE_COMMAND = 44, 60
_WHERE = {ENDED: text("ended"), ELSEWHERE: text("not visible here")}


def who_document(who: Who, width: int) -> Document:
    """Return the devices, the processes on them, and the engine processes left behind."""
    wide = width >= _WIDE
    sections = [_devices(who)]
    listed = [(row.device, each) for row in who.devices for each in row.processes or ()]
    if listed:
        sections.append(_processes(listed, wide, who.simulated))
    if who.left_behind:
        sections.append(_left_behind(who))
    return Document(
        kind="who",
        title=text("Who holds {device}", device=who.device),
        head=[Line(text("device"), who.device, TOTAL)],
        sections=sections,
        verdict="",
        tail=_tail(who),
        whole="--json",
    )


def waiting_lines(who: Who, free_bytes: int) -> list[str]:
    """Return a sentence per device on which less is free; what it says changes with it alone."""
    lines: list[str] = []
    for row in who.devices:
        if (row.free_bytes or 0) >= free_bytes:
            continue
        holders = join(", ", [_short(each) for each in row.processes or ()])
        lines.append(
            text(
                "waiting for {wanted:gib} GiB on device {device}: {free:gib} GiB are free; "
                "held by {holders}",
                wanted=free_bytes,
                device=row.device,
                free=row.free_bytes,
                holders=holders if row.processes else text("no process that is listed"),
            )
        )
    return lines


def _devices(who: Who) -> Section:
    columns = [
        Head(text("Device")),
        Head(text("Total, GiB")),
        Head(modelled(text("Used, GiB"), who.simulated)),
        Head(modelled(text("Free, GiB"), who.simulated)),
        Head(text("Processes")),
        Head(modelled(text("Held by\nthem, GiB"), who.simulated)),
        Head(text("No process,\nGiB")),
    ]
    groups: list[tuple[list[int], list[str], bool]] = []
    for row in who.devices:
        cells = [
            format_gib(row.total_bytes),
            format_gib(row.used_bytes),
            format_gib(row.free_bytes),
            "-" if row.processes is None else str(len(row.processes)),
            format_gib(row.held_bytes),
            format_gib(row.no_process_bytes),
        ]
        last = groups[-1] if groups else None
        if last and last[1] == cells and not row.processes and last[0][-1] == row.device - 1:
            last[0].append(row.device)
        else:
            groups.append(([row.device], cells, bool(row.processes)))
    rows = [
        Row([_numbers(devices), *cells], style=PLAIN if held else MUTED)
        for devices, cells, held in groups
    ]
    return Section(text("Devices"), columns, rows, list(_device_notes(who)))


def _device_notes(who: Who) -> Iterator[str]:
    if who.simulated:
        yield text(
            "(m): on a simulated device a process holds what it asked for and what the profile "
            "sets for contexts, kernels and communicators; used is the sum of its processes, so "
            "that nothing is held by no process"
        )
        yield text(
            "a run has a simulated device of its own, which is not this one, unless it was "
            "started with --share-device"
        )
    elif any(row.no_process_bytes is not None for row in who.devices):
        yield text(
            "no process: used less what living processes hold. What the driver and the device "
            "hold for themselves is in it; no driver tells how much that is"
        )
    reasons: dict[str, list[int]] = {}
    for row in who.devices:
        for reason in row.reasons:
            reasons.setdefault(reason, []).append(row.device)
    for reason, devices in reasons.items():
        yield text("device {devices}: {reason}", devices=_numbers(devices), reason=reason)


def _processes(listed: Sequence[tuple[int, HolderRow]], wide: bool, simulated: bool) -> Section:
    columns = [
        Head(text("Device")),
        Head(text("PID")),
        Head(modelled(text("GiB"), simulated)),
        *([Head(text("User"), right=False)] if wide else []),
        *([Head(text("Started, UTC"), right=False)] if wide else []),
        Head(text("Process"), right=False),
        Head(text("State"), right=False),
    ]
    rows = []
    for device, each in listed:
        state = _WHERE.get(each.where, "")
        if each.left_behind:
            state = text("left behind")
        command = _command(each, _WIDE_COMMAND if wide else _COMMAND)
        more = [each.user or "-", (each.started or "-")[:19].replace("T", " ")] if wide else []
        cells = [str(device), str(each.pid), format_gib(each.bytes), *more, command, state]
        bad = each.left_behind or each.where == ENDED
        rows.append(Row(cells, style=BAD if bad else PLAIN))
    notes: dict[str, list[str]] = {}
    for _, each in listed:
        if each.why and not each.left_behind and each.where != "here":
            notes.setdefault(each.why, []).append(str(each.pid))
    shown: list[str] = [
        text("{pids}: {why}", pids=", ".join(dict.fromkeys(pids)), why=why)
        for why, pids in notes.items()
    ]
    if any(each.where == ELSEWHERE for _, each in listed):
        shown.append(
            text("run memprof who on the host, or in a container with --pid=host, to see them")
        )
    return Section(text("Processes"), columns, rows, shown)


def _left_behind(who: Who) -> Section:
    rows = who.left_behind
    columns = [
        Head(text("PID")),
        Head(modelled(text("GiB"), who.simulated)),
        Head(text("Process"), right=False),
        Head(text("Why"), right=False),
    ]
    shown = [
        Row([str(row.pid), format_gib(row.bytes), _command(row, _COMMAND), row.why or "-"], 0, BAD)
        for row in rows
    ]
    notes: list[str] = [
        text("memprof ends none of them; kill PID asks one to end, kill -9 PID ends it")
    ]
    if any(row.bytes is None for row in rows):
        notes.append(text("GiB -: no driver's list names that process by the number it has here"))
    runs = dict.fromkeys(row.run_dir for row in rows if row.run_dir)
    notes += [text("recorded by memprof in {folder}", folder=folder) for folder in runs]
    return Section(text("Engine processes left behind"), columns, shown, notes)


def _tail(who: Who) -> list[Line]:
    lines = []
    if who.left_behind:
        count = len(who.left_behind)
        sizes = [row.bytes for row in who.left_behind]
        known = text("engine processes left behind: {count}", count=count)
        if None not in sizes:
            known = text(
                "engine processes left behind: {count}, which hold {size:gib} GiB",
                count=count,
                size=sum_or_none(sizes),
            )
        lines.append(Line(text("note"), known, BAD))
    if who.wait is not None:
        size, seconds = who.wait.free_bytes, who.wait.seconds
        if who.wait.met:
            said = text(
                "{size:gib} GiB are free on every device, after {seconds:.0f} s",
                size=size,
                seconds=seconds,
            )
        else:
            said = text(
                "{size:gib} GiB are not free on every device after {seconds:.0f} s",
                size=size,
                seconds=seconds,
            )
        lines.append(Line(text("verdict"), said, GOOD if who.wait.met else BAD))
    return lines


def _short(row: HolderRow) -> str:
    """Return a process and its size, in a few words."""
    return text(
        "{pid} ({name}) {size:gib} GiB",
        pid=row.pid,
        name=_WHERE.get(row.where) or _name(row) or "?",
        size=row.bytes,
    )


def _name(row: HolderRow) -> str | None:
    if row.engine is not None or row.run_dir is not None:
        return f"{row.engine or 'memprof'} {row.role}"
    return Path(row.command[0]).name if row.command else None


def _command(row: HolderRow, most: int) -> str:
    name = _name(row)
    if row.command is None:
        return name or "-"
    if row.engine is not None:
        return str(name)
    words = " ".join([Path(row.command[0]).name, *row.command[1:]])
    prefix = "" if row.run_dir is None else f"{row.role}: "
    return prefix + one_line(words, most)


def _numbers(devices: Sequence[int]) -> str:
    """Return numbers with their runs folded: ``0, 2-7``."""
    runs: list[list[int]] = []
    for number in devices:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
