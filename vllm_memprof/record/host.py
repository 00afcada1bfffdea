"""This host in records: its name, the limits of its memory, what its processes have of it.

Standard library only: capture and the launcher use it. ``root`` of a function is the folder below
which ``/proc``, ``/sys`` and ``/dev/shm`` are looked for.
"""

from __future__ import annotations

import os
import re
import resource
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product, takewhile
from pathlib import Path
from typing import NamedTuple

from vllm_memprof.files import read_own

#: Name of this host where the system's is not one: several containers, or hosts that are simulated
#: on one machine.
ENV_HOST = "MEMPROF_HOST"
_ROOT = Path("/")
#: What a limit is of: all memory, files in /dev/shm, memory that is locked or pinned.
MEMORY, SHM, MEMLOCK = "memory", "shm", "memlock"
_TABLE = read_own(__file__, "host.json")
#: From this size on a limit of a cgroup of version 1 is none.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class HostLimit:
    """A limit of host memory that applies to the run, in bytes."""

    name: str  # as the kernel or the shell calls it
    kind: str  # memory | shm | memlock | other
    bytes: int
    used_bytes: int  # of it; file cache that can be dropped does not count
    path: str  # of the cgroup, or of where it is read; of the innermost cgroup it is the first

    @property
    def free_bytes(self) -> int:
        """Return what is left of it."""
        return self.bytes - self.used_bytes


@dataclass(frozen=True)
class HostAsk:
    """Host memory that an argument asks for, on this host."""

    owner: str  # of ``TITLES["host_owners"]``
    argument: str  # as it was given; "" of a default
    bytes: int
    limits: list[str]  # kinds that it counts to
    at_most: bool = False  # it is filled while the engine serves, or never


class Shortfall(NamedTuple):
    """A limit that is below what the arguments ask for."""

    limit: HostLimit
    asks: list[HostAsk]
    asked_bytes: int
    at_most: bool  # it holds what is taken in any case


@dataclass
class HostRecord:
    """What the launcher read of its host."""

    limits: list[HostLimit] = field(default_factory=list)  # before the engine started
    asks: list[HostAsk] = field(default_factory=list)
    #: When the engine was ready. Process id, "self" for the launcher -> what it has (``mapped``).
    processes: dict[str, dict[str, int]] = field(default_factory=dict)
    later: dict[str, dict[str, int]] = field(default_factory=dict)  # the last time, with --sample
    cgroup: dict[str, int] = field(default_factory=dict)  # ``in_use``
    ready: list[HostLimit] = field(default_factory=list)
    #: Of the cgroup: last_bytes before a kill, grown_bytes in the seconds of the run, the process
    #: with the largest resident memory and its largest_bytes; kills: of the kernel, in the run.
    last: dict[str, int] = field(default_factory=dict)


def host_name() -> str:
    """Return ``MEMPROF_HOST``, else the system's name of this host; fit for the name of a file."""
    return re.sub(r"[^\w.-]", "_", os.environ.get(ENV_HOST, "")) or socket.gethostname()


def numbers(path: Path) -> dict[str, int]:
    """Return the lines ``name number`` of a file of the kernel, kB as bytes.

    A number alone has the name of its file; what is no number, as "max", is left out.
    """
    with suppress(OSError):
        lines = r"^(?:(?:Node \d+ )?(\S+?):?\s+)?(\d+)( kB)?\s*$"
        found = re.findall(lines, path.read_text(errors="replace"), re.MULTILINE)
        return {name or path.name: int(size) << 10 * bool(unit) for name, size, unit in found}
    return {}


