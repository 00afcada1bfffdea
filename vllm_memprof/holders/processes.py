"""What is known of a process by its number: ``/proc``, and the run folders of memprof.

Only read: the one signal sent is number 0, which tells whether a process exists. A number counts
for a process only in the pid namespace that it is of; of any other nothing is said.

An engine's process is known by its title (``VLLM::EngineCore_DP0``, ``VLLM::Worker_TP1``; the rows
of ``ENGINES`` have the beginnings) or by memprof's record of it. It is left behind when the process
that started it, or one between it and its launcher, has ended: by the record, which holds the
parent's number, or because its parent now is none that starts engines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from vllm_memprof.engines import ENGINES
from vllm_memprof.holders.rows import (
    ELSEWHERE,
    ENDED,
    HERE,
    HOST_NUMBERS,
    OWN_NUMBERS,
    UNKNOWN_NUMBERS,
    HolderRow,
)
from vllm_memprof.launch.folder import DEFAULT_PARENT
from vllm_memprof.record.host import host_name
from vllm_memprof.record.schema import ENV_RUN_DIR, EVENTS_DIR
from vllm_memprof.redact import redact_command
from vllm_memprof.text import text

#: The inode of the initial pid namespace: that of the host, whose numbers the driver lists.
#: (Linux, include/linux/proc_ns.h: PROC_PID_INIT_INO)
_INITIAL_NAMESPACE = 0xEFFFFFFC
_OWN_NAMESPACE = "/proc/self/ns/pid"
_ENGINES = {row.process_title: row.name for row in ENGINES.values() if row.process_title}
_TITLE = re.compile(rf"^({'|'.join(_ENGINES)})::(\S+)")
#: Roles of processes that an engine's launcher starts, and that are nothing without it.
_CHILD = re.compile(
    "EngineCore|Worker|DPCoordinator|APIServer|scheduler|detokenizer|data_parallel_controller"
)
#: What starts engines: Python and what wraps it, by the name of the program.
_PROGRAMS = "|".join((*_ENGINES.values(), "memprof"))
_STARTERS = re.compile(rf"^(python[\d.]*|pypy[\d.]*|{_PROGRAMS}|pt_main_thread|ray|raylet)$")
_SPAWNED = re.compile(r"multiprocessing\.(spawn|forkserver)")
_CLOCK_SLACK_S = 5.0  # the time of boot is known to a second, and clocks are adjusted
_MOST_WORDS = 64  # of a command line that are kept


def numbers_of_the_driver(simulated: bool) -> str:
    """Return whose process numbers a driver's list has, as seen from this process.

    An NPU's driver lists the host's. A simulated device lists processes that its shim has found
    alive in this pid namespace.
    """
    if simulated:
        return OWN_NUMBERS
    try:
        inode = int(re.sub(r"\D", "", os.readlink(_OWN_NAMESPACE)))
    except (OSError, ValueError):
        return UNKNOWN_NUMBERS
    return OWN_NUMBERS if inode == _INITIAL_NAMESPACE else HOST_NUMBERS


def listed_process(pid: int, size: int, numbers: str) -> HolderRow:
    """Return all that is known of a process on the driver's list.

    Args:
        pid: as listed.
        size: its bytes on the device.
        numbers: whose numbers the list has.
    """
    if numbers != OWN_NUMBERS:
        why = text("its number is, or may be, one of the host: it is not looked up here")
        return HolderRow(pid, size, ELSEWHERE, why=why)
    found = describe(pid)
    if found is not None:
        return replace(found, bytes=size)
    if psutil.pid_exists(pid):
        return HolderRow(pid, size, HERE, why=text("/proc does not show it to this user"))
    return HolderRow(pid, size, ENDED, why=text("the driver lists it, and no such process lives"))


def describe(pid: int) -> HolderRow | None:
    """Return a process of this pid namespace without its bytes; None where none lives."""
    try:
        process = psutil.Process(pid)
        parent_pid = process.ppid()
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            gone = text("it has ended, and its parent has not waited for it")
            return HolderRow(pid, None, ENDED, parent_pid=parent_pid, why=gone)
    except psutil.Error:
        return None
    words = [word for word in _read(process, "cmdline") or () if word]
    run_dir, role, recorded_parent = _record_of(process)
    title = _TITLE.match(" ".join(words))
    # any other is a program that somebody started: with nohup its parent may end
    child = any(map(_SPAWNED.search, words)) or (title and _CHILD.match(title[2]))
    left, why = _left_behind(process, recorded_parent, text("its parent")) if child else (None,) * 2
    started = datetime.fromtimestamp(process.create_time(), timezone.utc)
    return HolderRow(
        pid,
        None,
        HERE,
        _read(process, "username"),
        redact_command(words[:_MOST_WORDS]) or None,
        started.isoformat(timespec="seconds"),
        parent_pid,
        _ENGINES[title[1]] if title else None,
        title[2] if title else role,
        run_dir,
        left,
        why,
    )


def left_behind() -> list[HolderRow]:
    """Return every engine's process of this pid namespace whose launcher has ended."""
    found = [
        describe(process.pid)
        for process in psutil.process_iter()
        if ENV_RUN_DIR in _variables(process)
        or _TITLE.match(" ".join(_read(process, "cmdline") or ()))
    ]
    return [row for row in found if row and row.left_behind and (row.engine or row.run_dir)]


def _record_of(process: psutil.Process) -> tuple[str | None, str | None, int | None]:
    """Return the run folder, the role and the parent that memprof recorded of a process.

    A number is used again: a record that was begun before the process started is another's.
    """
    place = Path(_variables(process).get(ENV_RUN_DIR, DEFAULT_PARENT / "any")).parent
    for path in place.glob(f"*/{EVENTS_DIR}/*-{process.pid}.jsonl"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with path.open("rb") as stream:
                first = json.loads(stream.readline())
            same = (first["pid"], first["host"]) == (process.pid, host_name())
            if same and first["wall"] >= process.create_time() - _CLOCK_SLACK_S:
                return str(path.absolute().parents[1]), str(first["role"]), first.get("ppid")
    return None, None, None


def _left_behind(
    child: psutil.Process, recorded_parent: int | None, who: str
) -> tuple[bool | None, str | None]:
    """Climb from an engine's process to what started it; return whether any of these has ended."""
    parent_pid = _read(child, "ppid")
    if recorded_parent not in (None, parent_pid):
        return True, text("{who}, {parent}, has ended", who=who, parent=recorded_parent)
    try:
        parent = psutil.Process(parent_pid or 0)
        name, command = parent.name(), parent.cmdline()
    except psutil.Error:
        return None, text("{who}, {parent}, cannot be read", who=who, parent=parent_pid)
    if _TITLE.match(" ".join(command)):
        whose = text("the parent of {pid}", parent)
        return _left_behind(parent, _record_of(parent)[2], whose)
    if not any(_STARTERS.match(Path(word).name) for word in (name, *command[:1])):
        return True, text(
            "{who} is {parent} ({name}), which starts no engine: its own has ended",
            who=who,
            parent=parent_pid,
            name=name,
        )
    if parent_pid == 1 and not re.search(_PROGRAMS, " ".join(command)):
        return None, text("{who} is 1, a Python program: its own may have ended", who=who)
    return False, None


def _variables(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process; a title that it set may have overwritten it."""
    found: dict[str, str] = _read(process, "environ") or {}
    return found


def _read(process: psutil.Process, what: str) -> Any:
    """Return what psutil says, None where it may not be read."""
    try:
        return getattr(process, what)()
    except (psutil.Error, OSError):
        return None
