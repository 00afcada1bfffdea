"""``memprof sim setup``: an engine environment of its own for a simulated stack.

In: a stack's lock file, a package index through the user's own pip configuration or a folder of
its files (``download_stack``), a C++ compiler.
Out: the folder that runtime.py describes. Runs in the launcher's process; every step is a child
process.

Each step looks at what is there and does the rest: after an interruption the same command goes on.
The stamp is written last, so that a folder with a stamp is complete, and a second run has nothing
to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import dropwhile
from pathlib import Path

from vllm_memprof.errors import SetupError, UsageError
from vllm_memprof.sim.build import build_left_out, build_shim, find_compiler
from vllm_memprof.sim.extensions import build_extension, target_of
from vllm_memprof.sim.extensions import fingerprint as extension_fingerprint
from vllm_memprof.sim.profiles import list_profiles, load_profile, write_flat
from vllm_memprof.sim.runtime import (
    STAMP,
    Stamp,
    engine_env,
    fingerprint,
    link_package,
    read_stamp,
    setup_command,
    stack_state,
    write_stamp,
)
from vllm_memprof.sim.sharing import INSTALLER, share_package
from vllm_memprof.sim.stacks import (
    Build,
    Chunk,
    Extension,
    Stack,
    default_prefix,
    list_stacks,
    load_extra,
    load_stack,
    normalize,
    remember_prefix,
)
from vllm_memprof.sim.stand_ins import STAND_INS, write_stand_ins
from vllm_memprof.version import __version__

#: The C library that torch_npu's and vllm-ascend's wheels are built for (manylinux_2_34).
MIN_GLIBC = (2, 34)
MACHINES = ("x86_64", "aarch64")
VERIFY_SCRIPT = Path(__file__).parent / "engine/verify.py"
#: A verification that takes longer is stuck; it imports the whole engine from a cold disk.
VERIFY_TIMEOUT_S = 900.0
#: Exit status of timeout(1) when it ended its command.
TIME_WAS_UP = 124
_KEPT_LINES = 60
#: A line of pip's progress: the verb, the package or file, and the size where it says one.
_PIP_WORK = re.compile(
    r"\s*(Collecting|Downloading|Processing|Building wheel for)\s+(\S+)(?:.*?(\([\d.]+ [kMG]B\)))?"
)
#: The package of an error.
_PIP_NAMES = re.compile(
    r"(?:ERROR: No matching distribution found for |\s+(?=\S+==\S+ from .*-r ))(\S+)"
)
#: What failed and what to do, of a package and the command of the setup: in a setup from an index,
#: in one from a folder, and by what pip says.
_PIP_FAILED = (
    "pip could not install {}",
    "check the network and pip's configuration (index, proxy), then {1}   "
    "(finished packages are kept)",
)
_PIP_OFFLINE = ("{} could not be installed from the folder", "{1} --download FOLDER fills it")
_PIP_SAYS = (
    (
        "DO NOT MATCH THE HASHES",
        "the file of {} is not the one that the lock names",
        "take an index with the files as they were published, then {1}",
    ),
    (
        "connection broken by|Read timed out|IncompleteRead",
        "the package index was not reached for {}",
        "check the network and pip's configuration (index, proxy), then {1}   "
        "(finished packages are kept); without a network: --download FOLDER where there is one, "
        "and --offline FOLDER here",
    ),
)
#: The build backend of a source distribution that is downloaded: pip wants its metadata, and the
#: engines' own backends want torch for it.
_NO_BUILD = """
import os
def prepare_metadata_for_build_wheel(folder, settings=None):
    source = os.environ["MEMPROF_SOURCE"]
    os.mkdir(os.path.join(folder, source + ".dist-info"))
    with open(os.path.join(folder, source + ".dist-info/METADATA"), "w") as stream:
        stream.write("Metadata-Version: 2.1\\nName: %s\\nVersion: %s\\n" % tuple(source.split("-")))
    return source + ".dist-info"
