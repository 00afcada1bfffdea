"""Who holds the devices, for readers: the document, what is waited for, the rows of
``memprof doctor --device``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vllm_memprof.document import BAD, GOOD, MUTED, PLAIN, TOTAL, Document, Line
from vllm_memprof.holders.rows import ELSEWHERE, ENDED, DeviceRow, HolderRow, Who
from vllm_memprof.launch.doctor import INFO, WARNING, DoctorCheck
from vllm_memprof.tables import Paper, TableFile, fold_rows
from vllm_memprof.text import join, text
from vllm_memprof.units import one_line, sum_or_none

_TABLES = TableFile(__file__)
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


def who_document(who: Who, width: int) -> Document:
    """Return the devices, the processes on them, and the engine processes left behind."""
    devices, paper = {str(row.device): [row] for row in who.devices}, Paper(False, who.simulated)
    listed = [_OnDevice(row.device, each) for row in who.devices for each in row.processes or ()]
    named = {row.process.pid for row in listed}
    listed += [_OnDevice(None, each) for each in who.left_behind if each.pid not in named]
    left_behind = [row.process for row in listed if row.process.left_behind]
    folders = dict.fromkeys(row.run_dir for row in left_behind if row.run_dir)
    sections = [
        _TABLES.draw(
            paper,
            "devices",
            fold_rows(_TABLES.columns("devices"), devices),
            {"no_process": any(row.no_process_bytes is not None for row in who.devices)},
            [
                text("device {device}: {reason}", row, reason=reason)
                for row in who.devices
                for reason in row.reasons
            ],
            lambda row: PLAIN if row.processes else MUTED,
        ),
        _TABLES.draw(
            replace(paper, wide=width >= _WIDE),
            "processes",
            listed,
            {
                "elsewhere": any(row.process.where == ELSEWHERE for row in listed),
                "left": left_behind,
                "unsized": any(row.bytes is None for row in left_behind),
            },
            [text("recorded by memprof in {folder}", folder=folder) for folder in folders],
            lambda row: BAD if row.process.left_behind or row.process.where == ENDED else PLAIN,
            name=lambda row: _name(row.process, None),
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
        tail.append(
            Line(text("verdict"), _TABLES.say("waited", vars(wait)), GOOD if wait.met else BAD)
        )
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
