"""The checks of ``memprof doctor``: what this machine has for a run, and how to get the rest.

Nothing is changed. Every check is a function that returns rows and raises nothing; what to do where
one is not good stands in ``doctor.toml``. torch and vLLM are only asked about, through package
metadata of the engine's interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_memprof.engines import ENGINES, VLLM
from vllm_memprof.errors import LaunchError, MemprofError
from vllm_memprof.files import read_own
from vllm_memprof.launch.engine import PLUGIN_NAME
from vllm_memprof.launch.folder import DEFAULT_PARENT
from vllm_memprof.launch.interpreter import (
    InterpreterFacts,
    ask,
    find_python,
    probe_interpreter,
)
from vllm_memprof.launch.request import DEFAULT_PROFILE
from vllm_memprof.launch.shared_memory import SHM, left_behind
from vllm_memprof.options import refused_beside_expandable
from vllm_memprof.sim.runtime import prepare_runtime
from vllm_memprof.sim.stacks import DEFAULT_STACK, Stack, list_stacks
from vllm_memprof.units import GIB, format_gib
from vllm_memprof.version import __version__, pip_install

STACK = "simulated stack"  # name of its checks
#: States of a check: good, information, limits some use, stops every run of that kind.
GOOD, INFO, WARNING, MISSING = "ok", "info", "warning", "missing"

ALLOC_CONF = "PYTORCH_NPU_ALLOC_CONF"
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
print(json.dumps({name: error(name) for name in sys.argv[1:]}))
"""
_TABLES: dict[str, dict[str, Any]] = read_own(__file__, "doctor.toml")


@dataclass(frozen=True)
class DoctorCheck:
    """One row: what was looked at, what was found, and what to do when it is not good."""

    name: str
    state: str
    found: str
    todo: str = ""


def _judged(
    name: str, good: bool, found: str, state: str = WARNING, todo: str | None = None
) -> DoctorCheck:
    """Return a row; where it is not good, with the state and what to do: that of the table."""
    if good:
        return DoctorCheck(name, GOOD, found)
    return DoctorCheck(name, state, found, _TABLES["todo"][name] if todo is None else todo)