"""


def print_nothing(line: str) -> None:
    """Take a line that nobody wants to see."""


class SetupProgress:
    """Receives the progress of a setup, and shows nothing. The command line shows it."""

    def step(self, number: int, total: int, title: str) -> None:
        """Show that a step begins."""

    def detail(self, text: str) -> None:
        """Show what the step is at."""

    def done(self, seconds: float) -> None:
        """Show that the step has ended."""


@dataclass(frozen=True)
class SetupResult:
    """A stack that is ready."""

    stack: Stack
    prefix: Path
    changed: bool  # False: everything was there
    seconds: float
    facts: dict[str, object] = field(default_factory=dict)  # what the verification read


def setup_stack(
    name: str | None,
    prefix: Path | None,
    progress: SetupProgress | None = None,
    force: bool = False,
    offline: Path | None = None,
) -> SetupResult:
    """Make a stack ready to run, or find it ready.

    Args:
        name: of the stack; default: the newest.
        prefix: folder of the environment; default: in the user's cache directory.
        progress: told what happens.
        force: build the device and verify also where everything is there.
        offline: folder with all files of the stack; no index is asked.

    Raises:
        UsageError: no such stack.
        SetupError: a step failed; the message names what, the hint what to do.
    """
    started = time.monotonic()
    stack = load_stack(name)
    folder = (prefix or default_prefix(stack.name)).expanduser().absolute()

    def result(changed: bool) -> SetupResult:
        remember_prefix(stack.name, folder)
        stamp = read_stamp(folder)
        facts = stamp.facts if stamp else {}
        return SetupResult(stack, folder, changed, time.monotonic() - started, facts)

    if not force and stack_state(stack, folder) == "ready":
        return result(changed=False)
    job = _Setup(stack, folder, progress, offline)
    try:
        with _locked(folder, job.progress):
            if not force and stack_state(stack, folder) == "ready":
                return result(changed=False)  # another setup did it while this one waited
            facts = job.execute()
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            made = stack.name, __version__, fingerprint(stack), now
            write_stamp(folder, Stamp(*made, round(time.monotonic() - started, 1), facts))
            return result(changed=True)
    except KeyboardInterrupt:
        hint = f"{setup_command(stack, folder)}   (goes on where it stopped)"
        interrupted = SetupError("interrupted; what is finished is kept", hint)
        interrupted.exit_code = 128 + signal.SIGINT
        raise interrupted from None
    except OSError as error:
        raise SetupError(
            f"setting up {stack.name} failed: {error}", setup_command(stack, folder)
        ) from error


def add_extra(
    result: SetupResult,
    name: str,
    progress: SetupProgress | None,
    offline: Path | None = None,
) -> bool:
    """Install packages beside those of a stack that is set up.

    Args:
        result: of ``setup_stack``.
        name: of ``data/extras``.
        progress: told what happens.
        offline: see ``setup_stack``.

    Returns:
        False: they were there.

    Raises:
        UsageError: none of that name.
        SetupError: pip failed.
    """
    chunks = load_extra(name)
    job = _Setup(result.stack, result.prefix, progress, offline)
    missing = any(missing_pins(chunk.pins, job.site_packages) for chunk in chunks)
    if missing:
        with _locked(result.prefix, job.progress):
            job.take([_install(job, chunk) for chunk in chunks])
    return missing


def download_stack(
    name: str | None,
    folder: Path,
    machine: str | None,
    extras: Iterable[str] = (),
    progress: SetupProgress | None = None,
) -> int:
    """Fill a folder with all files that a setup without a network needs.

    Args:
        name: of the stack; default: the newest.
        folder: of the files; those that are there are kept.
        machine: of ``MACHINES``, on which the setup will be; default: as this one.
        extras: of ``data/extras``, packages beside.
        progress: told what happens.

    Returns:
        The bytes in it.

    Raises:
        UsageError: no such stack or machine.
        SetupError: a step failed.
    """
    stack, machine = load_stack(name), machine or platform.machine()
    if machine not in MACHINES:
        raise UsageError(f"no stack runs on {machine}", f"--machine {' or '.join(MACHINES)}")
    chunks = [*stack.chunks, *(chunk for extra in extras for chunk in load_extra(extra))]
    with tempfile.TemporaryDirectory(prefix="memprof-download-") as work:
        job = _Setup(stack, Path(work) / "venv", progress)
        job.command = f"memprof sim setup --stack {stack.name} --download {folder}"
        steps: list[Step] = [(f"virtual environment, Python {stack.python}", job.make_venv)]
        for chunk in chunks:
            asked = chunk.requirements(chunk.pins), wheels_for(machine), None, folder
            steps.append((f"download {chunk.title}", partial(job.pip, *asked)))
        for build in stack.builds:
            fetch = partial(job.pip, *build.asked, without_build(Path(work), build), folder)
            steps.append((f"download {build.name} {build.version}", fetch))
        job.take(steps)
    return folder_bytes(folder)


Step = tuple[str, Callable[[], None]]


class _Setup:
    """The steps of one setup."""

    def __init__(
        self,
        stack: Stack,
        prefix: Path,
        progress: SetupProgress | None,
        offline: Path | None = None,
    ) -> None:
        self.stack = stack
        self.prefix = prefix
        self.command = setup_command(stack, prefix)
        self.progress = progress or SetupProgress()
        self.run = run_command
        self.index = ["--no-index", "--find-links", str(offline.absolute())] if offline else []
        self.python = prefix / "bin/python"
        self.site_packages = prefix / f"lib/python{stack.python}/site-packages"
        #: of a build, which may import torch
        self.build_env = {
            "LD_LIBRARY_PATH": str(prefix / "left_out"),
            "PYTHONPATH": str(VERIFY_SCRIPT.parent),
        }
        self.facts: dict[str, object] = {}

    def execute(self) -> dict[str, object]:
        (self.prefix / STAMP).unlink(missing_ok=True)
        size = f"; at most {self.stack.download_bytes / 2**30:.1f} GiB will be downloaded"
        steps: list[Step] = [
            (f"check this machine{'' if self.index else size}", self.check_machine),
            (f"virtual environment, Python {self.stack.python}", self.make_venv),
            *(_install(self, chunk) for chunk in self.stack.chunks),
            ("build stand-ins for CUDA libraries that are left out", self.build_left_out),
        ]
        for build in self.stack.builds:
            built = partial(self.build_package, build)
            steps.append((f"build {build.name} {build.version}", built))
            if extension := build.extension:
                action = partial(self.build_extension, build, extension)
                steps.append((f"compile {extension.module}", action))
        if self.stack.stand_ins:
            steps.append(("write stand-ins for packages", self.write_stand_ins))
        self.take(
            [
                *steps,
                ("build the simulated device", self.build_shim),
                ("install memprof", self.install_memprof),
                ("verify: import the engine, allocate on the device", self.verify),
            ]
        )
        return self.facts

    def take(self, steps: list[Step]) -> None:
        for number, (title, action) in enumerate(steps, 1):
            started = time.monotonic()
            self.progress.step(number, len(steps), title)
            action()
            self.progress.done(time.monotonic() - started)

    def check_machine(self) -> None:
        check_platform()
        compiler = find_compiler()[0]
        if not shutil.which("readelf"):
            raise SetupError("readelf was not found", "install binutils")
        self.progress.detail(f"compiler {compiler}")
        pins = [pin for chunk in self.stack.chunks for pin in chunk.pins]
        if not missing_pins(pins, self.site_packages):
            return
        needed = max(self.stack.disk_bytes - folder_bytes(self.prefix), 0) + 200_000_000
        check_free(self.prefix, needed, f"the stack {self.stack.name}")
        temporary = Path(tempfile.gettempdir())
        check_free(temporary, self.stack.temporary_bytes, "pip's downloads (TMPDIR)")

    def make_venv(self) -> None:
        pip = [str(self.python), "-m", "pip", "--version"]
        if (self.prefix / "pyvenv.cfg").exists() and not self.run(pip, clean_env(), print_nothing):
            return
        interpreter = find_python(self.stack.python)
        self.progress.detail(f"from {interpreter}")
        self._run(
            [interpreter, "-m", "venv", str(self.prefix)],
            (
                f"{interpreter} could not make a virtual environment",
                "Debian and Ubuntu keep it in a package of its own: "
                f"apt install python{self.stack.python}-venv",
            ),
        )

    def install_chunk(self, chunk: Chunk) -> None:
        missing = missing_pins(chunk.pins, self.site_packages)
        if not missing:
            self.progress.detail("already there")
            return
        remove_torn(self.site_packages)
        shared = self.share(missing)
        missing = [pin for pin in missing if pin not in shared]
        self.progress.detail(f"{len(missing)} of {len(chunk.pins)} packages")
        if not missing:
            return
        self.pip(chunk.requirements(missing))
        left = missing_pins(chunk.pins, self.site_packages)
        if left:
            names = ", ".join(f"{name}=={version}" for name, version in left[:5])
            raise SetupError(
                f"pip reported success, but these are not installed: {names}",
                "run it again with --force",
            )

    def share(self, pins: list[tuple[str, str]]) -> set[tuple[str, str]]:
        """Link packages out of the environments of other stacks; return those that were found."""
        shared: set[tuple[str, str]] = set()
        for stack in list_stacks():
            donor = default_prefix(stack.name)
            if donor == self.prefix or stack.python != self.stack.python:
                continue
            there = metadata_folders(donor / self.site_packages.relative_to(self.prefix))
            for pin in pins:
                if pin in there and pin not in shared:
                    self.progress.detail(f"sharing {pin[0]} with {stack.name}")
                    if share_package(there[pin], self.site_packages):
                        shared.add(pin)
        return shared

    def build_package(self, build: Build) -> None:
        if not missing_pins([(build.name, build.version)], self.site_packages):
            self.progress.detail("already there")
            return
        remove_torn(self.site_packages)
        self.pip(*build.asked, build.env | self.build_env)

    def build_extension(self, build: Build, extension: Extension) -> None:
        """Compile what the package's own build left out of it."""
        target, compiler = target_of(self.python), find_compiler()
        digest = extension_fingerprint(extension, build.version, compiler)
        work = self.prefix / "extensions" / digest[:16]
        marker = work.with_suffix(".done")
        if marker.is_file() and target.file_of(extension).is_file():
            self.progress.detail("already there")
            return
        work.mkdir(parents=True, exist_ok=True)
        self.pip(*build.asked, build.env | self.build_env, work)
        source = work / "source"
        source.mkdir(exist_ok=True)
        archive = next(work.glob("*.tar.gz"))
        command = ["tar", "-xzf", str(archive), "--strip-components=1", "-C", str(source)]
        self._run(command, [f"{archive} cannot be unpacked"])
        self.progress.detail(f"compiling {len(extension.sources)} files, some minutes")
        build_extension(extension, source, target, compiler)
        shutil.rmtree(work)
        marker.touch()

    def build_left_out(self) -> None:
        built = build_left_out(self.site_packages, self.prefix / "left_out")
        self.progress.detail(f"{len(built)} libraries")

    def write_stand_ins(self) -> None:
        written = write_stand_ins(self.stack.stand_ins, self.site_packages, self.prefix / STAND_INS)
        for stand_in, names in written.items():
            self.progress.detail(f"{stand_in}: {names} names")

    def build_shim(self) -> None:
        build_shim(self.site_packages, self.prefix / "shim", self.progress.detail)

    def install_memprof(self) -> None:
        for profile in list_profiles():
            write_flat(profile, self.prefix / f"profiles/{profile.name}.txt")
        (self.site_packages / "memprof.pth").write_text(f"{link_package(self.prefix)}\n")

    def verify(self) -> None:
        """Import the engine, which also compiles its Python, and allocate on an own device."""
        lines: list[str] = []
        failed = (
            "the engine does not work on the simulated device",
            "memprof sim setup --force builds it again",
        )
        with tempfile.TemporaryDirectory(prefix="memprof-sim-verify-") as folder:
            env = engine_env(load_profile("ascend910b"), self.prefix)
            env["MEMPROF_SIM_STATE"] = f"{folder}/state"
            command = ["timeout", str(VERIFY_TIMEOUT_S), str(self.python), str(VERIFY_SCRIPT)]
            command.append(self.stack.engine)
            self._run(command, failed, env, lines.append)
        report = [line for line in lines if line.startswith("MEMPROF ")]
        if not report:
            raise SetupError(f"{failed[0]}: {''.join(lines[-1:])}", failed[1])
        self.facts = json.loads(report[-1].removeprefix("MEMPROF "))

    def pip(
        self,
        requirements: list[str],
        options: Iterable[str] = (),
        env: dict[str, str] | None = None,
        to: Path | None = None,
    ) -> None:
        """Install packages, or download their files to a folder; their hashes are compared."""
        package = requirements[0].split()[0]
        says = known = _PIP_OFFLINE if self.index else _PIP_FAILED
        failed: list[str] = []

        def keep(line: str) -> None:
            nonlocal package, says
            if match := _PIP_WORK.match(line):
                word, path, size = match.groups()
                package, says = path.rsplit("/", 1)[-1], known
                self.progress.detail(f"{word} {package} {size or ''}".rstrip())
            elif match := _PIP_NAMES.match(line):
                package = match[1]
            elif line.startswith("Installing collected packages"):
                self.progress.detail("unpacking")
            says = next((row[1:] for row in _PIP_SAYS if re.search(row[0], line)), says)
            failed[:] = (part.format(package, self.command) for part in says)

        keep("")
        verb = ["install", "--no-compile", "--no-warn-script-location"]
        if to:
            verb = ["download", f"--dest={to}"]
        common = "--no-deps --no-input --disable-pip-version-check --progress-bar=off"
        with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix="memprof-") as stream:
            stream.write("\n".join(requirements))
            stream.flush()
            command = [str(self.python), "-m", "pip", *verb, *common.split(), *self.index, *options]
            self._run([*command, "--require-hashes", "-r", stream.name], failed, env, keep)

    def _run(
        self,
        command: list[str],
        failed: Sequence[str],
        env: dict[str, str] | None = None,
        keep: Callable[[str], None] = print_nothing,
    ) -> None:
        """Run a command; where it fails, say what failed and why by its last lines.

        Args:
            command: the command.
            failed: read when it has failed: what, and what to do.
            env: besides the user's.
            keep: takes each of its lines.
        """
        lines: deque[str] = deque(maxlen=_KEPT_LINES)

        def listen(line: str) -> None:
            lines.append(line)
            keep(line)

        status = self.run(command, clean_env() | (env or {}), listen)
        if status != 0:
            tail = tail_of(list(lines))
            if command[0] == "timeout" and status == TIME_WAS_UP:
                tail = f"  it did not end within {command[1]} s; its last lines:\n{tail}"
            what, *hint = failed
            raise SetupError(f"{what}:\n{tail}", *hint)