def cgroups(root: Path = _ROOT) -> Iterator[Path]:
    """Yield the folders of the memory cgroups of this process, from its own to the outermost.

    (proc_pid_cgroup(5), proc_pid_mountinfo(5))
    """
    groups = r"^\d+:(|.*\bmemory\b.*):(/.*)$"
    mounts = r"^\S+ \S+ \S+ (\S+) /(\S+) .* - cgroup(?:(2)| \S+ \S*\bmemory\b)"
    with suppress(OSError):
        own = re.findall(groups, (root / "proc/self/cgroup").read_text(), re.MULTILINE)
        at = re.findall(mounts, (root / "proc/self/mountinfo").read_text(), re.MULTILINE)
        for (names, path), (inside, point, second) in product(own, at):
            if bool(names) != bool(second):
                below = os.path.relpath(path, inside)
                folder = root / point / (below if below[:2] != ".." else "")
                outside = (root / point).parent
                yield from takewhile(outside.__ne__, (folder, *folder.parents))


def read_limits(root: Path = _ROOT) -> list[HostLimit]:
    """Return the limits of host memory that apply to this process, those of its own cgroup first.

    Of the machine: memory, swap, huge pages, NUMA nodes (``host.json``), /dev/shm; of the process:
    memlock.
    """
    found = []
    for row in _TABLE["limits"]:
        for folder in cgroups(root) if row["at"] == "cgroup" else sorted(root.glob(row["at"])):
            read = {
                name: size for file in row["files"] for name, size in numbers(folder / file).items()
            }
            size = read.get(row["size"], 0)
            if 0 < size < _NO_LIMIT:
                used = read.get(row["used"], 0) - sum(read.get(name, 0) for name in row["less"])
                found.append(HostLimit(row["name"], row["kind"], size, used, str(folder)))
    with suppress(OSError):
        shm = os.statvfs(root / "dev/shm")
        used = shm.f_frsize * (shm.f_blocks - shm.f_bavail)
        found.append(HostLimit("/dev/shm", SHM, shm.f_blocks * shm.f_frsize, used, "/dev/shm"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return found if locked < 0 else [*found, HostLimit("ulimit -l", MEMLOCK, locked, 0, "")]


def shortfalls(asks: Iterable[HostAsk], limits: Iterable[HostLimit]) -> list[Shortfall]:
    """Return the limits that are below what is asked for, those that fail in any case first.

    A process that may lock any memory (CAP_IPC_LOCK) passes memlock.
    """
    found = []
    for limit in limits:
        counted = [ask for ask in asks if limit.kind in ask.limits]
        asked, sure = (sum(ask.bytes for ask in counted if so or not ask.at_most) for so in (1, 0))
        if asked > limit.free_bytes:
            at_most = sure <= limit.free_bytes or limit.kind == MEMLOCK
            found.append(Shortfall(limit, counted, asked, at_most))
    return sorted(found, key=lambda each: each.at_most)


def mapped(pid: int | str, root: Path = _ROOT) -> dict[str, int]:
    """Return what a process has in memory, by what is mapped; bytes, shared pages divided (Pss).

    Keys: files in memory by their path, as ``/dev/shm/psm_1`` and ``/memfd:name``; other files by
    the end of their names, as ``*.so``; "", "[heap]" and others of no file. Empty without a process
    that may be read. (proc_pid_smaps(5))
    """
    sizes = Counter[str]()
    each = r"^[0-9a-f]+-\S+(?: +\S+){4} *(.*)\n(?:[A-Z].*\n)*?Pss: +(\d+)"
    file = r"^/(?!dev/|memfd:|SYSV).*?(\.[A-Za-z]\w*)?[.\d]*(?: \(deleted\))?$"
    with suppress(OSError):
        text = (root / f"proc/{pid}/smaps").read_text(errors="replace")
        for name, size in re.findall(each, text, re.MULTILINE):
            sizes[re.sub(file, r"*\1", name)] += int(size) << 10
    return +sizes


def in_use(root: Path = _ROOT) -> dict[str, int]:
    """Return what the cgroup of this process uses, and what that is made of; empty without one.

    Names and bytes of the files of ``host.json``; "oom_kill": the processes that the kernel has
    killed there so far.
    """
    own, found = next(cgroups(root), root), dict[str, int]()
    for name in _TABLE["cgroup"]:
        found |= numbers(own / name)
    return found
