"""Plan on aarch64 what x86-64 plans, and compare every byte: ``make test-arm64``.

Makes a Debian for aarch64 in a folder, runs it with qemu's user emulation, installs the wheel of
this tree and a stack there, and plans a tiny model there and here. Compared is each leaf of
``report.json`` whose path names bytes, tokens or blocks, except host memory and samples over time.
Needs root on Debian, x86-64, 8 GB of disk and of memory, a package index as pip is configured here,
and half an hour, on a busy machine two. A second run goes on: what is installed stays. Mounts are
the script's own and end with it; its entry in the kernel for programs of aarch64 is removed.

Exit status 0: no value differs, or only those that do under emulation. 1: others do, and are
listed. 2: a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.compare_figures import flat
from vllm_memprof.sim.stacks import DEFAULT_STACK

ROOT = Path(__file__).resolve().parent.parent
#: Program -> Debian package.
TOOLS = {
    "qemu-aarch64-static": "qemu-user-static",
    "mmdebstrap": "mmdebstrap",
    "arch-test": "arch-test",
}
RELEASE = "bookworm"  # of Debian: its Python is 3.11, that of the stacks
PACKAGES = "python3.11,python3.11-venv,python3-pip,g++,ca-certificates,procps,make"
BINFMT = Path("/proc/sys/fs/binfmt_misc")
ENTRY = BINFMT / "memprof-aarch64"
#: The head of a program for aarch64, and which of its bits count. F: the emulator is opened now, so
#: that it is there in another root as well.
REGISTER = (
    rf":{ENTRY.name}:M::\x7fELF\x02\x01\x01" + r"\x00" * 9 + r"\x02\x00\xb7\x00:"
    r"\xff\xff\xff\xff\xff\xff\xff\x00" + r"\xff" * 8 + r"\xfe\xff\xff\xff:{}:F"
)
#: Of this machine, that pip and the resolver read.
SETTINGS = ("etc/resolv.conf", "etc/hosts", "etc/pip.conf", "etc/xdg/pip", "root/.config/pip")
PLANS: dict[str, list[str]] = {
    "eager": ["--enforce-eager"],
    "eager, TP=2": ["--enforce-eager", "--tensor-parallel-size", "2"],
    # few graphs: qemu's MADV_REMOVE does nothing, and what a capture drops stays in host memory
    "graphs, until ready": ["--until=ready", "--max-model-len=4096", "--max-num-seqs=8"],
}
COMPARED = re.compile(r"bytes|tokens|blocks")
#: Host memory and samples: of the machine and the moment.
NOT_COMPARED = re.compile(r"\bhost_(rss|shared|memory)|\bsamples\b")
#: What differs under emulation -> why.
EXPECTED = {
    r"^growth\[\d+\]\.growth\.": "host memory: qemu keeps what the device drops",
    r"^findings\[empty-cache-refilled,": "a finding by the seconds of a call",
}
LISTED = 20
ENDS_WITHIN_S = 60
ROOM_BYTES = 8 * 2**30


class Failed(Exception):
    """A step that failed: what, and what to do."""


def needed() -> Iterator[str]:
    """Return what this machine lacks for it."""
    if os.geteuid() != 0:
        yield "root, for chroot and mounts"
    if platform.machine() != "x86_64":
        yield "x86-64: on aarch64 run `make test` itself"
    if not shutil.which("apt-get") or not shutil.which("unshare"):
        yield "Debian or one of its kind: apt-get, unshare"


def check_room(folder: Path) -> None:
    """Refuse a folder without room for a system and a stack.

    Raises:
        Failed: with what is free.
    """
    free = shutil.disk_usage(folder).free
    if free < ROOM_BYTES:
        raise Failed(f"{folder} has {free / 2**30:.0f} GiB free, 8 are needed: --folder DIR")


class Job:
    """The steps, each with its seconds; all of them end at one moment."""

    def __init__(self, folder: Path, stack: str, minutes: float) -> None:
        self.folder, self.stack = folder, stack
        self.root = folder / "root"
        self.end = time.monotonic() + 60 * minutes
        self.log = folder / "arm64.log"

    def step(self, title: str, action: Callable[..., str | None], *arguments: Any) -> None:
        print(f"{title} ...", end=" ", flush=True)
        started = time.monotonic()
        note = action(*arguments)
        print(f"{time.monotonic() - started:.0f} s{f': {note}' if note else ''}", flush=True)

    def run(self, *command: str, env: dict[str, str] | None = None) -> None:
        """Run a command, its lines to the log.

        Raises:
            Failed: with its last lines.
        """
        with self.log.open("a+") as log:
            log.write(f"\n$ {shlex.join(command)}\n")
            log.flush()
            start = log.tell()
            process = subprocess.Popen(
                command,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            why = "--minutes are over"
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    why = f"ended with status {process.wait(max(self.end - time.monotonic(), 1))}"
            finally:
                for number in (signal.SIGTERM, signal.SIGKILL):  # memprof ends its children
                    if process.returncode is None:
                        os.killpg(process.pid, number)
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(ENDS_WITHIN_S)
            if process.returncode:
                log.seek(start)
                tail = "".join(f"  {line}\n" for line in log.read().splitlines()[-12:])
                raise Failed(f"{shlex.join(command)}: {why}\n{tail}all lines: {self.log}")

    def inside(self, *command: str) -> None:
        """Run a command in the root for aarch64, with pip's settings of this machine."""
        kept = r"PIP_\w+|\w+_proxy|\w+_PROXY|SSL_CERT_FILE|REQUESTS_CA_BUNDLE"
        settings = [
            f"{key}={value}" for key, value in os.environ.items() if re.fullmatch(kept, key)
        ]
        path = "PATH=/memprof/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        lines = ["HOME=/root", "LANG=C.UTF-8", "NO_COLOR=1", path, *settings]
        self.run("chroot", str(self.root), "/usr/bin/env", "-i", *lines, *command)

    def tools(self) -> str | None:
        missing = [package for tool, package in TOOLS.items() if not shutil.which(tool)]
        if missing:
            self.run("apt-get", "update", "-qq")
            install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
            self.run(*install, env={"DEBIAN_FRONTEND": "noninteractive"})
        return f"installed {', '.join(missing)}" if missing else None

    def system(self) -> str | None:
        if (self.root / "usr/bin/python3.11").exists():
            return "already there"
        shutil.rmtree(self.root, ignore_errors=True)
        options = ["--arch=arm64", "--variant=minbase", f"--include={PACKAGES}"]
        part = self.folder / "root.part"
        shutil.rmtree(part, ignore_errors=True)
        self.run("mmdebstrap", *options, RELEASE, str(part))
        part.rename(self.root)
        return None

    def mounts(self) -> str | None:
        for name in ("dev", "proc", "etc/ssl", "tmp"):
            (self.root / name).mkdir(exist_ok=True)
        self.run("mount", "--rbind", "/dev", str(self.root / "dev"))
        self.run("mount", "-t", "proc", "proc", str(self.root / "proc"))
        self.run("mount", "--bind", "/etc/ssl", str(self.root / "etc/ssl"))
        for name in SETTINGS:
            here, there = Path("/") / name, self.root / name
            if here.is_dir():
                shutil.copytree(here, there, dirs_exist_ok=True)
            elif here.exists():
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(here, there)
        self.inside("/bin/sh", "-c", 'test "$(uname -m)" = aarch64')
        return None

    def memprof(self) -> str | None:
        shutil.rmtree(self.folder / "wheel", ignore_errors=True)
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d"]
        os.chdir(ROOT)
        self.run(*build, str(self.folder / "wheel"))
        wheel = next((self.folder / "wheel").glob("*.whl"))
        shutil.copy(wheel, self.root / "tmp" / wheel.name)
        if not (self.root / "memprof/bin/pip").exists():
            self.inside("python3.11", "-m", "venv", "/memprof")
        pip = ["/memprof/bin/python", "-m", "pip", "install", "--disable-pip-version-check"]
        self.inside(*pip, f"/tmp/{wheel.name}")  # what it needs
        self.inside(*pip, "--force-reinstall", "--no-deps", f"/tmp/{wheel.name}")
        return None

    def plan(self, name: str, run_dir: Path, run: Callable[..., None], *python: str) -> None:
        """Plan once, into an empty run folder."""
        shutil.rmtree(run_dir, ignore_errors=True)
        command = ["-m", "vllm_memprof", "plan", "memprof/tiny", "--device", "sim:910b", "-q"]
        command += ["--stack", self.stack, "--startup-timeout", "7200", *PLANS[name]]
        place = run_dir if run == self.run else Path("/") / run_dir.relative_to(self.root)
        run(*python, *command, "--run-dir", str(place))

    def run_dirs(self, name: str) -> tuple[Path, Path]:
        run = re.sub(r"\W+", "-", name)
        return self.folder / "runs" / run, self.root / "root/runs" / run


