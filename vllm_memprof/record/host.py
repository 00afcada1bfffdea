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
from itertools import takewhile
from pathlib import Path

from vllm_memprof.units import format_size

#: Name of this host where the system's is not one: several containers, or hosts that are simulated
#: on one machine.
ENV_HOST = "MEMPROF_HOST"
_ROOT = Path("/")
#: What a limit is of: all memory, files in /dev/shm, memory that is locked or pinned.
MEMORY, SHM, MEMLOCK, OTHER = "memory", "shm", "memlock", "other"
#: Files of a cgroup: a limit -> what is in use of it. (kernel documentation, cgroup-v2.rst and
#: cgroup-v1/memory.rst)
_CGROUP = {
    "memory.max": "memory.current",
    "memory.high": "memory.current",
    "memory.limit_in_bytes": "memory.usage_in_bytes",
}
#: Files that say what it uses; the name of those that hold a number alone.
_IN_USE = (
    ("used", "memory.current"),
    ("used", "memory.usage_in_bytes"),
    ("peak", "memory.peak"),
    ("peak", "memory.max_usage_in_bytes"),
    ("kmem", "memory.kmem.usage_in_bytes"),
    *(("", f"memory.{name}") for name in ("stat", "events", "oom_control")),
)
#: From this size on a limit of version 1 is none.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class HostLimit:
    """A limit of host memory that applies to the run. Bytes; None: unknown, or no limit."""

    name: str  # as the kernel or the shell calls it
    kind: str  # memory | shm | memlock | other
    bytes: int | None
    used_bytes: int | None = None  # of it; file cache that can be dropped does not count
    path: str = ""  # of the cgroup; of the innermost one it is the first

    @property
    def free_bytes(self) -> int | None:
        """Return what is left of it: None without a limit."""
        return None if self.bytes is None else self.bytes - (self.used_bytes or 0)


@dataclass(frozen=True)
class HostAsk:
    """Host memory that an argument asks for, on this host."""

    owner: str  # of accounting/owners/host.toml
    argument: str  # as it was given; "" of a default
    bytes: int
    limits: list[str]  # kinds that it counts to
    at_most: bool = False  # it is filled while the engine serves, or never


@dataclass(frozen=True)
class Shortfall:
    """A limit that is below what the arguments ask for."""

    limit: HostLimit
    asks: list[HostAsk]
    asked_bytes: int
    certain: bool  # also without what may never be filled

    @property
    def said(self) -> str:
        """Return it as a sentence."""
        verb, free = "fails" if self.certain else "may fail", self.limit.free_bytes or 0
        by = ", ".join(dict.fromkeys(ask.argument or ask.owner for ask in self.asks))
        asked = f"{format_size(self.asked_bytes)} asked for by {by}"
        return f"{self.limit.name} {verb}: {asked}, {format_size(free)} left"


@dataclass
class HostRecord:
    """What the launcher read of its host."""

    limits: list[HostLimit] = field(default_factory=list)  # before the engine started
    asks: list[HostAsk] = field(default_factory=list)
    #: When the engine was ready. Process id, "self" for the launcher -> what it has (``mapped``).
    processes: dict[str, dict[str, int]] = field(default_factory=dict)
    cgroup: dict[str, int] = field(default_factory=dict)  # ``in_use``
    ready: list[HostLimit] = field(default_factory=list)
    #: Last reading of the cgroup, what it was before, and the seconds in between.
    last_bytes: int | None = None
    grown_bytes: int | None = None
    grown_seconds: float | None = None
    largest: str | None = None  # process id with the largest resident memory at the last look
    largest_bytes: int | None = None
    kills: int = 0  # processes that the kernel killed in the run, by the cgroups' own counters


def host_name() -> str:
    """Return ``MEMPROF_HOST``, else the system's name of this host; fit for the name of a file."""
    return re.sub(r"[^\w.-]", "_", os.environ.get(ENV_HOST, "")) or socket.gethostname()


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def numbers(path: Path) -> dict[str, int]:
    """Return the lines ``name number`` of a file of the kernel, kB as bytes.

    A number alone has the name ""; what is no number, as "max", is left out.
    """
    found = {}
    for line in _text(path).splitlines():
        words = line.removesuffix(" kB").split()
        if words and words[-1].isdecimal():
            name = words[-2].rstrip(":") if words[1:] else ""
            found[name] = int(words[-1]) << 10 * line.endswith(" kB")
    return found


def cgroups(root: Path = _ROOT) -> Iterator[Path]:
    """Yield the folders of the memory cgroups of this process, from its own to the outermost.

    (proc_pid_cgroup(5), proc_pid_mountinfo(5))
    """
    groups = re.findall(r"^\d+:(|.*\bmemory\b.*):(/.*)$", _text(root / "proc/self/cgroup"), re.M)
    mounts = r"^\S+ \S+ \S+ (\S+) (\S+) .* - cgroup(2|) \S+ (\S+)$"
    found = re.findall(mounts, _text(root / "proc/self/mountinfo"), re.M)
    for names, path in groups:
        for inside, point, second, options in found:
            if bool(names) != bool(second) and (second or "memory" in options.split(",")):
                top, below = root / point[1:], os.path.relpath(path, inside)
                folder = top if below.startswith("..") else top / below
                yield from takewhile(top.parent.__ne__, (folder, *folder.parents))


