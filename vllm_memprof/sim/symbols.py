"""The names that an engine can ask the simulated device for, and the state of each.

In: the engine's installed binaries, the rules in ``native/symbols.toml``, the names that the shim's
objects define. Out: a `SymbolPlan`, and the C++ and assembly that complete the shim. Runs in the
launcher's process, while building.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_memprof.errors import SetupError
from vllm_memprof.sim.elf import INTERPRETER, SYMTAB, ElfFile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RULES_FILE = Path(__file__).parent / "native" / "symbols.toml"
#: The first stage of an operator; its group is the operator's name.
_STAGE_ONE = re.compile(r"(?:aclnn(\w+?)|(Atb\w+?))Get(?:Max)?WorkspaceSize")


@dataclass(frozen=True)
class SymbolRule:
    """One row of ``symbols.toml``."""

    pattern: re.Pattern[str]
    state: str  # operator | atb | noop | absent
    reason: str
    target: str = ""


@dataclass(frozen=True)
class Rules:
    """The content of ``symbols.toml``, which explains its keys."""

    libraries: list[str]
    operator_libraries: list[str]
    providers: list[str]
    lookup: re.Pattern[bytes]
    opened: list[str]
    rules: list[SymbolRule]

    def match(self, name: str) -> SymbolRule | None:
        """Return the first rule for a name."""
        return next((rule for rule in self.rules if rule.pattern.fullmatch(name)), None)


@dataclass(frozen=True)
class Demand:
    """The names and libraries that the engine's binaries ask for."""

    linked: dict[str, str]  # undefined symbol -> first library that links it
    looked_up: dict[str, str]  # string of a name family -> first library that holds it
    sonames: list[str]  # libraries the shim must answer for
    machine: int  # ELF machine of the engine's binaries


@dataclass(frozen=True)
class Symbol:
    """One name the engine can ask for."""

    name: str
    state: str  # implemented | operator | atb | noop | absent | failing
    reason: str
    asked_by: str
    linked: bool  # a missing linked name would keep the library from loading
    target: str = ""


@dataclass(frozen=True)
class SymbolPlan:
    """Every name with its state, and the libraries that the shim answers for."""

    symbols: list[Symbol]
    sonames: list[str]
    pointer_results: frozenset[str] = frozenset()  # functions whose failure is a null pointer

    def by_state(self, state: str) -> list[Symbol]:
        """Return the names of one state."""
        return [symbol for symbol in self.symbols if symbol.state == state]

    def to_json(self) -> dict[str, object]:
        """Return the content of ``symbols.json``."""
        columns = ["name", "state", "reason", "asked_by", "linked"]
        rows = [[getattr(symbol, column) for column in columns] for symbol in self.symbols]
        return {
            "columns": columns,
            "symbols": rows,
            "null_on_failure": sorted(
                symbol.name
                for symbol in self.by_state("failing")
                if symbol.name in self.pointer_results
            ),
            "sonames": self.sonames,
        }


def load_rules(path: Path = RULES_FILE) -> Rules:
    """Read the rules."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    engine = table["engine"]
    rules = [
        SymbolRule(re.compile(row["pattern"]), row["state"], row["reason"], row.get("target", ""))
        for row in table["rule"]
    ]
    lookup = re.compile(rb"(?<=\0)(?:" + "|".join(engine["lookup"]).encode() + rb")(?=\0)")
    return Rules(**{**engine, "lookup": lookup}, rules=rules)


def engine_libraries(site_packages: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files below site-packages that match one of the globs."""
    return sorted(
        {path for pattern in patterns for path in site_packages.glob(pattern) if path.is_file()}
    )


