"""The interpreter that runs the engine: found, and asked for its packages in a child process.

The launcher imports neither torch nor vLLM; the question is put to package metadata, so that it
takes about 0.1 s.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_memprof.engines import ENGINES, VLLM
from vllm_memprof.engines.base import EngineRow
from vllm_memprof.errors import LaunchError, UsageError
from vllm_memprof.version import pip_install

#: Distributions whose versions matter, as ``importlib.metadata`` names them.
PACKAGES = (
    *dict.fromkeys(name for row in ENGINES.values() for name, _ in row.known_as[::-1]),
    *("torch", "torch_npu", "triton_ascend", "transformers", "vllm-memprof"),
)

_PROBE = """
import importlib.metadata as m, importlib.util as u, json, platform, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
def importable(name):
    try: return u.find_spec(name) is not None
    except Exception: return False
points = m.entry_points()
print(json.dumps({
    "python": platform.python_version(),
    "versions": {n: version(n) for n in sys.argv[2:]},
    "engines": {
        name: sorted({e.name for e in points.select(group=group)})
        for name, group, modules in json.loads(sys.argv[1])
        if all(map(importable, modules))
    },
    "folders": {
        name: sorted({str(f) for module in (modules[0], *(
            e.value.partition(":")[0].partition(".")[0]
            for e in points.select(group=group) if e.name != "memprof"
        )) if importable(module) for f in u.find_spec(module).submodule_search_locations or ()})
        for name, group, modules in json.loads(sys.argv[1])
    },
}))
"""


@dataclass(frozen=True)
class InterpreterFacts:
    """The packages of an engine interpreter; a version is None where the package is not
    installed."""

    path: Path
    python: str
    versions: Mapping[str, str | None] = field(default_factory=dict)
    #: Engines that can be imported, with what they need -> names of their plug-ins' entry points.
    engines: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Engine -> folders of its sources and of those of its plug-ins.
    folders: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def has_plugin(self, row: EngineRow) -> bool:
        """Return whether the engine would load memprof in its processes."""
        return "memprof" in self.engines.get(row.name, ())


def find_python(given: str | None, row: EngineRow = VLLM) -> Path:
    """Return the interpreter of the engine: the one given, this one where the engine is importable,
    else ``python3`` on PATH.

    Raises:
        UsageError: the one given does not exist or is not executable.
        LaunchError: none was given and none is found.
    """
    if given is None and importlib.util.find_spec(row.package) is not None:
        return Path(sys.executable)
    found = shutil.which("python3" if given is None else os.path.expanduser(given))
    if found is None and given is not None:
        raise UsageError(
            f"--python {given}: no such program",
            f"give the interpreter that has {row.title} installed",
        )
    if found is None:
        raise LaunchError(
            f"no interpreter for the engine: {row.title} is not importable here and PATH has no "
            "python3"
        )
    return Path(found).absolute()  # not resolved: a virtual environment is known by its link


def probe_interpreter(python: Path, env: Mapping[str, str]) -> InterpreterFacts:
    """Ask the interpreter for versions and plugins, without importing any of them.

    Raises:
        LaunchError: it does not run.
    """
    asked = [(row.name, row.group, (row.package, *row.beside)) for row in ENGINES.values()]
    told = ask(python, env, "-c", _PROBE, json.dumps(asked), *PACKAGES)
    return InterpreterFacts(python, **told)


def ask(python: str | Path, env: Mapping[str, str], *arguments: str) -> Any:
    """Return what an interpreter prints last, which is JSON.

    Raises:
        LaunchError: it does not run, or fails.
    """
    try:
        done = subprocess.run(
            [str(python), *arguments], env=dict(env), capture_output=True, text=True, timeout=60
        )
        said = done.stderr if done.returncode else done.stdout
        last = (said.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        if done.returncode:
            raise ValueError(last)
        return json.loads(last)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise LaunchError(f"the engine's interpreter {python} does not work: {error}") from error


def require_engine(facts: InterpreterFacts, row: EngineRow = VLLM) -> None:
    """Refuse an interpreter in which the engine or our hooks would be missing, before the engine's
    slow start.

    Raises:
        LaunchError: the engine is not importable, or memprof is not installed beside it.
    """
    if row.name not in facts.engines:
        raise LaunchError(
            f"{row.title} is not importable in {facts.path}",
            f"--python PATH of the interpreter that has {row.title}, or --device sim:910b "
            "without any device; `memprof doctor` shows what is there"
            if row.needs is None
            else f"{facts.path} -m pip install --no-deps {row.needs}",
        )
    if not facts.has_plugin(row):
        raise LaunchError(
            f"memprof is not installed in the engine's interpreter {facts.path}, so its hooks "
            "would not load",
            pip_install(python=facts.path),
        )
