"""One look at the devices: the driver's list, and what is known of each process on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllm_memprof.capture.driver_list import LISTED_AT_MOST, STEP_BYTES
from vllm_memprof.errors import UsageError
from vllm_memprof.holders.driver import Listed, Source, read_driver
from vllm_memprof.holders.processes import left_behind, listed_process, numbers_of_the_driver
from vllm_memprof.holders.rows import ENDED, HERE, OWN_NUMBERS, DeviceRow, Who
from vllm_memprof.text import text
from vllm_memprof.units import minus


def look(source: Source, only: Sequence[int] = (), folders: Sequence[Path] = ()) -> Who:
    """Return who holds the devices now.

    Args:
        source: where the driver's list is read.
        only: numbers of the devices, as the driver counts them; none: all.
        folders: parents of run folders, in which records of processes are looked for.

    Raises:
        MemprofError: the driver's list cannot be read.
        UsageError: there is no device of a number in ``only``.
    """
    listed = read_driver(source)
    missing = sorted(set(only) - {each.device for each in listed})
    if missing:
        numbers = ", ".join(map(str, missing))
        there = ", ".join(str(each.device) for each in listed)
        raise UsageError(f"there is no device {numbers}", hint=f"those here are {there}")
    numbers = numbers_of_the_driver(source.simulated)
    chosen = [each for each in listed if not only or each.device in only]
    devices = [_device(each, source, numbers, folders) for each in chosen]
    held: dict[int, int] = {}
    for row in devices:
        for process in row.processes or ():
            if process.where == HERE and process.bytes is not None:
                held[process.pid] = held.get(process.pid, 0) + process.bytes
    # a process that no list names holds nothing, if the lists are whole and have numbers of here
    whole = numbers == OWN_NUMBERS and all(row.processes_complete for row in devices)
    rest = 0 if whole else None
    behind = [replace(row, bytes=held.get(row.pid, rest)) for row in left_behind(folders)]
    return Who(source.name, source.simulated, numbers, devices, behind)


def _device(listed: Listed, source: Source, numbers: str, folders: Sequence[Path]) -> DeviceRow:
    rows, reasons = None, list(listed.reasons)
    complete = None
    if listed.processes is not None:
        rows = [listed_process(pid, size, numbers, folders) for pid, size in listed.processes]
        rows.sort(key=lambda row: (-(row.bytes or 0), row.pid))
        complete = len(rows) < LISTED_AT_MOST
        if not complete:
            reasons.append(text("the driver lists {count} processes at most", count=LISTED_AT_MOST))
    held = None if rows is None else sum(row.bytes or 0 for row in rows if row.where != ENDED)
    known = complete and not source.simulated
    return DeviceRow(
        device=listed.device,
        card=listed.card,
        chip=listed.chip,
        total_bytes=listed.total_bytes,
        used_bytes=listed.used_bytes,
        free_bytes=minus(listed.total_bytes, listed.used_bytes),
        step_bytes=None if source.simulated else STEP_BYTES,
        processes=rows,
        processes_complete=complete,
        held_bytes=held,
        no_process_bytes=minus(listed.used_bytes, held) if known else None,
        reasons=reasons,
    )
