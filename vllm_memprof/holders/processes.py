"""What is known of a process by its number: ``/proc``, and the run folders of memprof.

Only read: the one signal sent is number 0, which tells whether a process exists. A number counts
for a process only in the pid namespace that it is of; of any other nothing is said.

An engine's process is known by its title (``VLLM::EngineCore_DP0``, ``VLLM::Worker_TP1``; the rows
of ``ENGINES`` have the beginnings) or by memprof's record of it. It is left behind when the process
that started it, or one between it and its launcher, has ended: by the record, which holds the
parent's number, or because its parent now is none that starts engines.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
_ENGINES = {row.process_title: row.name for row in ENGINES.values() if row.process_title}
_TITLE = re.compile(rf"^({'|'.join(_ENGINES)})::(\S+)")
#: Roles of processes that an engine's launcher starts, and that are nothing without it.
_CHILD = re.compile(
    "EngineCore|Worker|DPCoordinator|APIServer|scheduler|detokenizer|data_parallel_controller"
)
#: What starts engines: Python and what wraps it, by the name of the program.
_PROGRAMS = "|".join((*_ENGINES.values(), "memprof"))
_STARTERS = re.compile(rf"^(python[\d.]*|pypy[\d.]*|{_PROGRAMS}|pt_main_thread|ray|raylet)$")
_SPAWNED = "multiprocessing.spawn", "multiprocessing.forkserver"
_CLOCK_SLACK_S = 5.0  # the time of boot is known to a second, and clocks are adjusted
_MOST_WORDS = 64  # of a command line that are kept
_MOST_PARENTS = 64


def numbers_of_the_driver(simulated: bool, own: Path = Path("/proc/self/ns/pid")) -> str:
    """Return whose process numbers a driver's list has, as seen from this process.

    An NPU's driver lists the host's. A simulated device lists processes that its shim has found
    alive in this pid namespace.
    """
    if simulated:
        return OWN_NUMBERS
    try:
        inode = int(re.sub(r"\D", "", os.readlink(own)))
    except (OSError, ValueError):
        return UNKNOWN_NUMBERS
    return OWN_NUMBERS if inode == _INITIAL_NAMESPACE else HOST_NUMBERS


def listed_process(pid: int, size: int, numbers: str, folders: Iterable[Path]) -> HolderRow:
    """Return all that is known of a process on the driver's list.

    Args:
        pid: as listed.
        size: its bytes on the device.
        numbers: whose numbers the list has.
        folders: parents of run folders, in which its record is looked for.
    """
    if numbers != OWN_NUMBERS:
        why = text("its number is one of the host: this container cannot tell which process it is")
        if numbers == UNKNOWN_NUMBERS:
            why = text("whether its number is one of the host or of a container is not known")
        return HolderRow(pid, size, ELSEWHERE, why=why)
    found = describe(pid, folders)
    if found is not None:
        return replace(found, bytes=size)
    if psutil.pid_exists(pid):
        return HolderRow(pid, size, HERE, why=text("/proc does not show it to this user"))
    return HolderRow(pid, size, ENDED, why=text("the driver lists it, and no such process lives"))


def describe(pid: int, folders: Iterable[Path]) -> HolderRow | None:
    """Return a process of this pid namespace without its bytes; None where none lives."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                why = text("it has ended, and its parent has not waited for it")
                return HolderRow(pid, None, ENDED, parent_pid=process.ppid(), why=why)
            started = process.create_time()
            words = [word for word in _read(process, "cmdline") or () if word]
            row = HolderRow(
                pid,
                None,
                HERE,
                user=_read(process, "username"),
                command=redact_command(words[:_MOST_WORDS]) if words else None,
                started=datetime.fromtimestamp(started, timezone.utc).isoformat(timespec="seconds"),
                parent_pid=process.ppid(),
            )
    except psutil.Error:
        return None
    record = _record_of(process, started, folders)
    title = _TITLE.match(row.command[0]) if row.command else None
    role = title[2] if title else None if record is None else record.role
    engine = _ENGINES[title[1]] if title else None
    run_dir = None if record is None else str(record.run_dir)
    row = replace(row, engine=engine, role=role, run_dir=run_dir)
    spawned = any(name in word for word in row.command or () for name in _SPAWNED)
    if not (spawned or (title and _CHILD.match(title[2]))):
        return row  # a program that somebody started: with nohup its parent may end
    left, reason = _left_behind(process, record, folders)
    return replace(row, left_behind=left, why=reason)


