"""Packages that an engine imports and no index has, written from the names it imports from them.

In: the installed files of the engine, the bodies below ``engine/stand_ins``. Out: a folder for the
engine's ``PYTHONPATH`` with every such package: each imported name is there; one with a body does
what the body says, every other fails by its own name when it is used (``absent.py`` there). Nothing
of the packages themselves is in them. Runs in the launcher's process, in ``memprof sim setup``.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_memprof.errors import SetupError
from vllm_memprof.sim.folders import new_folder
from vllm_memprof.sim.stacks import StandIn

#: Folder of a stack's prefix.
STAND_INS = "stand_ins"
BODIES_DIR = Path(__file__).parent / "engine" / "stand_ins"
#: Module of the written folder that holds the class of every name without a body.
ABSENT = "memprof_absent"
_IMPORTERS = {"import_module", "__import__"}

#: Dotted name of a module -> the names that are imported from it.
Names = dict[str, set[str]]


def sources() -> list[Path]:
    """Return the files that the stand-ins are written from, this one included."""
    return [Path(__file__), *sorted(BODIES_DIR.rglob("*.py"))]


def imported_names(folder: Path, package: str) -> Names:
    """Return what the files below a folder import from a package, at the top and inside functions.

    A module that is imported as a whole has no names. Modules above one that is imported are there
    too.

    Raises:
        SetupError: the folder has no Python file, or one of them is damaged.
    """
    names: Names = {}
    files = sorted(folder.rglob("*.py"))
    if not files:
        raise SetupError(f"{folder} has no Python files: the engine is not installed")
    for path in files:
        text = path.read_text(encoding="utf-8-sig")
        if package not in text:
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise SetupError(f"{path} cannot be read: {error}") from error
        for module, imported in _imports(tree):
            if module.split(".")[0] == package:
                names.setdefault(module, set()).update(imported)
    for module in list(names):
        while module := module.rpartition(".")[0]:
            names.setdefault(module, set())
    # `from package import module` names a module, not a value of the package
    return {
        module: {name for name in found if f"{module}.{name}" not in names}
        for module, found in names.items()
    }


def _imports(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, {alias.name for alias in node.names} - {"*"}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, set()
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            first = node.args[0]
            if called in _IMPORTERS and isinstance(first, ast.Constant):
                yield str(first.value), set()


def body_of(module: str) -> str:
    """Return the text of the file that holds bodies of a module, empty where it has none."""
    path = BODIES_DIR.joinpath(*module.split(".")).with_suffix(".py")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def names_in(text: str) -> set[str]:
    """Return the names that a module defines at its top."""
    names: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return names


def module_text(module: str, names: Iterable[str]) -> str:
    """Return the file of a module: its bodies, and a failing value for every other name."""
    body = body_of(module)
    failing = sorted(set(names) - names_in(body))
    parts = [body or f'"""Stand-in for {module}, written by memprof sim setup."""\n']
    if failing:
        rows = "".join(f'{name} = _Absent("{module}.{name}")\n' for name in failing)
        parts.append(f"from {ABSENT} import Absent as _Absent  # noqa: E402\n\n{rows}")
    return "\n".join(parts)


def write_stand_ins(
    stand_ins: Iterable[StandIn], site_packages: Path, target: Path
) -> dict[str, int]:
    """Write every package anew into a folder, which appears as a whole.

    Args:
        stand_ins: the packages, and whose imports decide what is in them.
        site_packages: of the engine environment.
        target: the folder.

    Returns:
        Package -> number of names in it.

    Raises:
        SetupError: the importing package is not installed, or nothing imports the package.
    """
    counts = {}
    with new_folder(target) as temporary:
        shutil.copyfile(BODIES_DIR / "absent.py", temporary / f"{ABSENT}.py")
        for each in stand_ins:
            names = imported_names(site_packages / each.imported_by, each.package)
            if not names:
                raise SetupError(f"nothing in {each.imported_by} imports {each.package}")
            packages = {module.rpartition(".")[0] for module in names}
            for module, found in names.items():
                path = temporary.joinpath(*module.split("."))
                inside = module in packages or module == each.package
                path = path / "__init__.py" if inside else path.with_suffix(".py")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(module_text(module, found), encoding="utf-8")
            counts[each.package] = sum(map(len, names.values()))
        shutil.rmtree(target, ignore_errors=True)
    return counts
