"""Who holds the devices, for readers: the document, what is waited for, the rows of
``memprof doctor --device``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_memprof.document import BAD, GOOD, MUTED, PLAIN, TOTAL, Document, Line
from vllm_memprof.holders.rows import ELSEWHERE, ENDED, DeviceRow, HolderRow, Who
from vllm_memprof.launch.doctor import INFO, WARNING, DoctorCheck
from vllm_memprof.tables import (
    GIB,
    LABELS,
    Column,
    fold_rows,
    number,
    table,
    wide_only,
)
from vllm_memprof.text import join, text
from vllm_memprof.units import one_line, sum_or_none

#: From this width on a process has its user and the time of its start beside it.
_WIDE = 100
#: Characters of a command line.
_COMMAND = 44
_WHERE = {ENDED: text("ended"), ELSEWHERE: text("not visible here")}


class _OnDevice(NamedTuple):
    """A process on a device."""

    device: int | None  # None: left behind, and on no list
    process: HolderRow

    @property
    def state(self) -> str:
        row = self.process
        left = row.left_behind and text("left behind")
        return join(": ", [_WHERE.get(row.where), left, row.where != ELSEWHERE and row.why])


def _name(row: HolderRow, words: int | None = 1) -> str:
    """Return the engine and the role of a process, else so many words of its command."""
    if row.engine or row.run_dir:
        return f"{row.engine or 'memprof'} {row.role}"
    program, *further = (row.command or ["-"])[:words]
    return one_line(" ".join([Path(program).name, *further]), _COMMAND)


#: Rows of the table are devices that have the same figures, by their numbers.
_DEVICES = (
    Column("Device", LABELS, right=True),
    Column("Total, GiB", "total_bytes", GIB),
    Column("Used, GiB", "used_bytes", GIB, marked=True),
    Column("Free, GiB", "free_bytes", GIB, marked=True),
    Column("Processes", lambda row: None if row.processes is None else len(row.processes), number),
    Column("Used by\nthem, GiB", "held_bytes", GIB, marked=True),
    Column("No process,\nGiB", "no_process_bytes", GIB),
)
_PROCESSES = (
    Column("Device", "device", number),
    Column("PID", "process.pid", number),
    Column("GiB", "process.bytes", GIB, marked=True),
    Column("User", "process.user", when=wide_only),
    Column("Started, UTC", "process.started", when=wide_only),
    Column("Process", lambda row: _name(row.process, None)),
    Column("State", "state"),
)


def who_document(who: Who, width: int) -> Document:
    """Return the devices, the processes on them, and the engine processes left behind."""
    devices = fold_rows(_DEVICES, {str(row.device): [row] for row in who.devices})
    listed = [_OnDevice(row.device, each) for row in who.devices for each in row.processes or ()]
    named = {row.process.pid for row in listed}
    listed += [_OnDevice(None, each) for each in who.left_behind if each.pid not in named]
    sections = [
        table(
            text("Devices"),
            _DEVICES,
            devices,
            _device_notes(who),
            simulated=who.simulated,
            look=lambda row: PLAIN if row.processes else MUTED,
        ),
        table(
            text("Processes"),
            _PROCESSES,
            listed,
            _process_notes([row.process for row in listed]),
            width >= _WIDE,
            who.simulated,
            lambda row: BAD if row.process.left_behind or row.process.where == ENDED else PLAIN,
        ),
    ]
    left, wait = who.left_behind, who.wait
    tail = []
    if left:
        known = text(
            "engine processes left behind: {count}, which use {size:gib} GiB",
            count=len(left),
            size=sum_or_none(row.bytes for row in left),
        )
        tail.append(Line(text("note"), known, BAD))
    if wait is not None:
        if wait.met:
            said = text(
                "{free_bytes:gib} GiB are free on every device, after {seconds:.0f} s", wait
            )
        else:
            said = text(
                "{free_bytes:gib} GiB are not free on every device after {seconds:.0f} s", wait
            )
        tail.append(Line(text("verdict"), said, GOOD if wait.met else BAD))
    return Document(
        kind="who",
        title=text("Who uses {device}", who),
        head=[Line(text("device"), who.device, TOTAL)],
        sections=sections if listed else sections[:1],
        tail=tail,
        whole="--json",
        simulated=who.simulated,
    )


def waiting_lines(who: Who, free_bytes: int) -> list[str]:
    """Return a sentence per device on which less is free; what it says changes with it alone."""
    return [
        text(
            "waiting for {wanted:gib} GiB on device {device}: {holders}",
            row,
            wanted=free_bytes,
            holders=_holders(row),
        )
        for row in who.devices
        if (row.free_bytes or 0) < free_bytes
    ]


def holder_checks(who: Who) -> list[DoctorCheck]:
    """Return a row per device, and one per process left behind."""
    rows = [
        DoctorCheck(f"device {row.device}", INFO, "; ".join([_holders(row), *row.reasons]))
        for row in who.devices
    ]
    for each in who.left_behind:
        found, todo = f"{_short(each)}: {each.why}", f"kill {each.pid}, if nobody needs it"
        rows.append(DoctorCheck("left behind", WARNING, found, todo))
    return rows


def _holders(row: DeviceRow) -> str:
    """Return what is free of a device, and the processes that hold the rest."""
    holders = join(", ", map(_short, row.processes or ())) or text("no process that is listed")
    return text(
        "{free_bytes:gib} of {total_bytes:gib} GiB are free; in use by {holders}",
        row,
        holders=holders,
    )


def _short(row: HolderRow) -> str:
    """Return a process and its size, in a few words."""
    name = _WHERE.get(row.where) or _name(row)
    return text("{pid} ({name}) {bytes:gib} GiB", row, name=name)


def _device_notes(who: Who) -> Iterator[str | bool]:
    yield who.simulated and text(
        "(m): on a simulated device a process uses what it asked for and what the profile "
        "sets for contexts, kernels and communicators; used is the sum of its processes, so that "
        "nothing is in use by no process"
    )
    yield who.simulated and text(
        "a run has a simulated device of its own, which is not this one, unless it was "
        "started with --share-device"
    )
    yield any(row.no_process_bytes is not None for row in who.devices) and text(
        "no process: used - what living processes use. What the driver and the device use "
        "for themselves is in it; no driver tells how much that is"
    )
    for row in who.devices:
        for reason in row.reasons:
            yield text("device {device}: {reason}", row, reason=reason)


def _process_notes(rows: list[HolderRow]) -> Iterator[str | bool]:
    yield any(row.where == ELSEWHERE for row in rows) and text(
        "not visible here: the number is, or may be, one of the host; run memprof who there, or in "
        "a container with --pid=host, to see them"
    )
    left = [row for row in rows if row.left_behind]
    yield bool(left) and text(
        "memprof ends none of them; kill PID asks one to end, kill -9 PID ends it"
    )
    yield any(row.bytes is None for row in left) and text(
        "GiB -: no driver's list names that process by the number it has here"
    )
    for folder in dict.fromkeys(row.run_dir for row in left if row.run_dir):
        yield text("recorded by memprof in {folder}", folder=folder)