@contextmanager
def emulation() -> Iterator[None]:
    """Let the kernel run programs for aarch64 with qemu, in every root.

    Raises:
        Failed: the kernel refuses.
    """
    try:
        if not (BINFMT / "register").exists():
            subprocess.run(
                ["mount", "-t", "binfmt_misc", "binfmt_misc", str(BINFMT)],
                check=True,
                capture_output=True,
                text=True,
            )
        if ENTRY.exists():
            ENTRY.write_text("-1")  # of a run that was killed
        qemu = str(Path(str(shutil.which("qemu-aarch64-static"))).resolve())
        (BINFMT / "register").write_text(REGISTER.format(qemu))
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", None) or error
        raise Failed(
            f"the kernel does not take an emulator ({BINFMT}): {words}\n"
            "try a machine, or a container with --privileged, that may mount binfmt_misc"
        ) from error
    try:
        yield
    finally:
        ENTRY.write_text("-1")


def compared(report: object) -> dict[str, object]:
    """Return the values of a report that are the same on every machine, by path."""
    return {
        path: value
        for path, value in flat(report)
        if COMPARED.search(path) and not NOT_COMPARED.search(path)
    }


def differing(here: object, there: object) -> tuple[int, list[str], list[str]]:
    """Return how many values were compared, a line for each that differs, and for each that does
    under emulation, with the reason."""
    ours, theirs = compared(here), compared(there)
    lines, expected = list[str](), list[str]()
    for path in {**ours, **theirs}:
        one, other = (values.get(path, "absent") for values in (ours, theirs))
        line = f"{path}: {one} on x86-64, {other} on aarch64"
        why = next((EXPECTED[each] for each in EXPECTED if re.search(each, path)), None)
        if one != other:
            (lines if why is None else expected).append(f"{line} ({why})" if why else line)
    return len({**ours, **theirs}), lines, expected


