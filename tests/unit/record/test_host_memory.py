"""Limits of host memory, and what processes have of it, from the files of a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.host_files import write_host
from vllm_memprof.record.host import (
    HostAsk,
    HostLimit,
    cgroups,
    in_use,
    mapped,
    read_limits,
    shortfalls,
)

GIB = 1 << 30
V2 = {
    "proc/self/cgroup": "0::/system.slice/docker-1.scope",
    "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw",
    "sys/fs/cgroup/system.slice/memory.max": f"{6 * GIB}",
    "sys/fs/cgroup/system.slice/memory.current": f"{5 * GIB}",
    "sys/fs/cgroup/system.slice/docker-1.scope/memory.max": f"{4 * GIB}",
    "sys/fs/cgroup/system.slice/docker-1.scope/memory.high": f"{5 * GIB}",
    "sys/fs/cgroup/system.slice/memory.high": "max",
    "sys/fs/cgroup/system.slice/docker-1.scope/memory.current": f"{3 * GIB}",
    "sys/fs/cgroup/system.slice/docker-1.scope/memory.stat": f"anon 7\ninactive_file {GIB}",
    "sys/fs/cgroup/system.slice/docker-1.scope/memory.events": "high 0\noom 2\noom_kill 1",
}
#: In a container, whose cgroup is the root of what is mounted.
V1 = {
    "proc/self/cgroup": "9:name=systemd:/x\n4:cpu,memory:/docker/abc\n0::/",
    "proc/self/mountinfo": "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
    "sys/fs/cgroup/memory/memory.kmem.usage_in_bytes": "9",
    "sys/fs/cgroup/memory/memory.stat": "cache 1\ntotal_cache 2\ntotal_inactive_file 4096",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3",
}


def groups(root: Path) -> list[HostLimit]:
    return [limit for limit in read_limits(root) if limit.name.startswith("cgroup")]


def test_every_level_of_version_2(tmp_path):
    write_host(tmp_path, V2)
    own = str(tmp_path / "sys/fs/cgroup/system.slice/docker-1.scope")
    above = str(tmp_path / "sys/fs/cgroup/system.slice")
    assert groups(tmp_path) == [
        HostLimit("cgroup memory.max", "memory", 4 * GIB, 2 * GIB, own),
        HostLimit("cgroup memory.max", "memory", 6 * GIB, 5 * GIB, above),
        HostLimit("cgroup memory.high", "memory", 5 * GIB, 2 * GIB, own),
    ]
    use = in_use(tmp_path)
    assert (use["memory.current"], use["anon"], use["oom_kill"]) == (3 * GIB, 7, 1)


def test_version_1_in_a_container(tmp_path):
    write_host(tmp_path, V1)
    assert groups(tmp_path) == []  # it has no limit
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text(f"{2 * GIB}")
    name, path = "cgroup memory.limit_in_bytes", str(tmp_path / "sys/fs/cgroup/memory")
    assert groups(tmp_path) == [HostLimit(name, "memory", 2 * GIB, GIB - 4096, path)]
    use = in_use(tmp_path)
    names = ("memory.usage_in_bytes", "memory.kmem.usage_in_bytes", "total_cache", "oom_kill")
    assert [use[name] for name in names] == [GIB, 9, 2, 3]


def test_a_host_that_says_nothing(tmp_path):
    assert [*cgroups(tmp_path)] == []
    assert [limit.name for limit in read_limits(tmp_path)] == ["ulimit -l"]
    assert in_use(tmp_path) == {}
    assert mapped(1, tmp_path) == {}


def test_the_machine_and_its_nodes(tmp_path):
    node = "Node 0 MemTotal: 8 kB\nNode 0 MemFree: 2 kB\nNode 0 Inactive(file): 1 kB"
    write_host(tmp_path, {
        "proc/meminfo": "MemTotal: 64 kB\nMemAvailable: 32 kB\nSwapTotal: 0 kB\nHugetlb: 8192 kB",
        "sys/devices/system/node/node0/meminfo": node,
    })  # fmt: skip
    found = {limit.name: limit for limit in read_limits(tmp_path)}
    assert (found["MemAvailable"].bytes, found["MemAvailable"].free_bytes) == (64 << 10, 32 << 10)
    assert (found["hugepages"].bytes, found["hugepages"].used_bytes) == (8 << 20, 8 << 20)
    assert (found["NUMA node"].kind, found["NUMA node"].free_bytes) == ("other", 3 << 10)
    assert "swap" not in found  # a host without any


SMAPS = """\
7f00-7f10 rw-p 00000000 00:00 0
Rss: 40 kB
Pss: 30 kB
Pss_Anon: 30 kB
Locked: 4 kB
SwapPss: 8 kB
7f10-7f20 rw-p 00000000 00:00 0    [heap]
Pss: 2 kB
7f20-7f30 rw-s 00000000 00:01 9    /dev/shm/psm_1a (deleted)
Pss: 16 kB
7f30-7f40 r--p 00000000 08:01 7    /models/a b/model-1-of-2.safetensors
Pss: 64 kB
7f40-7f50 r-xp 00000000 08:01 7    /usr/lib/libc.so.6
Pss: 1 kB
"""


def test_what_a_process_has(tmp_path):
    write_host(tmp_path, {"proc/7/smaps": SMAPS})
    kib = {name: size >> 10 for name, size in mapped(7, tmp_path).items()}
    assert kib == {
        "": 30,
        "[heap]": 2,
        "/dev/shm/psm_1a (deleted)": 16,
        "*.safetensors": 64,
        "*.so": 1,
    }


@pytest.mark.parametrize(
    ("asks", "found"),
    [
        ([HostAsk("a", "", 3, ["memory"])], []),
        ([HostAsk("a", "", 5, ["memory"])], [("m", 5, False)]),
        ([HostAsk("a", "", 3, ["memory"]), HostAsk("b", "", 2, ["memory", "shm"])],
         [("m", 5, False), ("s", 2, False)]),
        ([HostAsk("a", "", 3, ["memory"]), HostAsk("b", "", 2, ["memory"], True)], [("m", 5, True)]),
        ([HostAsk("a", "", 9, ["memlock"])], [("l", 9, True)]),  # CAP_IPC_LOCK passes it
    ],
)  # fmt: skip
def test_limits_that_are_below_what_is_asked_for(asks, found):
    limits = [HostLimit("l", "memlock", 8, 0, ""), HostLimit("m", "memory", 10, 6, ""),
              HostLimit("s", "shm", 1, 0, "")]  # fmt: skip
    assert [(each.limit.name, each.asked_bytes, each.at_most)
            for each in shortfalls(asks, limits)] == found  # fmt: skip
