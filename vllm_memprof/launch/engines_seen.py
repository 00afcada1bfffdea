"""The engines that a program of somebody else started: events of all its processes enter, a run
folder for each engine leaves.

An engine core and what it started are one engine; cores of one parent that have different
data-parallel ranks are one as well. Engines that live in one process (without a process for the
core) are one: their events are in one file.
"""

from __future__ import annotations

import re
import shutil
import uuid
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from vllm_memprof.launch.checkpoint import find_checkpoint
from vllm_memprof.launch.folder import create_run_dir, write_run_info
from vllm_memprof.record.loader import ProcessRecord, load_run
from vllm_memprof.record.schema import EVENTS_DIR, RunInfo
from vllm_memprof.units import only_known

#: A model in a hub's cache, by the path that an engine has of it.
_CACHED = re.compile(r".*/models--(.+)/snapshots/[^/]+/?")


def group_engines(processes: list[ProcessRecord]) -> list[list[ProcessRecord]]:
    """Return the processes of each engine, in the order in which they began; fronts that several
    engines have in common are left out."""
    by_pid = {each.identity.pid: each for each in processes}

    def head_of(process: ProcessRecord) -> ProcessRecord:
        """Return the process of the engine core, else the outermost one of the engine."""
        found = each = process
        while each is not None and "engine_core" not in found.identity.roles:
            found, each = each, by_pid.get(each.identity.ppid)
        return found

    engines: list[tuple[int | None, dict[int, list[ProcessRecord]]]] = []  # parent; by DP rank
    for head in sorted(
        {id(head): head for head in map(head_of, filter(_is_of_engine, processes))}.values(),
        key=lambda each: each.t_ns or 0,
    ):
        own = [each for each in processes if _is_of_engine(each) and head_of(each) is head]
        rank = next(iter(only_known(each.identity.dp_rank for each in own)), 0)
        parent = head.identity.ppid
        fits = (ranks for at, ranks in engines if at == parent and rank not in ranks)
        found = next(fits, None)
        if found is None:
            engines.append((parent, found := {}))
        found[rank] = own
    parents = [parent for parent, _ in engines]
    return [
        [each for own in ranks.values() for each in own]
        + [each for each in processes if each.identity.pid == parent and parents.count(parent) == 1]
        for parent, ranks in engines
    ]


def _is_of_engine(process: ProcessRecord) -> bool:
    return process.is_worker or "engine_core" in process.identity.roles


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
        begun = min(each.t_ns or 0 for each in processes)
        ended = max(each.last_t_ns or 0 for each in processes)
        path = next(iter(only_known(each.identity.model for each in processes)), "unknown")
        named = _CACHED.fullmatch(path)
        model = named[1].replace("--", "/") if named else path
        walls = only_known(each.wall for each in processes)
        started = datetime.fromtimestamp(min(walls, default=0), timezone.utc)
        own = replace(
            info,
            id=uuid.uuid4().hex,
            mode="serve" if "server" in ready else "offline",
            model=model,
            started=started.isoformat(timespec="seconds").replace("+00:00", "Z"),
            start_t_ns=begun,
            seconds=round((ended - begun) / 1e9, 3),
            status="ok" if ready else "failed",
            exit_code=code,
            exit_reason=None if ready else f"it did not become ready; the program: status {code}",
            checkpoint=find_checkpoint(path),
        )
        folder = create_run_dir(None, model)
        for process in processes:
            shutil.copy(record / EVENTS_DIR / process.file, folder / EVENTS_DIR)
        write_run_info(folder, own)
        folders.append(folder)
    return folders
