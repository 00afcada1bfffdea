"""Host memory of the real engine on the simulated device, in cgroups and under limits of its own."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine import MEMPROF, RunResult, finish, start_memprof
from vllm_memprof.record.host import cgroups
from vllm_memprof.sim.runtime import prepare_runtime

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

GIB, MIB = 1 << 30, 1 << 20
ARGS = [
    "--device=sim:910b",
    "--enforce-eager",
    "--max-model-len=4096",
    "--max-num-batched-tokens=4096",
]
#: The connector of vLLM-Ascend 0.23 that offloads without a server.
SIMPLE = {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}


class Group:
    """A memory cgroup, of either version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def limit(self, size: int) -> None:
        names = ("memory.max", "memory.limit_in_bytes")
        name = next(name for name in names if (self.folder / name).exists())
        (self.folder / name).write_text(str(size))

    def enter(self) -> None:
        """Of a child, before it becomes memprof."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))


@pytest.fixture
def group() -> Iterator[Group]:
    for parent in [*cgroups()][::-1]:
        folder = parent / f"memprof-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if any(folder.glob("memory.*")) and (folder / "memory.stat").exists():
            yield Group(folder)
            for _ in range(100):  # the last of its processes may still be ending
                try:
                    return folder.rmdir()
                except OSError:
                    time.sleep(0.05)
            return
        folder.rmdir()
    pytest.skip("no memory cgroup can be made here")


def run(tmp_path: Path, *args: str, before=None, env=None) -> RunResult:
    run_dir = tmp_path / "run"
    process = start_memprof(
        ["offline", *args, *ARGS], run_dir, preexec_fn=before, env={**os.environ, **(env or {})}
    )
    return finish(process, run_dir)


def findings(result: RunResult, name: str) -> list[dict]:
    return [each for each in result.report["findings"] if each["id"] == name]


def test_owners_add_up_to_the_cgroup(sim_stack, tmp_path, group):
    """0.9 GiB of KV offload are 4 tensors of 230 MiB, each in a block of 256."""
    result = run(tmp_path, "memprof/tiny", "--kv-offloading-size=0.9", "--prompt=hello",
                 before=group.enter, env=SIMPLE)  # fmt: skip
    assert result.returncode == 0, result.output[-3000:]
    (host,) = result.report["host_memory"]
    assert host["used_bytes"] > GIB
    assert abs(host["unexplained_bytes"]) <= 0.03 * host["used_bytes"], host
    (rank,) = result.report["ranks"]
    rows = {row["owner"]: row for row in rank["host_memory"]["rows"]}
    offload = rows["pinned:kv_offload"]
    assert offload["bytes"] == GIB
    assert 0.8 * GIB < offload["tensor_bytes"] <= 0.9 * GIB
    assert rows["rest"]["bytes"] > 100 * MIB
    (rounded,) = findings(result, "pinned-rounding")
    assert rounded["bytes"] == offload["bytes"] - offload["tensor_bytes"]
    assert "--kv-offloading-size 1" in rounded["action"]
    # of the snapshots: what torch has pinned, in the phase in which it was
    phases = {phase["phase"]: phase for phase in rank["phases"]}
    before, after = (
        phases["kv_cache_alloc"][edge]["host_pinned_bytes"] for edge in ("before", "after")
    )
    assert after - before >= GIB > before


def test_a_kill_by_the_kernel_has_the_last_reading(sim_stack, tmp_path, group):
    group.limit(2 * GIB)
    result = run(tmp_path, "memprof/tiny", "--kv-offloading-size=1.9", "--prompt=hello",
                 before=group.enter, env=SIMPLE)  # fmt: skip
    assert result.returncode != 0
    at_start, _, _ = result.output.partition("device_init")
    assert "memory" in at_start
    assert "3.80 GiB asked for by --kv-offloading-size 1.9" in at_start
    failure, host = result.report["failure"], result.report["run"]["host_memory"]
    assert failure["kind"] == "host-memory"  # likely or certain, by who saw the end first
    assert host["last"]["kills"] >= 1
    assert 0.5 * GIB < host["last"]["last_bytes"] <= 2 * GIB
    assert "worker TP0" in result.report["run"]["exit_reason"]  # killed, or vanished
    killed = next(each for each in findings(result, "host-limit") if "kernel" in each["title"])
    assert killed["severity"] == "error"
    for said in (
        "KV offload 1.90 GiB",
        "the limit is 2.00 GiB",
        "the last reading",
        str(group.folder),
    ):
        assert said in killed["evidence"]
    assert "the last reading" in " ".join(result.output.split())  # of the first screen


@pytest.mark.full
def test_memlock(sim_stack, tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 * MIB, 8 * MIB))

    result = run(tmp_path, "memprof/tiny", "--kv-offloading-size=0.3", "--prompt=hello",
                 before=limit, env={**SIMPLE, "MEMPROF_SIM_LIMITS": "memlock"})  # fmt: skip
    assert result.returncode != 0
    assert "ulimit -l may be too low" in result.output.partition("device_init")[0]
    assert result.report["failure"]["kind"] == "host-memory"
    (found,) = findings(result, "host-limit")
    assert "--ulimit memlock=-1" in found["action"]


@pytest.mark.full
def test_shared_memory_of_the_multimodal_cache(sim_stack, tmp_path):
    """The ring of the cache is made sparse, and its first write beyond /dev/shm is a SIGBUS."""
    try:
        subprocess.run(["unshare", "-m", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mount namespace can be made here")
    images = tmp_path / "images"
    images.mkdir()
    make = ("import os,sys; from PIL import Image; "
            "Image.frombytes('RGB', (1024, 1024), os.urandom(3 << 20)).save(sys.argv[1])")  # fmt: skip
    subprocess.run(
        [prepare_runtime("910b", sim_stack).python, "-c", make, str(images / "0.png")], check=True
    )
    run_dir = tmp_path / "run"
    command = [*MEMPROF, "offline", "--run-dir", str(run_dir), "memprof/tiny-vl", *ARGS,
               "--mm-processor-cache-type=shm", "--mm-processor-cache-gb=1", f"--images={images}"]  # fmt: skip
    script = 'mount -t tmpfs -o size=3m tmpfs /dev/shm && exec "$@"'
    with Path(f"{run_dir}.out").open("w") as out:
        process = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", script, "sh", *command],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    result = finish(process, run_dir)
    assert result.returncode != 0
    start = result.output.partition("device_init")[0]
    assert "/dev/shm is too low" in start
    assert "SIGBUS" in result.report["run"]["exit_reason"]
    assert "a larger /dev/shm" in " ".join(result.output.split())  # of the first screen
