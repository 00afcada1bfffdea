"""Accounting across processes: neighbours, deaths, forks, visible devices."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shim.conftest import Sim, results_of

GIB = 1 << 30
CONTEXT = 375_809_638  # of the first process on a device
FURTHER_CONTEXT = 78_993_067  # of each other one
RUNTIME = 27_332_608  # the part of it that the runtime's counter shows

HOLDER = """
import acl, sys
acl.set_device(0)
acl.malloc({size})
acl.result(used=acl.used())
sys.stdin.readline()
"""


def hold(sim: Sim, size_bytes: int, **extra: str) -> subprocess.Popen[str]:
    """A process that holds memory on device 0 until its stdin ends."""
    process = sim.start(HOLDER.format(size=size_bytes), **extra)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("RESULT")
    return process


def used_by_all(sim: Sim, **extra: str) -> int:
    """Bytes in use on device 0, less the reader's own context."""
    code = """
import acl, os
acl.set_device(0)
acl.result(used=acl.used() - acl.processes(0)[os.getpid()])
"""
    return int(sim.run(code, **extra)["used"])


def test_processes_see_each_other(sim: Sim, change_profile: Callable[..., None]) -> None:
    change_profile(total_bytes=8 * GIB)
    first, second = hold(sim, 2 * GIB), hold(sim, 3 * GIB)
    assert used_by_all(sim) == 5 * GIB + CONTEXT + FURTHER_CONTEXT
    refused = sim.run(f"""
import acl
acl.set_device(0)
acl.result(code=acl.malloc_error({3 * GIB}))
""")
    assert refused["code"] == 207001
    first.communicate("\n", timeout=30)
    assert used_by_all(sim) == 3 * GIB + FURTHER_CONTEXT
    second.communicate("\n", timeout=30)
    assert used_by_all(sim) == 0


def test_a_killed_process_loses_its_memory(sim: Sim) -> None:
    victim = hold(sim, 4 * GIB)
    assert used_by_all(sim) == 4 * GIB + CONTEXT
    victim.send_signal(signal.SIGKILL)
    victim.wait(30)
    assert used_by_all(sim) == 0


def test_a_zombie_counts_as_dead(sim: Sim) -> None:
    victim = hold(sim, 4 * GIB)
    victim.send_signal(signal.SIGKILL)  # not waited for: it stays a zombie
    while (
        b"Z"
        not in subprocess.run(
            ["ps", "-o", "stat=", "-p", str(victim.pid)], capture_output=True, check=False
        ).stdout
    ):
        pass
    assert used_by_all(sim) == 0
    victim.wait(30)


def test_kills_at_any_moment_leave_nothing_behind(sim: Sim) -> None:
    code = """
import acl
acl.set_device(0)
while True:
    acl.free(acl.malloc(1 << 21))
"""
    watcher = hold(sim, 2 << 20)
    for delay_s in (0.15, 0.2, 0.25, 0.3, 0.35, 0.4):
        victims = [sim.start(code) for _ in range(2)]
        try:
            victims[0].wait(delay_s)
        except subprocess.TimeoutExpired:
            pass
        for victim in victims:
            victim.kill()
        for victim in victims:
            victim.communicate()
    assert used_by_all(sim) == (2 << 20) + CONTEXT
    watcher.communicate("\n", timeout=30)


def test_a_forked_child_owns_nothing(sim: Sim) -> None:
    figures = sim.run("""
import acl, os
acl.set_device(0)
block = acl.malloc(1 << 30)
before = acl.used()
read_end, write_end = os.pipe()
pid = os.fork()
if pid == 0:
    foreign = acl.error_of("aclrtFree", acl.ctypes.c_void_p(block))
    device = acl.ctypes.c_int()
    context = acl.error_of("aclrtGetDevice", acl.ctypes.byref(device))
    acl.set_device(1)
    acl.malloc(1 << 21)
    os.write(write_end, f"{foreign} {context} {acl.used()}".encode())
    os._exit(0)
os.waitpid(pid, 0)
foreign, context, child_used = os.read(read_end, 100).decode().split()
grown = acl.used() - before
acl.result(foreign=int(foreign), context=int(context), child_used=int(child_used), grown=grown)
""")
    assert figures == {
        "foreign": 107000,
        "context": 107002,
        "child_used": CONTEXT + (1 << 21),
        "grown": 0,
    }


