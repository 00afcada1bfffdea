"""The checks of ``memprof doctor``: what this machine has for a run, and how to get the rest.

Nothing is changed. Every check is a function that returns ``Check`` rows and raises nothing; torch
and vLLM are only asked about, through package metadata of the engine's interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import vllm_memprof
from vllm_memprof.engines import ENGINES, VLLM
from vllm_memprof.errors import MemprofError
from vllm_memprof.launch.engine import ENV_PLUGINS, PLUGIN_NAME
from vllm_memprof.launch.folder import DEFAULT_PARENT
from vllm_memprof.launch.interpreter import InterpreterFacts, find_python, probe_interpreter
from vllm_memprof.launch.request import DEFAULT_PROFILE
from vllm_memprof.sim.runtime import prepare_runtime
from vllm_memprof.sim.stacks import DEFAULT_STACK, Stack, list_stacks
from vllm_memprof.units import GIB, format_gib

STACK = "simulated stack"  # name of its checks
#: States of a check: good, information, limits some use, stops every run of that kind.
GOOD, INFO, WARNING, MISSING = "ok", "info", "warning", "missing"

ALLOC_CONF = "PYTORCH_NPU_ALLOC_CONF"
#: Keys that torch_npu refuses, or ignores, together with expandable_segments.
#: (NPUCachingAllocator.cpp, parseArgs)
_EXPANDABLE_CONFLICTS = ("max_split_size_mb", "garbage_collection_threshold")
_MIN_FREE_BYTES = 2 * GIB  # a run record is small; compile caches and logs are not
_MIN_SHM_BYTES = 1 * GIB  # vLLM's message queues between ranks
_COMPILERS = ("g++", "clang++", "c++")
#: Device files beside /dev/davinciN. (installation guide of vllm-ascend: docker run)
_NPU_FILES = ("davinci_manager", "devmm_svm", "hisi_hdc")
_LOAD = """
import ctypes, json, sys
def error(name):
    try: ctypes.CDLL(name)
    except OSError as found: return str(found)
