"""What an engine can ask the simulated device for, and what becomes of each name.

In: the engine's installed binaries, the rules in ``native/symbols.toml``, the names that the shim's objects define.
Out: a `SymbolPlan`, and the C++ and assembly that complete the shim. Runs in the launcher's process, while building.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_memprof.errors import SetupError
from vllm_memprof.sim.elf import SYMTAB, ElfFile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RULES_FILE = Path(__file__).parent / "native" / "symbols.toml"


@dataclass(frozen=True)
class Rule:
    """One row of ``symbols.toml``."""

    pattern: re.Pattern[str]
    state: str  # operator | atb | noop | absent
    reason: str
    target: str = ""


@dataclass(frozen=True)
class Rules:
    libraries: list[str]
    operator_libraries: list[str]
    providers: list[str]
    lookup: re.Pattern[bytes]
    opened: list[str]
    rules: list[Rule]

    def match(self, name: str) -> Rule | None:
        return next((rule for rule in self.rules if rule.pattern.fullmatch(name)), None)


@dataclass(frozen=True)
class Demand:
    """What the engine's binaries ask for."""

    linked: dict[str, str]  # undefined symbol -> first library that links it
    looked_up: dict[str, str]  # string of a name family -> first library that holds it
    sonames: list[str]  # libraries the shim must answer for
    machine: int  # ELF machine of the engine's binaries

    def names(self) -> list[str]:
        return sorted({*self.linked, *self.looked_up})


@dataclass(frozen=True)
class Symbol:
    """One name the engine can ask for, and its state: implemented, operator, atb, noop, absent or failing."""

    name: str
    state: str
    reason: str
    asked_by: str
    linked: bool  # a missing linked name would keep the library from loading
    target: str = ""


@dataclass(frozen=True)
class SymbolPlan:
    symbols: list[Symbol]
    sonames: list[str]
    pointer_results: frozenset[str] = field(
        default_factory=frozenset
    )  # functions whose failure is a null pointer

    def by_state(self, state: str) -> list[Symbol]:
        return [symbol for symbol in self.symbols if symbol.state == state]

    def to_json(self) -> dict[str, Any]:
        rows = [[s.name, s.state, s.reason, s.asked_by, s.linked] for s in self.symbols]
        return {
            "columns": ["name", "state", "reason", "asked_by", "linked"],
            "symbols": rows,
            "sonames": self.sonames,
        }


def load_rules(path: Path = RULES_FILE) -> Rules:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    engine = table["engine"]
    rules = [
        Rule(re.compile(row["pattern"]), row["state"], row["reason"], row.get("target", ""))
        for row in table["rule"]
    ]
    lookup = re.compile(rb"(?<=\0)(?:" + "|".join(engine["lookup"]).encode() + rb")(?=\0)")
    return Rules(
        libraries=engine["libraries"],
        operator_libraries=engine["operator_libraries"],
        providers=engine["providers"],
        lookup=lookup,
        opened=engine["opened"],
        rules=rules,
    )