def _install(job: _Setup, chunk: Chunk) -> Step:
    return f"install {chunk.title}", partial(job.install_chunk, chunk)


def tail_of(lines: list[str]) -> str:
    """Return why a command failed: pip's errors, a traceback's messages, or the last lines."""
    useful = [line for line in lines if line.strip() and not line.startswith("WARNING: Location")]
    errors = list(dropwhile(lambda line: not re.match(r"\s*(ERROR|error:)", line), useful))
    raised = [line for line in useful if re.match(r"[A-Za-z_.]*(Error|Exception)\b", line)]
    chosen = errors[:8] or raised[-4:] or useful[-8:]
    return "\n".join(f"  {line}" for line in chosen) or "  (it printed nothing)"


def run_command(command: list[str], env: dict[str, str], listen: Callable[[str], None]) -> int:
    """Run a command in its own process group, its lines to ``listen``; an exception ends it."""
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout
    try:
        for line in process.stdout:
            listen(line.rstrip("\n"))
        return process.wait()
    except BaseException:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(5.0)
                break
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        raise
    finally:
        process.stdout.close()


def clean_env() -> dict[str, str]:
    """Return the user's environment for the commands of a setup.

    Left out: variables that would leak the launcher's Python into the engine's, or keep the
    verification from compiling the engine's files.
    """
    leaks = {
        "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
    }  # fmt: skip
    kept = {key: value for key, value in os.environ.items() if key not in leaks}
    return {"PIP_RESUME_RETRIES": "5"} | kept  # pip from 25.1 on


