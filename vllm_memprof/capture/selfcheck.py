"""Static self-check: ``python -m vllm_memprof.capture.selfcheck [--json]``.

Reads the installed packages with ``ast``, importing none of them, and says which rows of the hook
table have their place there. That a class is the one instantiated, and a method is called, only a
run can tell (see verdicts.py).
"""

from __future__ import annotations

import argparse
import ast
import importlib.machinery
import importlib.metadata
import json
import sys
from pathlib import Path

from vllm_memprof.capture.hook import EXPECTED_ABSENT, REQUIRED, Hook
from vllm_memprof.capture.hooks.table import rows_in_force
from vllm_memprof.capture.verdicts import HookVerdict
from vllm_memprof.engines import ENGINES, VLLM

#: Backend -> distribution that shows it is installed.
_BACKEND_PACKAGE = {"npu": "torch_npu", "cuda": "torch"}


def check_installed(
    path: list[str] | None = None,
) -> tuple[dict[str, str | None], list[HookVerdict]]:
    """Check the rows that would be in force here.

    Args:
        path: folders to look for packages in; ``sys.path`` when None.

    Returns:
        Versions of the engine's packages (None: not installed) and one row per hook in force.
    """
    versions: dict[str, str | None] = {}
    packages = (package for row in ENGINES.values() for package, _ in row.known_as[::-1])
    for name in (*dict.fromkeys(packages), "torch", "torch_npu"):
        known = importlib.metadata.distributions(name=name, path=sys.path if path is None else path)
        versions[name] = next((distribution.version for distribution in known), None)
    backend = next((name for name, package in _BACKEND_PACKAGE.items() if versions[package]), None)
    engine = next((row for row in ENGINES.values() if versions.get(row.package)), VLLM)
    rows = rows_in_force(backend, versions.get(engine.package), sampling=True, engine=engine.name)
    return versions, [_check_row(hook, path) for hook in rows]


def _check_row(hook: Hook, path: list[str] | None) -> HookVerdict:
    answers = {target: _defined(target, path) for target in hook.targets}
    absent = hook.need == EXPECTED_ABSENT
    states = ("stale", "absent_ok", "absent_ok") if absent else ("found", "compiled", "missing")
    for answer, state in zip((True, None), states, strict=False):
        for target, given in answers.items():
            if given is answer:
                return HookVerdict(hook, state, hook.targets[0] if state == "absent_ok" else target)
    return HookVerdict(hook, states[-1], hook.targets[0])


def _defined(target: str, path: list[str] | None) -> bool | None:
    """Return True if a target exists in source; None where its module is compiled."""
    module_name, _, attributes = target.partition(":")
    source = _find_source(module_name, path)
    if source is None:
        return False
    if source.suffix != ".py":
        return None
    body: list[ast.stmt] = ast.parse(source.read_text(encoding="utf-8")).body
    *parents, name = attributes.split(".")
    for parent in parents:
        classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        if parent not in classes:  # it may come from elsewhere: that source would be followed
            elsewhere = any(
                isinstance(node, ast.If)
                or (isinstance(node, ast.ImportFrom) and _binds(node, parent))
                for node in body
            )
            return None if elsewhere else False
        body = classes[parent].body
    return any(_binds(node, name) for node in body)


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name == name
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return any((alias.asname or alias.name) == name for alias in node.names)
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    return False


def _find_source(module_name: str, path: list[str] | None) -> Path | None:
    """The file of a module, found without importing its packages."""
    spec = None
    for part in module_name.split("."):  # a folder without __init__.py asks for an imported parent
        spec = importlib.machinery.PathFinder.find_spec(part, path)
        if spec is None or spec.submodule_search_locations is None:
            break  # a compiled module makes its submodules itself
        path = list(spec.submodule_search_locations)
    return Path(spec.origin) if spec is not None and spec.origin else None


def main(argv: list[str] | None = None) -> int:
    """Print the static check; status 1 when a required row is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_memprof.capture.selfcheck", description=main.__doc__
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    versions, rows = check_installed()
    required = [row for row in rows if row.hook.need == REQUIRED]
    missing = sum(row.state == "missing" for row in required)
    if options.json:
        found = [row.to_event() for row in rows]
        print(json.dumps({"versions": versions, "rows": found, "missing": missing}))
        return 1 if missing else 0
    print(", ".join(f"{name} {version or '(not installed)'}" for name, version in versions.items()))
    if not any(versions.get(row.package) for row in ENGINES.values()):
        print("no engine is installed for this interpreter: run this with the engine's own python")
        return 1
    for row in rows:
        print(f"{row.state:10}  {row.hook.need:15}  {row.hook.id:24}  {row.target}")
    compiled = sum(row.state == "compiled" for row in required)
    print(
        f"{len(required) - missing - compiled}/{len(required)} required hooks have their "
        f"place in the installed sources, {compiled} are in compiled modules and checked in a run"
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
