"""Reading ELF files, deciding the fate of names, generating their bodies."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_memprof.errors import SetupError
from vllm_memprof.sim import symbols
from vllm_memprof.sim.build import find_compiler
from vllm_memprof.sim.elf import ElfFile
from vllm_memprof.sim.symbols import Demand

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler to make an ELF file with"
)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """Site-packages with one library that links CANN, and one that provides a symbol."""
    for folder in ("torch_npu/lib", "torch/lib", "out"):
        (tmp_path / folder).mkdir(parents=True)
    source = tmp_path / "engine.c"
    source.write_text(
        """
        extern int aclrtMalloc(void), torch_thing(void), puts(const char *), PyErr_Print(void);
        extern int weak_thing(void) __attribute__((weak));
        const char *asked[] = {
          "aclnnAddGetWorkspaceSize", "aclrtNotInThisOne", "xx aclrtNoName", "PTAGetExecCache"};
        __attribute__((visibility("hidden"))) int hidden_thing(void) { return 0; }
        int run(int which) {
          puts(asked[which]);
          return aclrtMalloc() + torch_thing() + PyErr_Print() + (weak_thing ? weak_thing() : 0);
        }
        """
    )
    (tmp_path / "torch.c").write_text("int torch_thing(void) { return 0; }")
    (tmp_path / "cann.c").write_text("int aclrtMalloc(void) { return 0; }")

    def link(target: str, *arguments: str) -> None:
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", str(tmp_path / target), *arguments],
            check=True,
            cwd=tmp_path,
        )

    link("torch/lib/libtorch_cpu.so", "torch.c", "-Wl,-soname,libtorch_cpu.so")
    link("out/libascendcl.so", "cann.c", "-Wl,-soname,libascendcl.so")
    link(
        "torch_npu/lib/libtorch_npu.so",
        "engine.c",
        "-Ltorch/lib",
        "-Lout",
        "-ltorch_cpu",
        "-lascendcl",
    )
    return tmp_path


@needs_compiler
def test_elf_symbols_and_needed(engine: Path) -> None:
    library = ElfFile(engine / "torch_npu/lib/libtorch_npu.so")
    table = {name: defined for name, defined, _, _ in library.symbols()}
    assert table["run"] is True
    assert table["aclrtMalloc"] is False
    assert "hidden_thing" not in table
    assert library.needed()[:2] == ["libtorch_cpu.so", "libascendcl.so"]
    assert b"\0PTAGetExecCache\0" in library.read_only_data()
    wanted = {name: (library, version) for name, library, version in library.undefined()}
    assert wanted["aclrtMalloc"] == ("", "")  # no version: any library may have it
    soname, version = wanted["puts"]
    assert soname.startswith("libc.so")
    assert version.startswith("GLIBC_")
    assert "weak_thing" not in wanted
    assert "run" not in wanted


@needs_compiler
def test_demand_is_what_nobody_else_provides(engine: Path) -> None:
    demand = symbols.collect_demand(engine, symbols.load_rules(), find_compiler()[0])
    assert demand.linked == {"aclrtMalloc": "libtorch_npu.so"}
    assert set(demand.looked_up) == {
        "aclnnAddGetWorkspaceSize",
        "aclrtNotInThisOne",
        "PTAGetExecCache",
    }
    assert demand.sonames == sorted({"libascendcl.so", *symbols.load_rules().opened})


def test_no_engine_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no engine library"):
        symbols.collect_demand(tmp_path, symbols.load_rules(), "cc")


def test_not_an_elf_file(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("not a library, but long enough")
    with pytest.raises(SetupError, match="ELF"):
        ElfFile(path)


def plan(linked: list[str], looked_up: list[str], implemented: set[str]) -> symbols.SymbolPlan:
    demand = Demand(
        dict.fromkeys(linked, "a.so"), dict.fromkeys(looked_up, "b.so"), ["libascendcl.so"], 62
    )
    return symbols.make_plan(
        demand, symbols.load_rules(), implemented, frozenset({"aclCreateSomething"})
    )


def test_states() -> None:
    made = plan(
        linked=[
            "aclrtMalloc",
            "aclrtUnheardOf",
            "PTALinked",
            "_ZN3atb13CreateContextEPPNS_7ContextE",
            "MsprofReportApi",
        ],
        looked_up=[
            "aclnnAddGetWorkspaceSize",
            "aclnnAdd",
            "aclnnNoStage",
            "PTAGetExecCache",
            "aclnnInit",
            "aclCreateSomething",
        ],
        implemented={"aclrtMalloc"},
    )
    assert {symbol.name: symbol.state for symbol in made.symbols} == {
        "aclrtMalloc": "implemented",
        "aclrtUnheardOf": "failing",
        "PTALinked": "failing",  # a linked name cannot be absent
        "_ZN3atb13CreateContextEPPNS_7ContextE": "atb",
        "MsprofReportApi": "noop",
        "aclnnAddGetWorkspaceSize": "operator",
        "aclnnAdd": "operator",
        "aclnnNoStage": "failing",
        "PTAGetExecCache": "absent",
        "aclnnInit": "noop",
        "aclCreateSomething": "failing",
    }


def test_operators_of_atb_keep_their_prefix_and_run_as_its_own() -> None:
    made = plan([], ["AtbMLAGetWorkspaceSize", "AtbMLA", "aclnnMLAGetWorkspaceSize"], set())
    first, second = symbols.operator_names(made)
    assert first == {"AtbMLAGetWorkspaceSize": "AtbMLA", "aclnnMLAGetWorkspaceSize": "MLA"}
    assert second == ["AtbMLA", "aclnnMLA"]
    code = symbols.generate_assembly(made)
    assert "AtbMLA: RUN_ATB" in code
    assert "aclnnMLA: RUN\n" in code


def test_operators_come_in_two_stages() -> None:
    made = plan([], ["aclnnFooGetWorkspaceSize", "aclnnBarGetMaxWorkspaceSize", "aclnnFoo"], set())
    first, second = symbols.operator_names(made)
    assert list(first.items()) == [
        ("aclnnBarGetMaxWorkspaceSize", "Bar"),
        ("aclnnFooGetWorkspaceSize", "Foo"),
    ]
    assert second == ["aclnnBar", "aclnnFoo"]
    assert '"Bar",\n  "Foo",\n  nullptr' in symbols.generate_cpp(made)
    assert "aclnnFooGetWorkspaceSize: PLAN(1)" in symbols.generate_assembly(made)


def test_generated_bodies_name_themselves() -> None:
    text = symbols.generate_cpp(
        plan(["aclrtUnheardOf", "aclCreateSomething"], ["PTAGetExecCache"], set())
    )
    assert 'memprof_sim_unimplemented("aclrtUnheardOf")' in text
    assert "return nullptr" in text  # a function that returns a pointer fails with null
    assert "PTAGetExecCache" not in text


def test_every_rule_has_a_known_state_and_a_reason() -> None:
    for rule in symbols.load_rules().rules:
        assert rule.state in {"operator", "atb", "noop", "absent"}
        assert rule.reason or rule.state == "atb"
        assert bool(rule.target) == (rule.state == "atb")
