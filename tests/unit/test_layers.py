"""Data moves one way: the imports of every module, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import vllm_memprof

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(vllm_memprof.__file__).parent
#: Open to every layer; they import nothing of the package but each other.
OPEN_TO_ALL = {
    "errors",
    "files",
    "options",
    "socket_credentials",
    "redact",
    "units",
    "text",
    "version",
    "document",
    "tables",
    "layout",
}
#: layer -> layers it may import, at module level, inside functions and for typing alike. A layer is
#: a folder of the package or a module beside them; the package itself ("__init__") is the public
#: API.
MAY_IMPORT = {
    "errors": set(),
    "files": set(),
    "options": set(),
    "socket_credentials": set(),
    "redact": set(),
    "units": set(),
    "text": set(),
    "version": set(),
    "document": set(),
    "tables": set(),
    "layout": set(),
    "capture": {"record", "engines"},
    "engines": {"capture", "record"},
    "record": set(),
    "causes": {"record", "engines"},
    "logs": {"record", "engines", "causes"},
    "accounting": {"record", "engines"},
    "compare": {"accounting", "record", "engines"},
    "check": {"accounting", "compare", "record"},
    "accuracy": set(),
    "holders": {"capture", "engines", "record", "sim", "launch"},
    "report": {"accounting", "accuracy", "record"},
    "sim": set(),
    "launch": {"record", "sim", "engines"},
    "plans": {"record", "accounting", "compare", "sim", "launch", "engines"},
    "frames": {"record", "accounting", "compare", "check", "logs", "plans", "report"},
    "sources": {"record", "accounting", "logs", "plans"},
    "api": {
        "sources",
        "frames",
        "record",
        "accounting",
        "compare",
        "check",
        "launch",
        "plans",
        "report",
    },
    "__init__": {"api"},
    "cli": {
        "causes",
        "capture",
        "engines",
        "record",
        "logs",
        "accounting",
        "compare",
        "check",
        "accuracy",
        "report",
        "sim",
        "launch",
        "holders",
        "plans",
        "frames",
        "sources",
        "api",
    },
    "__main__": {"cli"},
}
#: (layer, imported layer) -> the only modules of it that it may import.
ONLY = {
    ("capture", "record"): {"schema", "failures", "host", "segments", "weights"},
    ("engines", "record"): {"schema", "host"},
    # the table and the types of its rows: never hooks, actions or drivers
    **{
        (layer, "engines"): {"", "base"}
        for layer in ("capture", "causes", "holders", "compare", "launch", "logs", "plans")
    },
    ("launch", "engines"): {"", "base", "host_asks"},
    ("accounting", "engines"): {"", "base", "equation"},
    ("logs", "engines"): {"", "base", "line_format"},
    ("holders", "capture"): {"driver_list"},
    ("holders", "launch"): {"doctor", "folder"},
    ("report", "accuracy"): {"spread"},
}
#: layer -> packages that none of its modules imports at module level.
NOT_AT_MODULE_LEVEL = {
    "capture": {"torch", "torch_npu", "vllm", "vllm_ascend"},
    "record": {"torch", "vllm", "rich", "typer"},
    "causes": {"torch", "vllm", "rich", "typer", "pandas"},
    "logs": {"torch", "vllm", "rich", "typer"},
    "accounting": {"torch", "vllm", "rich", "typer"},
    "compare": {"torch", "vllm", "rich", "typer"},
    "check": {"torch", "vllm", "rich", "typer"},
    "accuracy": {"torch", "vllm", "rich", "typer", "pandas"},
    "report": {"torch", "vllm", "typer"},
    "sim": {"torch", "vllm", "rich", "typer"},
    "launch": {"torch", "vllm", "pandas"},
    "holders": {"torch", "vllm", "pandas", "rich", "typer"},
    "plans": {"torch", "vllm", "pandas", "typer", "ray"},
    "cli": {"torch", "vllm"},
    "frames": {"torch", "vllm", "rich", "typer"},
    "sources": {"torch", "vllm", "pandas"},
    "api": {"torch", "vllm", "pandas"},
    "__init__": {"torch", "vllm", "pandas"},
}
#: Layers without a ruff.toml: modules beside the folders, and the one that may import all others.
UNGUARDED = {"sources", "api", "__init__", "__main__", "cli"}
#: layer -> packages that none of its modules imports at all.
NOWHERE = {
    "capture": {"pandas", "rich", "typer", "psutil", "msgspec"},
    "engines": {"pandas", "rich", "typer", "psutil", "msgspec"},
    "launch": {"torch", "vllm", "pandas"},
    "holders": {"torch", "vllm", "pandas"},
}


class Import(NamedTuple):
    """One imported name, as ``package.module`` or ``package.module.attribute``."""

    name: str
    at_module_level: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(path: Path) -> str:
    """Return the layer; the findings of one engine are made where all others are."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "accounting" if parts[0] == "engines" and parts[-1] == "findings" else parts[0]