print(json.dumps([error(name) for name in sys.argv[1:]]))
"""


@dataclass(frozen=True)
class HostLibrary:
    """A library that an engine on a real NPU loads, and how a host gets it."""

    check: str  # name of its check
    files: tuple[str, ...]  # as the loader is asked for them; the first that loads counts
    todo: str


#: What a host with an NPU needs beside device files. (installation guide of vllm-ascend)
HOST_LIBRARIES = (
    HostLibrary(
        "driver",
        ("libascend_hal.so",),
        "install the NPU's driver; in a container mount /usr/local/Ascend/driver/lib64 and "
        "version.info, with lib64/driver on LD_LIBRARY_PATH",
    ),
    HostLibrary(
        "CANN",
        ("libascendcl.so",),
        "source the toolkit's set_env.sh (/usr/local/Ascend/ascend-toolkit/set_env.sh)",
    ),
    HostLibrary("ATB", ("libatb.so",), "source /usr/local/Ascend/nnal/atb/set_env.sh"),
    HostLibrary(
        "libdcmi",
        ("libdcmi.so", "/usr/local/dcmi/libdcmi.so"),
        "in a container mount /usr/local/dcmi; without it memory of other processes on a device "
        "is not measured",
    ),
)


@dataclass(frozen=True)
class DoctorCheck:
    """One row: what was looked at, what was found, and what to do when it is not good."""

    name: str
    state: str
    found: str
    todo: str = ""


@dataclass(frozen=True)
class Diagnosis:
    checks: list[DoctorCheck]
    ways: list[str]  # how memprof can run here, e.g. ``--device sim:910b``

    @property
    def can_run(self) -> bool:
        return bool(self.ways)


def diagnose(python: str | None = None, environ: Mapping[str, str] | None = None) -> Diagnosis:
    """Run all checks.

    Args:
        python: interpreter of the engine; default: as ``memprof serve`` would choose it.
        environ: default: this process's.
    """
    environ = os.environ if environ is None else environ
    checks = [check_memprof(), check_platform()]
    devices = check_devices()
    needless = all(check.state == INFO for check in devices)  # only simulated devices run here
    facts, engine_checks = check_engine(python, environ, needless)
    checks += [*engine_checks, *devices]
    host = check_host(devices[0], sys.executable if facts is None else str(facts.path), environ)
    checks += host
    ready, stacks = check_stacks(environ)
    checks += [check_compiler(bool(ready)), *stacks]
    checks += [*check_plugins_variable(environ), *check_alloc_conf(environ)]
    if facts is not None and facts.engines and facts.has_memprof:
        checks.append(check_hooks(facts.path, environ, "engine interpreter"))
    checks += [check_run_dir(), check_shm()]
    return Diagnosis(checks, find_ways(facts, devices, host, ready))


def find_ways(
    facts: InterpreterFacts | None,
    devices: list[DoctorCheck],
    host: list[DoctorCheck],
    ready: list[Stack],
) -> list[str]:
    """Return the ``--engine`` and ``--device`` that would work, and ``--stack`` where it has to be
    given.

    Args:
        facts: of the engine's interpreter.
        devices, host: the checks of device files and of what an NPU needs.
        ready: simulated stacks that are set up.
    """
    ways = []
    lacks = {check.name for check in host if check.state != GOOD}
    kinds = [check.name for check in devices if check.state == GOOD]
    for row in ENGINES.values():
        if row.needs is not None:
            continue
        engine = "" if row is VLLM else f"--engine {row.name} "
        if facts is not None and facts.has_plugin(row):
            ways += [f"{engine}--device npu"] if "npu" in kinds and "CANN" not in lacks else []
            ways += [f"{engine}--device cuda"] if "cuda" in kinds else []
        names = [stack.name for stack in ready if stack.engine == row.stack_engine]
        if names:
            given = "" if (row.stack or DEFAULT_STACK) in names else f" --stack {names[0]}"
            ways.append(f"{engine}--device sim:{DEFAULT_PROFILE}{given}")
    return ways


def _judged(name: str, good: bool, found: str, todo: str, state: str = WARNING) -> DoctorCheck:
    """Return a row; where it is not good, with the state and what to do."""
    return DoctorCheck(name, GOOD, found) if good else DoctorCheck(name, state, found, todo)


def check_memprof() -> DoctorCheck:
    found = f"{vllm_memprof.__version__} on Python {platform.python_version()}"
    good = (3, 10) <= sys.version_info[:2] <= (3, 12)
    return _judged("memprof", good, found, "tested on Python 3.10 to 3.12")


def check_platform() -> DoctorCheck:
    return _judged(
        "platform",
        platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64"),
        f"{platform.system()} {platform.release()} {platform.machine()}",
        "vLLM-Ascend and the simulated device need Linux on x86_64 or aarch64",
        MISSING,
    )


def check_engine(
    python: str | None, environ: Mapping[str, str], needless: bool = False
) -> tuple[InterpreterFacts | None, list[DoctorCheck]]:
    """Check the engine's interpreter and the packages in it.

    Args:
        python: as given; default: the one that a run would take.
        environ: of the engine.
        needless: there is no device for it, so that what is missing is no fault.

    Returns:
        Its packages; None if no interpreter works. One row per package.
    """
    here = [row for row in ENGINES.values() if importlib.util.find_spec(row.package) is not None]
    try:
        facts = probe_interpreter(find_python(python, next(iter(here), VLLM)), environ)
    except MemprofError as error:
        return None, [DoctorCheck("engine interpreter", MISSING, error.message, error.hint or "")]
    checks = [DoctorCheck("engine interpreter", GOOD, f"{facts.path} (Python {facts.python})")]
    state = INFO if needless else MISSING
    rows = [row for row in ENGINES.values() if facts.has_engine(row)]
    if not rows:
        names = " or ".join(row.title for row in ENGINES.values() if row.needs is None)
        todo = "--python PATH of an interpreter that has one, or --device sim:910b with its own"
        checks.append(DoctorCheck("engine", state, f"no {names} there", todo))
    for row in rows:
        version = facts.versions.get(row.package) or "importable, no metadata"
        loaded = facts.has_plugin(row)
        found = f"{version}, memprof {'' if loaded else 'not '}installed beside it"
        todo = f"{facts.path} -m pip install vllm-memprof"
        checks.append(_judged(row.title, loaded, found, todo, state))
    for name in ("vllm_ascend", "torch", "torch_npu", "transformers"):
        if found := facts.versions.get(name) or "":
            checks.append(DoctorCheck(name, INFO, found))
    return facts, checks


def check_devices(dev: Path = Path("/dev")) -> list[DoctorCheck]:
    """Device files and the vendors' tools."""
    npus = sorted(path for path in dev.glob("davinci[0-9]*") if path.name[7:].isdigit())
    if npus:
        closed = [
            node.name
            for node in [*npus, *(dev / name for name in _NPU_FILES)]
            if not os.access(node, os.R_OK | os.W_OK)
        ]
        found = _counted([node.name for node in npus])
        found += f"; not accessible: {', '.join(closed[:4])}" if closed else ""
        todo = "join the group that owns them (HwHiAiUser), or pass them into the container"
        npu = _judged("npu", not closed, found, todo)
    else:
        tool = " (npu-smi is there)" if shutil.which("npu-smi") else ""
        files = ", ".join(f"/dev/{name}" for name in _NPU_FILES)
        todo = f"--device sim:910b needs none; in a container pass --device /dev/davinciN, {files}"
        npu = DoctorCheck("npu", INFO, f"no /dev/davinci*{tool}", todo)
    nodes = sorted(path.name for path in dev.glob("nvidia[0-9]*"))
    found = _counted(nodes) if nodes else "no /dev/nvidia*"
    return [npu, DoctorCheck("cuda", GOOD if nodes else INFO, found)]