def left_behind(folders: Iterable[Path]) -> list[HolderRow]:
    """Return every engine's process of this pid namespace whose launcher has ended."""
    found = []
    for process in psutil.process_iter():
        command = _read(process, "cmdline") or []
        recorded = ENV_RUN_DIR in _variables(process)
        if recorded or (command and _TITLE.match(command[0])):
            row = describe(process.pid, folders)
            if row is not None and row.left_behind and (row.engine or row.run_dir):
                found.append(row)
    return sorted(found, key=lambda row: row.pid)


@dataclass(frozen=True)
class _Record:
    """The first line that memprof's recorder wrote in a process."""

    run_dir: Path
    role: str
    ppid: int | None


def _record_of(process: psutil.Process, started: float, folders: Iterable[Path]) -> _Record | None:
    """Return memprof's record of a process.

    A number is used again: a record that was begun before the process started is another's.
    """
    named = _variables(process).get(ENV_RUN_DIR)
    places = [Path(named)] if named else []
    name = f"{EVENTS_DIR}/*-{process.pid}.jsonl"
    paths = [path for place in places for path in place.glob(name)]
    paths += [path for folder in folders for path in folder.glob(f"*/{name}")]
    for path in paths:
        try:
            with path.open("rb") as stream:
                first = json.loads(stream.readline())
            same = first["pid"] == process.pid and first["host"] == host_name()
            if same and first["wall"] >= started - _CLOCK_SLACK_S:
                return _Record(path.absolute().parents[1], str(first["role"]), first.get("ppid"))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _left_behind(
    process: psutil.Process, record: _Record | None, folders: Iterable[Path]
) -> tuple[bool | None, str | None]:
    """Climb from an engine's process to what started it; return whether any of these has ended."""
    child, known = process, record
    for _ in range(_MOST_PARENTS):
        parent_pid = _read(child, "ppid")
        who: str = (
            text("its parent") if child is process else text("the parent of {pid}", pid=child.pid)
        )
        if known is not None and known.ppid is not None and parent_pid != known.ppid:
            return True, text("{who}, {parent}, has ended", who=who, parent=known.ppid)
        if not parent_pid:
            return None, text("{who} is in another pid namespace", who=who)
        try:
            parent = psutil.Process(parent_pid)
            name, command = parent.name(), parent.cmdline()
            started = parent.create_time()
        except psutil.Error:
            return None, text("{who}, {parent}, cannot be read", who=who, parent=parent_pid)
        if not command or not _TITLE.match(command[0]):
            break  # the first ancestor that is no process of an engine
        child, known = parent, _record_of(parent, started, folders)
    else:
        return None, None
    program = Path(command[0]).name if command else name
    if not (_STARTERS.match(name) or _STARTERS.match(program)):
        return True, text(
            "{who} is {parent} ({name}), which starts no engine: its own has ended",
            who=who,
            parent=parent_pid,
            name=name,
        )
    if parent_pid == 1 and not re.search(_PROGRAMS, " ".join(command)):
        return None, text("{who} is 1, a Python program: its own may have ended", who=who)
    return False, text("{who}, {parent} ({name}), lives", who=who, parent=parent_pid, name=name)


def _variables(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process; a title that it set may have overwritten it."""
    found = _read(process, "environ")
    return found if isinstance(found, dict) else {}


def _read(process: psutil.Process, what: str) -> Any:
    """Return what psutil says, None where it may not be read."""
    try:
        return getattr(process, what)()
    except (psutil.Error, OSError):
        return None


def run_parents() -> list[Path]:
    """Return the folders in which run folders are looked for: the default one."""
    return [DEFAULT_PARENT] if DEFAULT_PARENT.is_dir() else []