def test_visible_devices_map_to_physical_ones(sim: Sim) -> None:
    holder = hold(sim, GIB, ASCEND_RT_VISIBLE_DEVICES="5")
    assert used_by_all(sim) == 0
    assert used_by_all(sim, ASCEND_RT_VISIBLE_DEVICES="3,5") == 0
    assert used_by_all(sim, ASCEND_RT_VISIBLE_DEVICES="5,6") == GIB + CONTEXT
    counts = {"6,7,99,0": 2, "0, 1": 1, "5,3": 0, "0,0": 0, "": 0, "npu0": 0, "1,": 1}
    for visible, expected in counts.items():
        count = sim.run(
            "import acl, ctypes as c; n = c.c_uint32(); all = c.c_uint32(); "
            "acl.error_of('aclrtGetDeviceCount', c.byref(n)); acl.call('drvGetDevNum', c.byref(all)); "
            "acl.result(n=n.value, all=all.value)",
            ASCEND_RT_VISIBLE_DEVICES=visible,
        )
        assert count == {"n": expected, "all": 8}, visible
    holder.communicate("\n", timeout=30)


def test_counters_are_those_of_the_driver(sim: Sim) -> None:
    """By module, of the calling process alone, largest first; the device's own part of a context is
    in none."""
    neighbour = hold(sim, 5 << 30)
    figures = sim.run("""
import acl
acl.set_device(0)
block = acl.malloc(64 << 20)
# torch_npu asks so for its operators' workspaces: the application's too
workspace = acl.malloc(2 << 20, acl.HUGE_ONLY)
acl.free(block)
usage = acl.usage()
acl.result(usage=usage, order=list(usage), all=acl.used())
""")
    assert figures["usage"] == {"APP": [2 << 20, 66 << 20], "RUNTIME": [RUNTIME, RUNTIME]}
    assert figures["order"] == ["RUNTIME", "APP"]
    assert figures["all"] == CONTEXT + FURTHER_CONTEXT + (5 << 30) + (2 << 20)
    neighbour.communicate("\n", timeout=30)


def test_the_management_interface_names_every_process(sim: Sim) -> None:
    neighbour = hold(sim, 3 * GIB, ASCEND_RT_VISIBLE_DEVICES="5")
    code = """
import acl, os
acl.set_device(1)
acl.malloc(1 << 30)
held = acl.processes(1)
acl.result(own=held.pop(os.getpid()), others=held, used=acl.used(), elsewhere=acl.processes(0))
"""
    figures = sim.run(code, ASCEND_RT_VISIBLE_DEVICES="3,5")
    assert figures == {
        "own": GIB + FURTHER_CONTEXT,
        "others": {str(neighbour.pid): 3 * GIB + CONTEXT},
        "used": 4 * GIB + CONTEXT + FURTHER_CONTEXT,
        "elsewhere": {},
    }
    neighbour.communicate("\n", timeout=30)


def test_a_reset_device_gives_everything_back(sim: Sim) -> None:
    figures = sim.run("""
import acl
acl.set_device(0)
acl.malloc(1 << 30)
acl.call("aclrtResetDevice", 0)
acl.set_device(0)
acl.result(used=acl.used())
""")
    assert figures["used"] == CONTEXT


def test_a_missing_profile_is_an_error(sim: Sim) -> None:
    process = sim.start(
        "import acl; acl.result(code=acl.error_of('aclrtSetDevice', 0), text=acl.message())",
        MEMPROF_SIM_PROFILE="/nonexistent",
    )
    out, err = process.communicate(timeout=30)
    assert results_of(out)[-1]["code"] != 0
    assert "cannot read the device profile /nonexistent" in err


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "device"])
def test_a_state_file_of_somebody_else_is_refused(sim: Sim, tmp_path: Path, kind: str) -> None:
    """Its folder may be one that everybody writes to, such as /dev/shm."""
    state, target = tmp_path / "state", tmp_path / "target"
    if kind == "pipe":
        os.mkfifo(state)
    elif kind == "device":
        state = Path("/dev/null")
    else:
        state.symlink_to(target)
        if kind == "link":
            target.write_bytes(b"not to be lost")
    process = sim.start("import acl\nacl.set_device(0)\n", MEMPROF_SIM_STATE=str(state))
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "link" in error or "not a regular file of this user" in error
    assert not target.exists() or target.read_bytes() == b"not to be lost"


def test_a_state_file_is_its_owners_alone(sim: Sim, tmp_path: Path) -> None:
    (tmp_path / "state").touch(0o666)
    (tmp_path / "state").chmod(0o666)
    with_holder = hold(sim, GIB)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600
    with_holder.kill()