def _counted(names: list[str]) -> str:
    return f"{len(names)} device(s): {', '.join(names[:8])}"


def check_host(npu: DoctorCheck, python: str, environ: Mapping[str, str]) -> list[DoctorCheck]:
    """The libraries of a host with an NPU, loaded by the engine's interpreter in its environment.

    Without an NPU what is missing is information, not a fault.

    Args:
        npu: the check of device files.
        python: interpreter that loads them, in a process of its own.
        environ: of the engine.
    """
    asked = [file for library in HOST_LIBRARIES for file in library.files]
    try:
        done = subprocess.run(
            [python, "-S", "-c", _LOAD, *asked],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=60,
        )
        errors = dict(zip(asked, json.loads(done.stdout), strict=True))
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        errors = dict.fromkeys(asked, f"could not be loaded: {error}")
    cann = environ.get("ASCEND_HOME_PATH") or environ.get("ASCEND_TOOLKIT_HOME")
    checks = []
    for library in HOST_LIBRARIES:
        loaded = [file for file in library.files if errors[file] is None]
        found = loaded[0] if loaded else str(errors[library.files[0]])
        good = bool(loaded)
        if good and library.check == "CANN" and not cann:
            good, found = False, f"{found}; ASCEND_HOME_PATH is not set"
        state = INFO if npu.state == INFO else WARNING
        checks.append(_judged(library.check, good, found, library.todo, state))
    return checks


def check_compiler(needless: bool) -> DoctorCheck:
    """The C++ compiler, which only setting up a simulated stack needs."""
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            return DoctorCheck("C++ compiler", GOOD, done.stdout.splitlines()[0].strip())
    state = INFO if needless else MISSING
    todo = "only `memprof sim setup` needs one: apt install g++, or dnf install gcc-c++"
    return DoctorCheck("C++ compiler", state, f"none of {', '.join(_COMPILERS)} on PATH", todo)


def check_stacks(environ: Mapping[str, str]) -> tuple[list[Stack], list[DoctorCheck]]:
    """Return the simulated stacks that are set up, and a row for each: whether its hooks fit, or
    how to set it up, which is a fault only where none is."""
    ready, checks, absent = [], [], []
    try:
        stacks = list_stacks()
    except (MemprofError, OSError) as error:
        return [], [DoctorCheck(STACK, MISSING, str(error))]
    for stack in stacks:
        try:
            runtime = prepare_runtime(DEFAULT_PROFILE, stack.name)
        except (MemprofError, OSError) as error:
            todo = getattr(error, "hint", None) or f"memprof sim setup --stack {stack.name}"
            absent.append(DoctorCheck(STACK, MISSING, str(error), todo))
        else:
            ready.append(stack)
            checks.append(DoctorCheck(STACK, GOOD, f"{stack.name}: {runtime.python}"))
            checks.append(check_hooks(runtime.python, {**environ, **runtime.env}, stack.name))
    checks += [replace(check, state=INFO) if ready else check for check in absent]
    return ready, checks