def collect_demand(site_packages: Path, rules: Rules, compiler: str) -> Demand:
    """Read the engine's binaries.

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
    provider_files = engine_libraries(site_packages, rules.providers)
    needed = {soname for library in libraries for soname in library.needed()}
    needed -= {path.name for path in provider_files}
    system = {soname: _system_library(compiler, soname) for soname in sorted(needed)}
    provided = {
        name
        for path in [*provider_files, *filter(None, system.values())]
        for name, defined, _, hidden in ElfFile(path).symbols()
        if defined and not hidden
    }
    linked: dict[str, str] = {}
    looked_up: dict[str, str] = {}
    for library in libraries:
        for name, defined, weak, _ in library.symbols():
            if not defined and not weak and name not in provided and not INTERPRETER.match(name):
                linked.setdefault(name, library.path.name)
        for match in rules.lookup.findall(library.read_only_data()):
            looked_up.setdefault(match.decode(), library.path.name)
    for path in engine_libraries(site_packages, rules.operator_libraries):
        for name, defined, _, _ in ElfFile(path).symbols():
            if defined and name.startswith("aclnn"):
                looked_up.setdefault(name, path.name)
    sonames = [soname for soname, path in system.items() if path is None]
    return Demand(linked, looked_up, sorted({*sonames, *rules.opened}), libraries[0].machine)


def _system_library(compiler: str, soname: str) -> Path | None:
    if soname.startswith("ld-linux"):
        return next(iter(sorted(Path("/").glob(f"lib*/{soname}"))), None)
    found = subprocess.run(
        [compiler, f"-print-file-name={soname}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return Path(found) if found != soname and Path(found).is_file() else None


def defined_symbols(objects: Iterable[Path]) -> set[str]:
    """Return the names that compiled objects export."""
    return {
        name
        for path in objects
        for name, defined, _, hidden in ElfFile(path).symbols(SYMTAB)
        if defined and not hidden
    }


def pointer_functions(include_dirs: Iterable[Path]) -> frozenset[str]:
    """Return the functions that headers declare to return a pointer: their failure is null."""
    return frozenset(
        name
        for directory in include_dirs
        for header in directory.rglob("*.h")
        for name in re.findall(
            r"\*\s*((?:acl|Hccl)\w+)\s*\(", header.read_text("utf-8", errors="replace")
        )
    )


def make_plan(
    demand: Demand, rules: Rules, implemented: set[str], pointer_results: frozenset[str]
) -> SymbolPlan:
    """Decide the state of every name."""
    symbols = []
    names = {*demand.linked, *demand.looked_up}
    for name in sorted(names):
        linked = name in demand.linked
        asked_by = demand.linked.get(name) or demand.looked_up[name]
        rule = rules.match(name)
        # A stage of an operator: a first one, or the second of a first that is asked for too.
        is_stage = _STAGE_ONE.fullmatch(name) or f"{name}GetWorkspaceSize" in names
        state, reason, target = "failing", "", ""
        if name in implemented:
            state = "implemented"
        elif rule is not None and rule.state == "operator" and not is_stage:
            reason = "not a stage of an operator"
        elif rule is not None and rule.state == "absent" and linked:
            reason = "linked, so it cannot be absent"
        elif rule is not None:
            state, reason, target = rule.state, rule.reason, rule.target
        symbols.append(Symbol(name, state, reason, asked_by, linked, target))
    return SymbolPlan(symbols, demand.sonames, pointer_results)


def operator_names(plan: SymbolPlan) -> tuple[dict[str, str], list[str]]:
    """Return the operators' first and second stages, a second one for every first.

    Those of ATB keep their prefix in the operator's name: ``AtbMLA`` beside ``aclnnMLA``.
    """
    names = {symbol.name for symbol in plan.by_state("operator")}
    first = {
        name: match[1] or match[2]
        for name in sorted(names)
        if (match := _STAGE_ONE.fullmatch(name))
    }
    second = (names - set(first)) | {
        name[: name.index(operator)] + operator for name, operator in first.items()
    }
    return first, sorted(second - {symbol.name for symbol in plan.by_state("implemented")})


def generate_cpp(plan: SymbolPlan) -> str:
    """Return bodies of the names that no file defines, except the operators' entry points."""
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
            f'API int noop{index}() __asm__("{symbol.name}");\n'
            f"API int noop{index}() {{ return 0; }}"
        )
    atb = plan.by_state("atb")
    targets = sorted({symbol.target for symbol in atb})
    lines += [f"SHIM uint64_t {target}(void *, void *, const char *);" for target in targets]
    for index, symbol in enumerate(atb):
        # SelfAttention of atb::CreateOperation<atb::infer::SelfAttentionParam>, mangled
        found = re.search(r"CreateOperationINS_5infer\d+(\w+?)ParamE", symbol.name)
        family = found.group(1) if found else ""
        lines.append(
            f'API uint64_t atb{index}(void *, void *) __asm__("{symbol.name}");\n'
            f"API uint64_t atb{index}(void *first, void *second) "
            f'{{ return {symbol.target}(first, second, "{family}"); }}'
        )
    first, _ = operator_names(plan)
    lines.append("SHIM const char *const memprof_sim_aclnn_names[] = {")
    lines += [f'  "{operator}",' for operator in first.values()]
    lines.append("  nullptr};")
    return "\n".join(lines) + "\n"


def generate_assembly(plan: SymbolPlan) -> str:
    """Return the operators' entry points: jumps that keep the caller's arguments in place."""
    first, second = operator_names(plan)
    lines = [
        "/* Generated from the engine's binaries. Do not edit. */",
        "#if defined(__aarch64__)",
        "#define OBJECT %function",
        "#define PLAN(index) mov w16, #index; b memprof_sim_aclnn_entry",
        "#define RUN b memprof_sim_aclnn_run",
        "#define RUN_ATB b memprof_sim_atb_run",
        "#else",
        "#define OBJECT @function",
        "#define PLAN(index) movl $index, %eax; jmp memprof_sim_aclnn_entry",
        "#define RUN jmp memprof_sim_aclnn_run",
        "#define RUN_ATB jmp memprof_sim_atb_run",
        "#endif",
        ".text",
        ".hidden memprof_sim_aclnn_entry",
        ".hidden memprof_sim_aclnn_run",
        ".hidden memprof_sim_atb_run",
    ]
    for index, name in enumerate(first):
        lines.append(f".globl {name}; .type {name}, OBJECT\n{name}: PLAN({index})")
    for name in second:
        run = "RUN_ATB" if name.startswith("Atb") else "RUN"
        lines.append(f".globl {name}; .type {name}, OBJECT\n{name}: {run}")
    lines.append('#if defined(__linux__)\n.section .note.GNU-stack,"",%progbits\n#endif')
    return "\n".join(lines) + "\n"
