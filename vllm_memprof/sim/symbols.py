"""The names that an engine can ask the simulated device for, and the state of each.

In: the engine's installed binaries, the rules in ``native/symbols.toml``, the names that the shim's
objects define. Out: the rows of ``names.inc``, with which ``native/generated`` completes the shim.
Runs in the launcher's process, while building.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from vllm_memprof.errors import SetupError
from vllm_memprof.files import read_table
from vllm_memprof.sim.elf import files_like, read_binary, system_library

NATIVE_DIR = Path(__file__).parent / "native"
#: The first stage of an operator; its group is the name of the second stage.
_FIRST_STAGE = re.compile(r"((?:aclnn|Atb)\w+?)Get(?:Max)?WorkspaceSize")
#: SelfAttention of atb::CreateOperation<atb::infer::SelfAttentionParam>, mangled.
_ATB_FAMILY = re.compile(r"CreateOperationINS_5infer\d+(\w+?)ParamE")


@dataclass(frozen=True)
class Rule:
    """A row of a file of rules: the state of the names that a pattern fits."""

    pattern: str
    state: str
    reason: str
    target: str = ""


def load_rules(name: str) -> tuple[dict[str, Sequence[str]], list[Rule]]:
    """Read a file of rules of ``native``, which explains its keys: the engine's, and the rules."""
    table = read_table(NATIVE_DIR / f"{name}.toml")
    return table["engine"], [Rule(**row) for row in table["rule"]]


@dataclass(frozen=True)
class Demand:
    """The names and libraries that the engine's binaries ask for."""

    linked: set[str]  # undefined symbols; one that is missing would keep the library from loading
    looked_up: set[str]  # strings of a name family, and operators that the engine ships compiled
    sonames: set[str]  # libraries the shim must answer for


def collect_demand(site_packages: Path, compiler: str) -> Demand:
    """Read the engine's binaries.

    Args:
        site_packages: where the engine's packages are installed.
        compiler: asked where the system's own libraries are.

    Raises:
        SetupError: no engine library there, or one that cannot be read.
    """
    engine, _ = load_rules("symbols")
    files = files_like(site_packages, engine["libraries"])
    if not files:
        raise SetupError(
            f"no engine library below {site_packages}",
            "install the engine environment first: memprof sim setup",
        )
    libraries = [read_binary(path) for path in files]
    provider_files = files_like(site_packages, engine["providers"])
    needed = set().union(*(library.needed for library in libraries))
    system = {
        soname: system_library(compiler, soname)
        for soname in needed.difference(path.name for path in provider_files)
    }
    provided = {
        name
        for path in [*provider_files, *filter(None, system.values())]
        for name in read_binary(path).defined
    }
    linked = {
        name
        for library in libraries
        for name in library.undefined.keys() - provided
        if not re.match("_?Py[A-Z_]", name)  # defined by the interpreter itself
    }
    string = re.compile(rb"\0(" + "|".join(engine["lookup"]).encode() + rb")(?=\0)")
    looked_up = {name.decode() for path in files for name in string.findall(path.read_bytes())}
    for path in files_like(site_packages, engine["operator_libraries"]):
        looked_up |= {name for name in read_binary(path).defined if name.startswith("aclnn")}
    looked_up -= linked | provided  # what a library links and defines is a string of it too
    missing = {soname for soname, path in system.items() if path is None}
    return Demand(linked, looked_up, missing.union(engine["opened"]))


def make_rows(
    names: Collection[str],
    rules: list[Rule],
    linked: Collection[str] = (),
    implemented: Collection[str] = (),
    null_on_failure: Collection[str] = (),
) -> list[str]:
    """Decide the state of every name.

    Args:
        names: all of them.
        rules: the first one whose pattern a name fits gives its state; without one it fails.
        linked: names that cannot be absent.
        implemented: names that have a body.
        null_on_failure: functions that return a pointer.

    Returns:
        For every name the call of a macro of ``native``: its state, and what that needs. Behind
        them the second stages of the operators.
    """
    second = {name: match[1] for name in names if (match := _FIRST_STAGE.fullmatch(name))}
    rows, runs, numbers = list[str](), set[str](), count()
    for name in sorted(names):
        rule = next((rule for rule in rules if re.fullmatch(rule.pattern, name)), None)
        state = rule.state if rule else "failing"
        if name in implemented:
            rows.append(f"IMPLEMENTED({name})")
        elif state == "operator" and name in second:
            operator = second[name].removeprefix("aclnn")
            rows.append(f"OPERATOR({name}, {operator}, {next(numbers)})")
            runs.add(second[name])
        elif state == "operator" and name in second.values():
            runs.add(name)
        elif rule and state == "atb":
            family = _ATB_FAMILY.search(name)
            rows.append(f'ATB({name}, {rule.target}, "{family[1] if family else ""}")')
        # Also what fits a rule for operators and is no stage of one.
        elif state in ("failing", "operator") or (state == "absent" and name in linked):
            rows.append(f"{'FAILING_NULL' if name in null_on_failure else 'FAILING'}({name})")
        else:
            rows.append(f"{state.upper()}({name})")
    for name in sorted(runs.difference(implemented)):
        rows.append(f"{'RUN_ATB' if name.startswith('Atb') else 'RUN'}({name})")
    return rows