def check_plugins_variable(environ: Mapping[str, str]) -> list[DoctorCheck]:
    """``VLLM_PLUGINS`` is an allow-list: it can shut out memprof, and vllm-ascend too."""
    value = environ.get(ENV_PLUGINS)
    if value is None:
        return []
    names = {name.strip() for name in value.split(",") if name.strip()}
    todo = []
    if PLUGIN_NAME not in names:
        todo.append("memprof's commands add memprof themselves; by hand you have to")
    if "ascend" not in names:
        todo.append("without `ascend` vLLM does not find the NPU")
    state = INFO if "ascend" in names else WARNING
    return [_judged(ENV_PLUGINS, not todo, value or "(empty)", "; ".join(todo), state)]


def check_alloc_conf(environ: Mapping[str, str]) -> list[DoctorCheck]:
    """Check settings of the caching allocator for conflicts and repetitions."""
    value = environ.get(ALLOC_CONF)
    if value is None:
        return []
    problems = find_alloc_conf_problems(value)
    return [_judged(ALLOC_CONF, not problems, value or "(empty)", "; ".join(problems))]


def find_alloc_conf_problems(value: str) -> list[str]:
    """Return one sentence per problem in an allocator configuration such as
    ``expandable_segments:True``."""
    pairs: list[tuple[str, str]] = []
    for entry in filter(str.strip, value.split(",")):
        key, _, setting = entry.partition(":")
        pairs.append((key.strip(), setting.strip()))
    keys = [key for key, _ in pairs]
    problems = [
        f"{key} is set {keys.count(key)} times"
        for key in dict.fromkeys(keys)
        if keys.count(key) > 1
    ]
    settings = dict(pairs)
    if settings.get("expandable_segments", "").lower() == "true":
        problems += [
            f"{key} and expandable_segments:True exclude each other; drop {key}"
            for key in _EXPANDABLE_CONFLICTS
            if key in settings
        ]
    return problems + [f"{key} has no value" for key, setting in pairs if not setting]


def check_hooks(python: Path, environ: Mapping[str, str], where: str) -> DoctorCheck:
    """Return the hooks that have their place in the installed engine, read from its sources by the
    engine's interpreter."""
    command = [str(python), "-m", "vllm_memprof.capture.selfcheck"]
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=60
        )
        return summarise_hooks(json.loads(done.stdout), where)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return DoctorCheck("hooks", WARNING, f"{where}: could not be checked: {error}")


def summarise_hooks(data: Any, where: str) -> DoctorCheck:
    """Return the self-check's answer, ``{"rows": [{"hook", "need", "state", "target"}...]}``, as
    one row."""
    listed = data.get("rows", ()) if isinstance(data, dict) else ()
    rows = [row for row in listed if row.get("need") == "required"]
    if not rows:
        said = f"{where}: the hook table has no row for this engine version"
        return DoctorCheck("hooks", WARNING, said)
    missing = [str(row.get("hook")) for row in rows if row.get("state") == "missing"]
    found = f"{where}: {len(rows) - len(missing)} of {len(rows)} required hooks find their place"
    found += f"; not: {', '.join(missing)}" if missing else ""
    todo = "their phases will read NOT MEASURED; is this engine version supported?"
    return _judged("hooks", not missing, found, todo)


def check_run_dir(parent: Path = DEFAULT_PARENT) -> DoctorCheck:
    """Check that a run can be recorded in the default place."""
    place = parent.absolute()
    existing = next(path for path in (place, *place.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        free = shutil.disk_usage(existing).free
    except OSError as error:
        todo = "give another place with --run-dir DIR"
        return DoctorCheck("run folder", WARNING, f"{place}: {error.strerror}", todo)
    found = f"{place}, {format_gib(free)} GiB free"
    todo = "make room, or give another place with --run-dir DIR"
    return _judged("run folder", free >= _MIN_FREE_BYTES, found, todo)


def check_shm(path: Path = Path("/dev/shm")) -> DoctorCheck:
    """Shared memory, which ranks of one engine talk through."""
    name = "shared memory"
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return DoctorCheck(name, WARNING, f"{path}: {error.strerror}", "mount a tmpfs there")
    found = f"{path}, {format_gib(free)} GiB free"
    return _judged(name, free >= _MIN_SHM_BYTES, found, "with docker: --shm-size=2g or --ipc=host")