def table(job: Job) -> int:
    """Print what was compared; return how many values differ unexpectedly."""
    found = {}
    for name in PLANS:
        here, there = (json.loads((run / "report.json").read_text()) for run in job.run_dirs(name))
        found[name] = differing(here, there)
    print(f"\n{'plan of memprof/tiny':24} {'values':>8} {'different':>10} {'by emulation':>13}")
    for name, (count, lines, expected) in found.items():
        print(f"{name:24} {count:8,} {len(lines):10,} {len(expected):13,}")
    for name, (_, lines, expected) in found.items():
        print("".join(f"\n{name}: {line}" for line in [*lines[:LISTED], *expected]), end="")
        if len(lines) > LISTED:
            print(f"\n{name}: {len(lines) - LISTED} more")
    print()
    return sum(len(lines) for _, lines, _ in found.values())


def execute(job: Job) -> int:
    """Take every step; return how many values differ."""
    machines = {"x86-64": (job.run, sys.executable), "aarch64": (job.inside, "/memprof/bin/python")}

    def plans(machine: str, place: int) -> None:
        run, python = machines[machine]
        setup = ["-m", "vllm_memprof", "sim", "setup", "--stack", job.stack]
        job.step(f"{machine}: {job.stack}", run, python, *setup)
        for name in PLANS:
            run_dir = job.run_dirs(name)[place]
            job.step(f"{machine}: {name}", job.plan, name, run_dir, run, python)

    plans("x86-64", 0)
    job.step("emulator and tools", job.tools)
    with emulation():
        job.step("Debian for aarch64", job.system)
        job.step("mounts and settings of pip", job.mounts)
        job.step("memprof", job.memprof)
        plans("aarch64", 1)
    return table(job)


def main() -> int:
    """Read the command line, check the machine, take the steps in mounts of their own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    temporary = Path(tempfile.gettempdir()) / "memprof-arm64"
    parser.add_argument("--folder", type=Path, default=temporary, help="default: %(default)s")
    parser.add_argument("--stack", default=DEFAULT_STACK, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=150, help="deadline, default: %(default)s")
    given = parser.parse_args()
    if lacking := list(needed()):
        print(f"test-arm64 needs {'; '.join(lacking)}", file=sys.stderr)
        return 2
    if "MEMPROF_ARM64_MOUNTS" not in os.environ:
        os.environ["MEMPROF_ARM64_MOUNTS"] = "own"
        os.execvp(
            "unshare", ["unshare", "--mount", sys.executable, "-m", __spec__.name, *sys.argv[1:]]
        )
    # of all processes of the machine the kernel is to end these first, if memory runs out
    Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        check_room(folder)
        return int(execute(Job(folder, given.stack, given.minutes)) > 0)
    except Failed as error:
        print(f"failed\n{error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
