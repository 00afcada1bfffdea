"""Static self-check: ``python -m vllm_memprof.capture.selfcheck`` prints JSON, for ``doctor``.

Reads the installed packages with ``ast``, importing none of them, and says which rows of the hook
table have their place there. That a class is the one instantiated, and a method is called, only a
run can tell (see observer.py).
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from vllm_memprof.capture.hook import Verdict
from vllm_memprof.capture.hooks.table import rows_in_force
from vllm_memprof.capture.probe import PACKAGES
from vllm_memprof.engines import ENGINES, VLLM


def check_installed(path: list[str]) -> list[Verdict]:
    """Return one row per hook that would be in force here.

    Args:
        path: folders to look for packages in.
    """
    versions = {
        name: distribution.version
        for name in (*(row.package for row in ENGINES.values()), *PACKAGES.values())
        for distribution in [*importlib.metadata.distributions(name=name, path=path)][:1]
    }
    backend = next((name for name, package in PACKAGES.items() if package in versions), "")
    engine = next((row for row in ENGINES.values() if row.package in versions), VLLM)
    version = versions.get(engine.package)
    rows = rows_in_force(backend, version, sampling=True, engine=engine.name)
    verdicts = []
    for hook in rows:
        answers = {target: _defined(target, path) for target in hook.targets}
        best = max(answers, key=answers.__getitem__)
        states = ("missing", "compiled", "found")
        if hook.need == "expected_absent":
            states = ("absent_ok", "absent_ok", "stale")
        verdicts.append(hook.verdict(states[answers[best]], best))
    return verdicts


def _defined(target: str, path: list[str]) -> int:
    """Return 2 if a target exists in source; 1 where its module is compiled, 0 without it."""
    module_name, _, attributes = target.partition(":")
    spec = None
    for part in module_name.split("."):  # a folder without __init__.py asks for an imported parent
        spec = PathFinder.find_spec(part, path)
        if spec is None or spec.submodule_search_locations is None:
            break  # a compiled module makes its submodules itself
        path = list(spec.submodule_search_locations)
    if spec is None or not spec.origin:
        return 0
    if not spec.origin.endswith(".py"):
        return 1
    body: list[ast.stmt] = ast.parse(Path(spec.origin).read_text("utf-8")).body
    *parents, name = attributes.split(".")
    for parent in parents:
        classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == parent]
        if not classes:  # it may come from elsewhere: that source would be followed
            return any(isinstance(node, ast.If) or parent in _bound(node) for node in body)
        body = classes[-1].body
    # that of a dataclass is in no source
    is_there = name == "__init__" or any(name in _bound(node) for node in body)
    return 2 if is_there else 0


def _bound(node: ast.stmt) -> set[str | None]:
    """Return the names that a definition, an import or an assignment binds."""
    aliases, targets = getattr(node, "names", ()), getattr(node, "targets", ())
    imported = [alias.asname or alias.name for alias in aliases]
    assigned = [getattr(target, "id", None) for target in targets]
    return {getattr(node, "name", None), *imported, *assigned}


if __name__ == "__main__":
    print(json.dumps({"rows": check_installed(sys.path)}))