def without_build(folder: Path, build: Build) -> dict[str, str]:
    """Return what pip's environment needs to take a source distribution as it is.

    Args:
        folder: for a build backend.
        build: the package.
    """
    backend = folder / "setuptools/build_meta.py"
    backend.parent.mkdir(parents=True, exist_ok=True)
    backend.with_name("__init__.py").touch()
    backend.write_text(_NO_BUILD)
    source = f"{build.name.replace('-', '_')}-{build.version}"
    return {"PYTHONPATH": str(folder), "MEMPROF_SOURCE": source}


def wheels_for(machine: str) -> list[str]:
    """Return pip's options for the wheels that the stacks take on a machine, here or elsewhere.

    Args:
        machine: of ``MACHINES``.
    """
    kinds = [f"manylinux_2_{minor}" for minor in range(MIN_GLIBC[1], 4, -1)]
    kinds += ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
    return ["--only-binary=:all:", *(f"--platform={kind}_{machine}" for kind in kinds)]


def check_platform() -> None:
    """Refuse a machine for which the engine's wheels are not built.

    Raises:
        SetupError: not Linux on x86-64 or aarch64 with a recent C library.
    """
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in MACHINES:
        raise SetupError(
            f"the simulated stacks run on Linux x86-64 and aarch64; this is {system} {machine}",
            "use such a machine or container; "
            "reports of runs can be read anywhere (memprof report)",
        )
    library, version = platform.libc_ver()
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if library != "glibc" or numbers < MIN_GLIBC:
        found = f"{library} {version}".strip() or "another C library"
        needed = ".".join(map(str, MIN_GLIBC))
        raise SetupError(
            f"the engine's packages need glibc {needed}; this machine has {found}",
            "use a newer distribution (Debian 12, Ubuntu 22.04, openEuler 24.03) "
            "or a container of one",
        )