def read_limits(root: Path = _ROOT) -> list[HostLimit]:
    """Return the limits of host memory that apply to this process, those of its own cgroup first.

    Of the machine: memory, swap, huge pages, its NUMA nodes, /dev/shm; of the process: memlock.
    """
    found = []
    for folder in cgroups(root):
        stat = numbers(folder / "memory.stat")
        idle = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        for name, use in _CGROUP.items():
            if (used := numbers(folder / use).get("")) is not None:
                size = numbers(folder / name).get("", _NO_LIMIT)
                at = f"/{folder.relative_to(root)}"
                limit = None if size >= _NO_LIMIT else size
                found.append(HostLimit(f"cgroup {name}", MEMORY, limit, used - idle, at))
    memory = numbers(root / "proc/meminfo")
    page = memory.get("Hugepagesize", 0)
    sizes = {  # and what is free of it
        ("MemAvailable", MEMORY): (memory.get("MemTotal", 0), memory.get("MemAvailable", 0)),
        ("swap", OTHER): (memory.get("SwapTotal", 0), memory.get("SwapFree", 0)),
        ("hugepages", OTHER): tuple(
            page * memory.get(f"HugePages_{of}", 0) for of in ("Total", "Free")
        ),
    }
    allowed = re.search(r"Mems_allowed_list:\s*(\S+)", _text(root / "proc/self/status"))
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    for node in nodes if len(nodes) > 1 else ():
        at_node = numbers(node / "meminfo")
        bound = allowed is not None and node.name == f"node{allowed[1]}"  # to this one alone
        free = at_node.get("MemFree", 0) + at_node.get("Inactive(file)", 0)
        sizes[f"NUMA {node.name}", MEMORY if bound else OTHER] = at_node.get("MemTotal", 0), free
    with suppress(OSError):
        shm = os.statvfs(root / "dev/shm")
        sizes["/dev/shm", SHM] = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    found += [
        HostLimit(*key, all_of, all_of - free) for key, (all_of, free) in sizes.items() if all_of
    ]
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [*found, HostLimit("ulimit -l", MEMLOCK, None if locked < 0 else locked)]


def shortfalls(asks: Iterable[HostAsk], limits: Iterable[HostLimit]) -> list[Shortfall]:
    """Return the limits that are below what is asked for, those that fail for certain first.

    A process that may lock any memory (CAP_IPC_LOCK) passes memlock: that is never certain.
    """
    listed, found = list(asks), []
    for limit in limits:
        counted = [ask for ask in listed if limit.kind in ask.limits]
        asked, free = sum(ask.bytes for ask in counted), limit.free_bytes
        if free is not None and asked > free:
            sure = sum(ask.bytes for ask in counted if not ask.at_most)
            found.append(Shortfall(limit, counted, asked, sure > free and limit.kind != MEMLOCK))
    return sorted(found, key=lambda each: not each.certain)


def mapped(pid: int | str, root: Path = _ROOT) -> dict[str, int]:
    """Return what a process has in memory, by what is mapped; bytes, shared pages divided (Pss).

    Keys: "anonymous"; files in memory by their path, as ``/dev/shm/psm_1`` and ``/memfd:name``;
    other files by the end of their names, as ``*.so``; "SwapPss" and "Locked", which are no part of
    the others. Empty without a process that may be read. (proc_pid_smaps(5))
    """
    sizes, what = Counter[str](), ""
    with suppress(OSError), (root / f"proc/{pid}/smaps").open(errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("Pss", "SwapPss", "Locked"):
                sizes[what if name == "Pss" else name] += int(value[:-3]) << 10
            elif not line[0].isupper():  # the first line of a mapping
                path = "".join(line.split(maxsplit=5)[5:]).strip().removesuffix(" (deleted)")
                what = path if path.startswith(("/dev/", "/memfd:", "/SYSV")) else "anonymous"
                if path.startswith("/") and what != path:
                    what = "*" + "".join(re.findall(r"\.[A-Za-z]\w*", path)[-1:])
    return +sizes


def in_use(root: Path = _ROOT) -> dict[str, int]:
    """Return what the cgroup of this process uses, "used", and what that is made of.

    Names and bytes of ``memory.stat``, those of version 1 with "total_" before them; "kmem", its
    kernel memory; "oom_kill", the processes that the kernel has killed there so far.
    """
    for folder in cgroups(root):
        known: dict[str, int] = {}
        for name, file in _IN_USE:
            read = numbers(folder / file)
            known |= {name: read[""]} if "" in read else read
        if "used" in known:
            return known
    return {}
