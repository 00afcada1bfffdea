"""The document of who holds the devices: rows of devices, of processes, of what is left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_memprof.document import (
    BAD,
    GOOD,
    MUTED,
    PLAIN,
    TOTAL,
    Document,
    Line,
    Section,
)
from vllm_memprof.holders.rows import (
    ELSEWHERE,
    ENDED,
    DeviceRow,
    HolderRow,
    Who,
)
from vllm_memprof.tables import GIB, Column, fold, narrow_only, number, table, wide_only
from vllm_memprof.text import join, text
from vllm_memprof.units import one_line, sum_or_none

#: From this width on a process has its user and the time of its start beside it.
_WIDE = 100
#: Characters of a command line, by width of the table.
_COMMAND, _WIDE_COMMAND = 44, 60
_WHERE = {ENDED: text("ended"), ELSEWHERE: text("not visible here")}


def who_document(who: Who, width: int) -> Document:
    """Return the devices, the processes on them, and the engine processes left behind."""
    wide = width >= _WIDE
    sections = [_devices(who)]
    listed = [_OnDevice(row.device, each) for row in who.devices for each in row.processes or ()]
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
        simulated=who.simulated,
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


#: Rows of the table are devices that have the same figures, by their numbers.
_DEVICES = (
    Column("Device", lambda rows: fold([str(row.device) for row in rows]), right=True),
    Column("Total, GiB", lambda rows: rows[0].total_bytes, GIB),
    Column("Used, GiB", lambda rows: rows[0].used_bytes, GIB, marked=True),
    Column("Free, GiB", lambda rows: rows[0].free_bytes, GIB, marked=True),
    Column(
        "Processes",
        lambda rows: rows[0].processes,
        lambda found: number(None if found is None else len(found)),
    ),
    Column("Held by\nthem, GiB", lambda rows: rows[0].held_bytes, GIB, marked=True),
    Column("No process,\nGiB", lambda rows: rows[0].no_process_bytes, GIB),
)


def _devices(who: Who) -> Section:
    def figures(row: DeviceRow) -> list[str]:
        return [column.cell([row]) for column in _DEVICES[1:]]

    groups: list[list[DeviceRow]] = []
    for row in who.devices:
        last = groups[-1][-1] if groups else None
        follows = last is not None and last.device == row.device - 1
        if last is not None and follows and not row.processes and figures(last) == figures(row):
            groups[-1].append(row)
        else:
            groups.append([row])

    def look(rows: list[DeviceRow]) -> str:
        return PLAIN if rows[0].processes else MUTED

    notes = _device_notes(who)
    return table(text("Devices"), _DEVICES, groups, notes, simulated=who.simulated, look=look)


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
    reasons: dict[str, list[str]] = {}
    for row in who.devices:
        for reason in row.reasons:
            reasons.setdefault(reason, []).append(str(row.device))
    for reason, devices in reasons.items():
        yield text("device {devices}: {reason}", devices=fold(devices), reason=reason)


class _OnDevice(NamedTuple):
    """A process on a device."""

    device: int
    process: HolderRow


def _state(row: _OnDevice) -> str:
    left = row.process.left_behind
    return text("left behind") if left else _WHERE.get(row.process.where, "")


_PROCESSES = (
    Column("Device", "device", number),
    Column("PID", "process.pid", number),
    Column("GiB", "process.bytes", GIB, marked=True),
    Column("User", lambda row: row.process.user or "-", when=wide_only),
    Column(
        "Started, UTC",
        lambda row: (row.process.started or "-")[:19].replace("T", " "),
        when=wide_only,
    ),
    Column("Process", lambda row: _command(row.process, _COMMAND), when=narrow_only),
    Column("Process", lambda row: _command(row.process, _WIDE_COMMAND), when=wide_only),
    Column("State", _state),
)


def _processes(listed: Sequence[_OnDevice], wide: bool, simulated: bool) -> Section:
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

    def look(row: _OnDevice) -> str:
        return BAD if row.process.left_behind or row.process.where == ENDED else PLAIN

    return table(text("Processes"), _PROCESSES, listed, shown, wide, simulated, look)


_LEFT_BEHIND = (
    Column("PID", "pid", number),
    Column("GiB", "bytes", GIB, marked=True),
    Column("Process", lambda row: _command(row, _COMMAND)),
    Column("Why", lambda row: row.why or "-"),
)


def _left_behind(who: Who) -> Section:
    rows = who.left_behind
    notes: list[str] = [
        text("memprof ends none of them; kill PID asks one to end, kill -9 PID ends it")
    ]
    if any(row.bytes is None for row in rows):
        notes.append(text("GiB -: no driver's list names that process by the number it has here"))
    runs = dict.fromkeys(row.run_dir for row in rows if row.run_dir)
    notes += [text("recorded by memprof in {folder}", folder=folder) for folder in runs]
    return table(
        text("Engine processes left behind"),
        _LEFT_BEHIND,
        rows,
        notes,
        simulated=who.simulated,
        look=lambda _: BAD,
    )


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