def check_free(path: Path, needed_bytes: int, what: str) -> None:
    """Refuse to begin what will not fit.

    Raises:
        SetupError: with the bytes that are needed and free.
    """
    existing = next(folder for folder in [path, *path.parents] if folder.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise SetupError(
            f"not enough disk space in {existing} for {what}: "
            f"{needed_bytes / 2**30:.1f} GiB needed, {free_bytes / 2**30:.1f} GiB free",
            "free some space, or name another place: "
            "--prefix DIR (environment), TMPDIR (downloads)",
        )


def folder_bytes(path: Path) -> int:
    """Return the bytes of the files below a folder; links count nothing."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def find_python(version: str) -> str:
    """Return an interpreter of that version (``"3.11"``): this one, on PATH, pyenv's, or uv's.

    Raises:
        SetupError: there is none.
    """
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == version:
        return sys.executable
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    uv = Path.home() / ".local/share/uv/python"
    for folder, pattern in ((pyenv, f"{version}.*"), (uv, f"cpython-{version}.*")):
        found = sorted(folder.glob(f"{pattern}/bin/python{version}"), reverse=True)
        candidates += map(str, found)
    command = ["-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    for candidate in filter(None, candidates):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run([candidate, *command], capture_output=True, text=True, timeout=20)
            if done.returncode == 0 and done.stdout.strip() == version:
                return candidate
    raise SetupError(
        f"the stack needs Python {version}; neither PATH, pyenv nor uv has it",
        f"install it: apt install python{version}-venv, pyenv install {version}, "
        f"or uv python install {version}",
    )


def metadata_folders(site_packages: Path) -> dict[tuple[str, str], Path]:
    """Return (normalized name, version) -> metadata folder of what is installed whole."""
    folders = {}
    for folder in site_packages.glob("*.dist-info"):
        name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
        if (folder / INSTALLER).exists():
            folders[(normalize(name), version)] = folder
    return folders


def missing_pins(pins: Iterable[tuple[str, str]], site_packages: Path) -> list[tuple[str, str]]:
    """Return those of the pins that are not installed in exactly that version."""
    installed = metadata_folders(site_packages)
    return [pin for pin in pins if pin not in installed]


def remove_torn(site_packages: Path) -> None:
    """Remove the metadata of half installed packages, so that pip installs them anew."""
    for folder in site_packages.glob("*.dist-info"):
        if not (folder / INSTALLER).exists():
            shutil.rmtree(folder)


@contextmanager
def _locked(prefix: Path, progress: SetupProgress) -> Iterator[None]:
    """Hold the lock of a folder: one setup at a time, a second one waits."""
    prefix.mkdir(parents=True, exist_ok=True)
    with (prefix / ".setup.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.detail(f"another setup is at work in {prefix}; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
