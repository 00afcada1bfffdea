"""The engines that a program of somebody else started: events of all its processes enter, a run
folder for each engine leaves.

An engine core and what it started are one engine, and so are cores of one parent that have
different data-parallel ranks. Engines that live in one process are one: they share an event file.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_memprof.launch.checkpoint import find_checkpoint
from vllm_memprof.launch.folder import create_run_dir, write_run_info
from vllm_memprof.launch.run import utc_text
from vllm_memprof.record.loader import ProcessRecord, load_run
from vllm_memprof.record.schema import EVENTS_DIR, RunInfo
from vllm_memprof.units import only_known

#: A model in a hub's cache, by the path that an engine has of it.
_CACHED = re.compile(r".*/models--(.+)/snapshots/[^/]+/?")


def group_engines(processes: list[ProcessRecord]) -> list[list[ProcessRecord]]:
    """Return the processes of each engine, in the order in which the engines began.

    A process that started several is of none.
    """
    by_pid = {each.identity.pid: each for each in processes}

    def head_of(process: ProcessRecord) -> ProcessRecord:
        """Return the process of the engine core, else the outermost one of the engine."""
        above = by_pid.get(process.identity.ppid)
        if not above or "engine_core" in process.identity.roles:
            return process
        return head_of(above)

    heads: dict[Any, list[ProcessRecord]] = defaultdict(list)  # by process id
    engines: dict[Any, list[ProcessRecord]] = defaultdict(list)  # by parent and number
    for process in sorted(processes, key=lambda each: each.t_ns or 0):
        if process.is_worker or "engine_core" in process.identity.roles:
            heads[head_of(process).identity.pid].append(process)
    seen: Counter[Any] = Counter()  # cores by parent and data-parallel rank
    for pid, own in heads.items():
        parent = by_pid[pid].identity.ppid
        rank = next(iter(only_known(each.identity.dp_rank for each in own)), 0)
        engines[parent, seen[parent, rank]] += own  # the n-th core of a rank is of the n-th engine
        seen[parent, rank] += 1
    for (parent, _), own in engines.items():
        if parent in by_pid and (parent, 1) not in engines:
            own.append(by_pid[parent])
    return list(engines.values())


def write_runs(record: Path, info: RunInfo, code: int) -> list[Path]:
    """Write a run folder for each engine, below ``reports/``; return them.

    Args:
        record: with the events of all processes of the program.
        info: of the program.
        code: its exit status.

    Raises:
        MemprofError: the events cannot be read, or a folder cannot be made.
    """
    write_run_info(record, replace(info, status="ok"))
    folders = []
    for processes in group_engines(load_run(record).processes):
        ready = {what for each in processes for what in each.ready_t_ns}
        paths = only_known(each.model for each in processes)
        path, first = next(iter(paths), info.model), processes[0]
        named = _CACHED.fullmatch(path)
        own = replace(
            info,
            id=uuid.uuid4().hex,
            mode="serve" if "server" in ready else "offline",
            model=named[1].replace("--", "/") if named else path,
            started=utc_text(first.wall),
            start_t_ns=first.t_ns,
            status="ok" if ready else "failed",
            exit_code=code,
            exit_reason=None if ready else f"it did not become ready; the program: status {code}",
            checkpoint=find_checkpoint(path),
        )
        folder = create_run_dir(None, own.model)
        for process in processes:
            shutil.copy(record / EVENTS_DIR / process.file, folder / EVENTS_DIR)
        write_run_info(folder, own)
        folders.append(folder)
    return folders
