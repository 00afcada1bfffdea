"""Data moves one way: who may import whom, read from the source and checked in a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_memprof

PACKAGE = Path(vllm_memprof.__file__).parent
OPEN_TO_ALL = {"errors", "redact", "text", "units"}
#: layer -> layers it may import. `record` stands for record.schema and the loader.
MAY_IMPORT = {
    "capture": {"record"},
    "record": set(),
    "logs": {"record"},
    "accounting": {"record"},
    "compare": {"accounting", "record"},
    "check": {"accounting", "compare", "record"},
    "report": {"accounting", "compare", "check", "plans", "record"},
    "sim": set(),
    "launch": {"record", "sim"},
    "plans": {"record", "accounting", "compare", "sim", "launch"},
    "cli": {
        "capture",
        "record",
        "logs",
        "accounting",
        "compare",
        "check",
        "report",
        "sim",
        "launch",
        "plans",
    },
}
#: layer -> packages that it never imports at module level (capture: nowhere at all).
NEVER = {
    "capture": {"pandas", "rich", "typer", "psutil"},
    "record": {"torch", "vllm", "rich", "typer"},
    "logs": {"torch", "vllm", "rich", "typer"},
    "accounting": {"torch", "vllm", "rich", "typer"},
    "compare": {"torch", "vllm", "rich", "typer"},
    "check": {"torch", "vllm", "rich", "typer"},
    "report": {"torch", "vllm", "typer"},
    "launch": {"torch", "vllm", "pandas"},
    "plans": {"torch", "vllm", "pandas", "typer", "ray"},
    "cli": {"torch", "vllm"},
}


def modules(layer: str) -> list[Path]:
    return [
        path
        for path in (PACKAGE / layer).rglob("*.py")
        if "site" not in path.relative_to(PACKAGE).parts
    ]


def imported_names(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("layer", sorted(MAY_IMPORT))
def test_arrows(layer):
    allowed = MAY_IMPORT[layer] | OPEN_TO_ALL | {layer, "__version__"}
    wrong = []
    for path in modules(layer):
        for name in imported_names(path):
            parts = name.split(".")
            if parts[0] == "vllm_memprof" and len(parts) > 1 and parts[1] not in allowed:
                wrong.append(f"{path.relative_to(PACKAGE)}: {name}")
            if (
                layer == "capture"
                and parts[:2] == ["vllm_memprof", "record"]
                and parts[2:3] != ["schema"]
            ):
                wrong.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert wrong == []


@pytest.mark.parametrize("layer", sorted(NEVER))
def test_heavy_packages_stay_where_they_belong(layer):
    wrong = []
    for path in modules(layer):
        tree = ast.parse(path.read_text())
        nodes = ast.walk(tree) if layer == "capture" else tree.body
        for node in nodes:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            wrong += [
                f"{path.relative_to(PACKAGE)}: {n}"
                for n in names
                if n.split(".")[0] in NEVER[layer]
            ]
    assert wrong == []


def loaded_after(code: str) -> set[str]:
    probe = f"{code}\nimport sys\nprint(' '.join(m for m in sys.modules if '.' not in m))"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_the_plugin_loads_nothing_heavy():
    loaded = loaded_after("from vllm_memprof.capture.plugin import register")
    assert not loaded & {"pandas", "numpy", "rich", "typer", "torch", "vllm", "psutil"}


def test_the_command_line_loads_nothing_heavy():
    loaded = loaded_after("import vllm_memprof.cli")
    assert not loaded & {"pandas", "numpy", "torch", "vllm", "plotly", "jinja2"}