def imports_of(tree: ast.AST, top: bool = True) -> Iterator[Import]:
    """Return every import; one inside a function or for typing is not at module level."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (Import(f"{node.module}.{alias.name}", top) for alias in node.names)
        else:
            later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
                isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            )
            yield from imports_of(node, top and not later)


def package_files() -> list[Path]:
    """Return all modules but those that run inside a simulated stack."""
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[:2] not in {("sim", "site"), ("sim", "engine")}
    ]


FILES = {path: list(imports_of(ast.parse(path.read_text()))) for path in package_files()}
MODULES = {module_name(path) for path in FILES}


def module_of(name: str) -> str | None:
    """The module of the package that an imported name is or comes from; None for foreign names."""
    if name.split(".")[0] != PACKAGE.name:
        return None
    return name if name in MODULES else name.rpartition(".")[0]


def test_every_module_belongs_to_a_layer():
    assert [str(path) for path in FILES if layer_of(path) not in MAY_IMPORT] == []


@pytest.mark.parametrize("layer", sorted(MAY_IMPORT))
def test_arrows(layer):
    allowed = MAY_IMPORT[layer] | OPEN_TO_ALL | {layer}
    wrong = []
    for path, imported in FILES.items():
        if layer_of(path) != layer:
            continue
        for name, _ in imported:
            module = module_of(name)
            if module is None or module == PACKAGE.name:
                continue
            other, _, rest = module.partition(".")[2].partition(".")
            only = ONLY.get((layer, other))
            if other not in allowed or (only is not None and rest.split(".")[0] not in only):
                wrong.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert wrong == []


@pytest.mark.parametrize("layer", sorted(NOT_AT_MODULE_LEVEL.keys() | NOWHERE.keys()))
def test_heavy_packages_stay_where_they_belong(layer):
    never, at_top = NOWHERE.get(layer, set()), NOT_AT_MODULE_LEVEL.get(layer, set())
    wrong = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, imported in FILES.items()
        if layer_of(path) == layer
        for name, at_module_level in imported
        if name.split(".")[0] in (never | at_top if at_module_level else never)
    ]
    assert wrong == []


def test_record_imports_pandas_in_its_frames_alone():
    found = {
        path.stem
        for path, imported in FILES.items()
        if layer_of(path) == "record"
        for name, _ in imported
        if name.split(".")[0] == "pandas"
    }
    assert found <= {"frames", "loader"}


def test_the_table_of_engines_knows_the_driver_by_a_name_that_exists():
    from vllm_memprof.engines import ENGINES

    for row in ENGINES.values():
        assert row.driver in MODULES
        assert row.driver.split(".")[1:3] == ["engines", row.name.replace("-", "_")]


@pytest.mark.parametrize("layer", sorted(MAY_IMPORT.keys() - OPEN_TO_ALL - UNGUARDED))
def test_ruff_guards_the_same_arrows(layer):
    banned = tomllib.loads((PACKAGE / layer / "ruff.toml").read_text())
    names = banned["lint"]["flake8-tidy-imports"]["banned-api"]
    others = MAY_IMPORT.keys() - OPEN_TO_ALL - {layer, "__init__", "__main__"}
    layers = {f"{PACKAGE.name}.{other}" for other in others - MAY_IMPORT[layer]}
    assert {name for name in names if name.count(".") == 1} == layers
    assert NOWHERE.get(layer, set()) <= names.keys()


def test_no_import_cycle():
    """Over all imports: at module level, inside functions and for typing."""
    graph = {
        module_name(path): {
            module
            for name, _ in imported
            if (module := module_of(name)) in MODULES and module != module_name(path)
        }
        for path, imported in FILES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def loaded_after(code: str) -> set[str]:
    probe = f"{code}\nimport sys\nprint(' '.join(m for m in sys.modules if '.' not in m))"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_the_plugin_loads_nothing_heavy(tmp_path):
    code = (
        f"import os; os.environ['MEMPROF_RUN_DIR'] = {str(tmp_path)!r}\n"
        "from vllm_memprof.capture import plugin\nplugin.register()\nassert plugin.RECORDER"
    )
    loaded = loaded_after(code)
    assert not loaded & {"pandas", "numpy", "rich", "typer", "torch", "vllm", "psutil"}


def test_the_command_line_loads_nothing_heavy():
    loaded = loaded_after("import vllm_memprof.cli")
    assert not loaded & {"pandas", "numpy", "torch", "vllm", "plotly", "jinja2"}
