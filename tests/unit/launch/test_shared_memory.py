"""Shared memory of runs: what is noted, what is removed, and what is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.unit.launch.test_run import make_job, run
from vllm_memprof.launch.doctor import diagnose
from vllm_memprof.launch.shared_memory import SHM, SharedMemory, left_behind

#: Maps each file that it is given, says so, and waits.
_MAPS = """
import mmap, os, sys, time
for path in sys.argv[2:]:
    made = path + ".new" if "sem." in path else path  # as sem_open does
    fd = os.open(made, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, 4096)
    if made != path:
        os.link(made, path)
        os.unlink(made)
    kept = mmap.mmap(fd, 4096, **({"flags": mmap.MAP_PRIVATE} if "private" in path else {}))
    globals()[path] = kept
    os.close(fd)
print("READY", flush=True)
time.sleep(float(sys.argv[1]))
"""
#: A launcher: notes what an engine maps, says so, and waits to be killed.
_LAUNCHER = """
import json, subprocess, sys, time
from pathlib import Path
from vllm_memprof.launch.shared_memory import SharedMemory
folder, code, *files = sys.argv[1:]
shared = SharedMemory(Path(folder, "state"), Path(folder))
Path(folder, "state").touch(0o600)
engine = subprocess.Popen([sys.executable, "-c", code, "60", *files], stdout=subprocess.PIPE)
engine.stdout.readline()
shared.look(lambda: [engine.pid], False)
print(engine.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHM, prefix="test-memprof-") as name:
        yield Path(name)


def mapper(*paths: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _MAPS, "60", *map(str, paths)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"READY\n"
    process.stdout.close()
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("memprof-run"))


def test_what_a_run_maps_is_removed_at_its_end_and_nothing_else(folder: Path) -> None:
    (folder / "psm_before").touch(0o600)
    shared = SharedMemory(None, folder)
    (folder / "output").touch(0o644)  # a file that a program writes, not shared memory
    (folder / "psm_of_another").touch(0o600)
    files = [folder / name for name in ("psm_1", "sem.mp-2", "private", "psm_before", "output")]
    engine = mapper(*files)
    shared.look(lambda: [engine.pid], True)
    shared.look(lambda: pytest.fail("nothing has changed"), False)
    end(engine)
    shared.close()
    assert names(folder) == ["output", "private", "psm_before", "psm_of_another"]
    assert not list(folder.glob("memprof-*"))


def test_what_somebody_has_still_is_left_until_nobody_has_it(folder: Path) -> None:
    shared = SharedMemory(None, folder)
    engine = mapper(folder / "psm_1", folder / "psm_2")
    other = mapper(folder / "psm_2")
    shared.look(lambda: [engine.pid], False)
    end(engine)
    shared.close()
    assert names(folder) == ["psm_2"]
    assert left_behind(remove=True, folder=folder) == []
    end(other)
    assert left_behind(remove=True, folder=folder) == [folder / "psm_2"]
    assert list(folder.iterdir()) == []


def test_the_next_start_removes_what_a_killed_launcher_left(folder: Path) -> None:
    command = [sys.executable, "-c", _LAUNCHER, str(folder), _MAPS]
    files = [folder / name for name in ("psm_1", "sgl_shm_mq_2", "psm_replaced")]
    launcher = subprocess.Popen([*command, *map(str, files)], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    engine = int(launcher.stdout.readline())
    launcher.stdout.close()
    assert left_behind(folder=folder) == []  # its launcher lives
    end(launcher)
    assert left_behind(folder=folder) == [folder / "state"]  # its engine lives
    # a test before this one may have made this process the one that adopts orphans
    mapping = psutil.Process(engine)
    mapping.kill()
    mapping.wait(10)
    (folder / "new").touch(0o600)  # another file of that name is another's
    (folder / "new").rename(folder / "psm_replaced")
    left = left_behind(folder=folder)
    assert sorted(path.name for path in left) == ["psm_1", "sgl_shm_mq_2", "state"]
    assert names(folder) == ["psm_1", "psm_replaced", "sgl_shm_mq_2", "state"]  # only listed
    assert left_behind(remove=True, folder=folder) == left
    assert [path.name for path in folder.iterdir()] == ["psm_replaced"]


@pytest.mark.parametrize("kind", ["link", "named pipe", "empty", "others may write"])
def test_a_ledger_that_is_not_memprofs_own_removes_nothing(folder: Path, kind: str) -> None:
    victim, ledger = folder / "victim", folder / "memprof-run-0"
    victim.touch(0o600)
    listed = folder / "listed"
    listed.write_text("" if kind == "empty" else f"0 {victim}\n")
    listed.chmod(0o666 if kind == "others may write" else 0o600)
    if kind == "link":
        ledger.symlink_to(listed)
    elif kind == "named pipe":
        os.mkfifo(ledger, 0o600)
    else:
        listed.rename(ledger)
    assert left_behind(remove=True, folder=folder) == []
    assert victim.exists()


def test_a_start_removes_it_and_doctor_lists_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("doctor", "run"):  # other tests start runs at the same time
        found = partial(left_behind, folder=folder)
        monkeypatch.setattr(f"vllm_memprof.launch.{name}.left_behind", found)
    left, ledger = folder / "psm_1", folder / "memprof-run-0"
    left.touch(0o600)
    ledger.touch(0o600)
    ledger.write_text(f"{left.stat().st_ino} {left}\n")
    rows = [row for row in diagnose()[0] if row.name == "left in memory"]
    assert [row.found for row in rows] == ["1 files of killed runs: psm_1"]
    assert left.exists()
    outcome, view = run(make_job(tmp_path, mode="plan"))
    assert outcome.verdict.status == "ok"
    assert "memprof: removed shared memory of killed runs: 1 files" in view.notes
    assert list(folder.iterdir()) == []
    assert not any(row.name == "left in memory" for row in diagnose()[0])