def engine_libraries(site_packages: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted(
        {path for pattern in patterns for path in site_packages.glob(pattern) if path.is_file()}
    )


def collect_demand(site_packages: Path, rules: Rules, compiler: str) -> Demand:
    """Reads the engine's binaries.

    Args:
        site_packages: where the engine's packages are installed.
        rules: which libraries and name families count.
        compiler: asked where the system's own libraries are.

    Raises:
        SetupError: no engine library there, or one for another kind of machine.
    """
    libraries = [ElfFile(path) for path in engine_libraries(site_packages, rules.libraries)]
    if not libraries:
        raise SetupError(
            f"no engine library below {site_packages}",
            "install the engine environment first: memprof sim setup",
        )
    provided_files = {path.name for path in engine_libraries(site_packages, rules.providers)}
    needed = sorted(
        {soname for library in libraries for soname in library.needed()} - provided_files
    )
    system = {
        soname: found
        for soname in needed
        if (found := _system_library(compiler, soname)) is not None
    }
    provided: set[str] = set()
    provider_files = engine_libraries(site_packages, rules.providers)
    for path in [*provider_files, *system.values()]:
        provided.update(
            name for name, defined, _, hidden in ElfFile(path).symbols() if defined and not hidden
        )
    linked: dict[str, str] = {}
    looked_up: dict[str, str] = {}
    for library in libraries:
        for name, defined, weak, _ in library.symbols():
            if not defined and not weak and name not in provided and not _of_the_interpreter(name):
                linked.setdefault(name, library.path.name)
        for match in rules.lookup.findall(library.read_only_data()):
            looked_up.setdefault(match.decode(), library.path.name)
    for path in engine_libraries(site_packages, rules.operator_libraries):
        for name, defined, _, _ in ElfFile(path).symbols():
            if defined and name.startswith("aclnn"):
                looked_up.setdefault(name, path.name)
    sonames = [soname for soname in needed if soname not in system]
    return Demand(linked, looked_up, sorted({*sonames, *rules.opened}), libraries[0].machine)


def _system_library(compiler: str, soname: str) -> Path | None:
    if soname.startswith("ld-linux"):
        return next(iter(sorted(Path("/").glob(f"lib*/{soname}"))), None)
    found = subprocess.run(
        [compiler, f"-print-file-name={soname}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return Path(found) if found != soname and Path(found).is_file() else None


def _of_the_interpreter(name: str) -> bool:
    return re.match(r"_?Py[A-Z_]", name) is not None


def defined_symbols(objects: Iterable[Path]) -> set[str]:
    """The names that compiled objects export."""
    return {
        name
        for path in objects
        for name, defined, _, hidden in ElfFile(path).symbols(SYMTAB)
        if defined and not hidden
    }


def pointer_functions(include_dirs: Iterable[Path]) -> frozenset[str]:
    """Functions that the headers declare to return a pointer: their failure is null."""
    found: set[str] = set()
    for directory in include_dirs:
        for header in directory.rglob("*.h"):
            found.update(
                re.findall(
                    r"\*\s*((?:acl|Hccl)\w+)\s*\(",
                    header.read_text(encoding="utf-8", errors="replace"),
                )
            )
    return frozenset(found)


def make_plan(
    demand: Demand, rules: Rules, implemented: set[str], pointer_results: frozenset[str]
) -> SymbolPlan:
    """Decides what becomes of every name."""
    symbols = []
    names = set(demand.names())
    for name in sorted(names):
        linked = name in demand.linked
        asked_by = demand.linked.get(name) or demand.looked_up[name]
        rule = rules.match(name)
        if name in implemented:
            symbols.append(Symbol(name, "implemented", "", asked_by, linked))
        elif rule is None:
            symbols.append(Symbol(name, "failing", "", asked_by, linked))
        elif rule.state == "operator" and not _is_stage(name, names):
            symbols.append(Symbol(name, "failing", "not a stage of an operator", asked_by, linked))
        elif rule.state == "absent" and linked:
            symbols.append(
                Symbol(name, "failing", "linked, so it cannot be absent", asked_by, linked)
            )
        else:
            symbols.append(Symbol(name, rule.state, rule.reason, asked_by, linked, rule.target))
    return SymbolPlan(symbols, demand.sonames, pointer_results)


def _is_stage(name: str, names: set[str]) -> bool:
    """Whether an aclnn name is a first stage, or the second one of a first that is asked for too."""
    return bool(_STAGE_ONE.fullmatch(name)) or f"{name}GetWorkspaceSize" in names


_STAGE_ONE = re.compile(r"aclnn(\w+?)Get(?:Max)?WorkspaceSize")


def operator_names(plan: SymbolPlan) -> tuple[list[str], list[str]]:
    """The operators' first and second stages. A second stage is offered for every first one."""
    names = {symbol.name for symbol in plan.by_state("operator")}
    first = sorted(name for name in names if _STAGE_ONE.fullmatch(name))
    second = {name for name in names if name not in first}
    implemented = {symbol.name for symbol in plan.by_state("implemented")}
    for name in first:
        match = _STAGE_ONE.fullmatch(name)
        assert match is not None
        second.add(f"aclnn{match.group(1)}")
    return first, sorted(second - implemented)


def generate_cpp(plan: SymbolPlan) -> str:
    """Bodies of the names that no file of the shim defines, except the operators' entry points."""
    lines = [
        "// Generated from the engine's binaries. Do not edit.",
        "#include <cstdint>",
        '#define API extern "C" __attribute__((visibility("default")))',
        '#define SHIM extern "C" __attribute__((visibility("hidden")))',
        "SHIM int memprof_sim_unimplemented(const char *);",
    ]
    for index, symbol in enumerate(plan.by_state("failing")):
        result = "void *" if symbol.name in plan.pointer_results else "int "
        value = "nullptr" if symbol.name in plan.pointer_results else "code"
        lines.append(
            f'API {result}fail{index}() __asm__("{symbol.name}");\n'
            f'API {result}fail{index}() {{ int code = memprof_sim_unimplemented("{symbol.name}"); '
            f"(void)code; return {value}; }}"
        )
    for index, symbol in enumerate(plan.by_state("noop")):
        lines.append(
            f'API int noop{index}() __asm__("{symbol.name}");\nAPI int noop{index}() {{ return 0; }}'
        )
    atb = plan.by_state("atb")
    targets = sorted({symbol.target for symbol in atb})
    lines += [f"SHIM uint64_t {target}(void *, void *, const char *);" for target in targets]
    for index, symbol in enumerate(atb):
        family = _atb_family(symbol.name)
        lines.append(
            f'API uint64_t atb{index}(void *, void *) __asm__("{symbol.name}");\n'
            f"API uint64_t atb{index}(void *first, void *second) "
            f'{{ return {symbol.target}(first, second, "{family}"); }}'
        )
    first, _ = operator_names(plan)
    lines.append("SHIM const char *const memprof_sim_aclnn_names[] = {")
    for name in first:
        match = _STAGE_ONE.fullmatch(name)
        assert match is not None
        lines.append(f'  "{match.group(1)}",')
    lines.append("  nullptr};")
    return "\n".join(lines) + "\n"


def _atb_family(mangled: str) -> str:
    """``SelfAttention`` of ``atb::CreateOperation<atb::infer::SelfAttentionParam>``, mangled; else an empty string."""
    found = re.search(r"CreateOperationINS_5infer\d+(\w+?)ParamE", mangled)
    return found.group(1) if found else ""


def generate_assembly(plan: SymbolPlan) -> str:
    """The operators' entry points: jumps that leave the caller's arguments where they are."""
    first, second = operator_names(plan)
    lines = [
        "/* Generated from the engine's binaries. Do not edit. */",
        "#if defined(__aarch64__)",
        "#define OBJECT %function",
        "#define PLAN(index) mov w16, #index; b memprof_sim_aclnn_entry",
        "#define RUN b memprof_sim_aclnn_run",
        "#else",
        "#define OBJECT @function",
        "#define PLAN(index) movl $index, %eax; jmp memprof_sim_aclnn_entry",
        "#define RUN jmp memprof_sim_aclnn_run",
        "#endif",
        ".text",
        ".hidden memprof_sim_aclnn_entry",
        ".hidden memprof_sim_aclnn_run",
    ]
    for index, name in enumerate(first):
        lines.append(f".globl {name}; .type {name}, OBJECT\n{name}: PLAN({index})")
    for name in second:
        lines.append(f".globl {name}; .type {name}, OBJECT\n{name}: RUN")
    lines.append('#if defined(__linux__)\n.section .note.GNU-stack,"",%progbits\n#endif')
    return "\n".join(lines) + "\n"