def diagnose(
    python: str | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[list[DoctorCheck], list[str]]:
    """Run all checks.

    Args:
        python: interpreter of the engine; default: as ``memprof serve`` would choose it.
        environ: of the engine.

    Returns:
        The checks, and how memprof can run here, e.g. ``--device sim:910b``.
    """
    devices = check_devices()
    needless = all(check.state == INFO for check in devices)  # only simulated devices run here
    facts, engine = check_engine(python, environ, needless)
    host = check_host(devices[0], sys.executable if facts is None else str(facts.path), environ)
    ready, stacks = check_stacks(environ)
    machine = platform.machine()
    places = (
        ("run folder", DEFAULT_PARENT.absolute(), _MIN_FREE_BYTES),
        ("shared memory", SHM, _MIN_SHM_BYTES),
    )
    checks = [
        _judged(
            "memprof",
            (3, 10) <= sys.version_info[:2] <= (3, 12),
            f"{__version__} on Python {platform.python_version()}",
        ),
        _judged(
            "platform",
            platform.system() == "Linux" and machine in ("x86_64", "aarch64"),
            f"{platform.system()} {platform.release()} {machine}",
            MISSING,
        ),
        *(*engine, *devices, *host),
        check_compiler(bool(ready)),
        *(*stacks, *check_variables(environ)),
    ]
    if facts is not None and any(map(facts.has_plugin, ENGINES.values())):
        checks.append(check_hooks(facts.path, environ, "engine interpreter"))
    checks += [check_place(*place) for place in places]
    if left := left_behind():
        names = ", ".join(path.name for path in left)
        checks.append(
            _judged("left in memory", False, f"{len(left)} files of killed runs: {names}")
        )
    return checks, find_ways(facts, devices, host, ready)


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
    works = {check.name for check in (*devices, *host) if check.state == GOOD}
    kinds = [kind for kind, needs in (("npu", {"npu", "CANN"}), ("cuda", {"cuda"}))
             if needs <= works]  # fmt: skip
    for row in ENGINES.values():
        if row.needs is not None:
            continue
        engine = "" if row is VLLM else f"--engine {row.name} "
        if facts is not None and facts.has_plugin(row):
            ways += [f"{engine}--device {kind}" for kind in kinds]
        names = [stack.name for stack in ready if stack.engine == row.stack_engine]
        if names:
            given = "" if (row.stack or DEFAULT_STACK) in names else f" --stack {names[0]}"
            ways.append(f"{engine}--device sim:{DEFAULT_PROFILE}{given}")
    return ways


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
    rows = [row for row in ENGINES.values() if row.name in facts.engines]
    if not rows:
        names = " or ".join(row.title for row in ENGINES.values() if row.needs is None)
        checks.append(_judged("engine", False, f"no {names} there", state))
    for row in rows:
        version = facts.versions.get(row.package) or "importable, no metadata"
        loaded = facts.has_plugin(row)
        found = f"{version}, memprof {'' if loaded else 'not '}installed beside it"
        todo = pip_install(python=facts.path)
        checks.append(_judged(row.title, loaded, found, state, todo))
    for name in ("vllm_ascend", "torch", "torch_npu", "transformers"):
        if found := facts.versions.get(name) or "":
            checks.append(DoctorCheck(name, INFO, found))
    return facts, checks


def check_devices(dev: Path = Path("/dev")) -> list[DoctorCheck]:
    """Device files."""
    npus = sorted(path for path in dev.glob("davinci[0-9]*") if path.name[7:].isdigit())
    nodes = [*npus, *(dev / name for name in _NPU_FILES)] if npus else []
    closed = [node.name for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    checks = []
    for kind, files, shut, todo in (
        ("npu", npus, closed, None),
        ("cuda", sorted(dev.glob("nvidia[0-9]*")), [], ""),
    ):
        found = f"{len(files)} device(s): {', '.join(path.name for path in files[:8])}"
        if shut:
            found += f"; not accessible: {', '.join(shut[:4])}"
        good = bool(files) and not shut
        state = WARNING if files else INFO
        checks.append(_judged(kind, good, found if files else "none in /dev", state, todo))
    return checks


def check_host(npu: DoctorCheck, python: str, environ: Mapping[str, str]) -> list[DoctorCheck]:
    """The libraries of a host with an NPU, loaded by the engine's interpreter in its environment.

    Without an NPU what is missing is information, not a fault.

    Args:
        npu: the check of device files.
        python: interpreter that loads them, in a process of its own.
        environ: of the engine.
    """
    libraries: dict[str, list[str]] = _TABLES["libraries"]
    asked = [file for files in libraries.values() for file in files]
    try:
        errors = ask(python, environ, "-S", "-c", _LOAD, *asked)
    except LaunchError as error:
        errors = dict.fromkeys(asked, error.message)
    cann = environ.get("ASCEND_HOME_PATH") or environ.get("ASCEND_TOOLKIT_HOME")
    checks = []
    for name, files in libraries.items():
        loaded = [file for file in files if errors[file] is None]
        found = loaded[0] if loaded else str(errors[files[0]])
        good = bool(loaded)
        if good and name == "CANN" and not cann:
            good, found = False, f"{found}; ASCEND_HOME_PATH is not set"
        checks.append(_judged(name, good, found, INFO if npu.state == INFO else WARNING))
    return checks


def check_compiler(needless: bool) -> DoctorCheck:
    """The C++ compiler, which only setting up a simulated stack needs."""
    path = next(filter(None, map(shutil.which, _COMPILERS)), None)
    found = path or f"none of {', '.join(_COMPILERS)} on PATH"
    return _judged("C++ compiler", path is not None, found, INFO if needless else MISSING)


def check_stacks(environ: Mapping[str, str]) -> tuple[list[Stack], list[DoctorCheck]]:
    """Return the simulated stacks that are set up, and a row for each: whether its hooks fit, or
    how to set it up, which is a fault only where none is."""
    ready, checks, absent = [], [], []
    for stack in list_stacks():
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


def check_variables(environ: Mapping[str, str]) -> list[DoctorCheck]:
    """``VLLM_PLUGINS``, an allow-list that can shut out memprof and vllm-ascend; and settings of
    the caching allocator that exclude each other."""
    checks = []
    if (value := environ.get(VLLM.plugins)) is not None:
        names = {name.strip() for name in value.split(",")}
        wanted = {
            PLUGIN_NAME: "memprof's commands add memprof themselves; by hand you have to",
            "ascend": "without `ascend` vLLM does not find the NPU",
        }
        problems = [problem for name, problem in wanted.items() if name not in names]
        state = INFO if "ascend" in names else WARNING
        checks.append(_judged(VLLM.plugins, not problems, value, state, "; ".join(problems)))
    if (value := environ.get(ALLOC_CONF)) is not None:
        refused = refused_beside_expandable(value)
        todo = f"drop {', '.join(refused)}: expandable_segments:True excludes it"
        checks.append(_judged(ALLOC_CONF, not refused, value, todo=todo))
    return checks


def check_hooks(python: Path, environ: Mapping[str, str], where: str) -> DoctorCheck:
    """Return the hooks that have their place in the installed engine, read from its sources by the
    engine's interpreter."""
    try:
        return summarise_hooks(ask(python, environ, "-m", "vllm_memprof.capture.selfcheck"), where)
    except LaunchError as error:
        return DoctorCheck("hooks", WARNING, f"{where}: {error.message}")


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
    return _judged("hooks", not missing, found)


def check_place(name: str, place: Path, least_bytes: int) -> DoctorCheck:
    """Check that a folder, or the one in which it will be made, can be written to and has room."""
    existing = next(path for path in (place, *place.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        return _judged(name, False, f"{place}: {error.strerror}")
    return _judged(name, free >= least_bytes, f"{place}, {format_gib(free)} GiB free")
