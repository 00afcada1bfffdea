"""Reading ELF files, deciding the state of names, completing them to bodies."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_memprof.errors import SetupError
from vllm_memprof.sim import symbols
from vllm_memprof.sim.build import find_compiler
from vllm_memprof.sim.elf import read_binary
from vllm_memprof.sim.symbols import NATIVE_DIR, load_rules, make_rows

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
    library = read_binary(engine / "torch_npu/lib/libtorch_npu.so")
    assert "run" in library.defined
    assert not library.defined & {"aclrtMalloc", "hidden_thing"}
    assert library.needed >= {"libtorch_cpu.so", "libascendcl.so"}
    assert library.undefined["aclrtMalloc"] == ("", "")  # no version: any library may have it
    soname, version = library.undefined["puts"]
    assert soname.startswith("libc.so")
    assert version.startswith("GLIBC_")
    assert not library.undefined.keys() & {"weak_thing", "run"}


@needs_compiler
def test_an_object_file_exports_what_it_does_not_hide(engine: Path) -> None:
    subprocess.run(["cc", "-c", "engine.c", "-o", "engine.o"], check=True, cwd=engine)
    defined = read_binary(engine / "engine.o", "--syms").defined
    assert {"asked", "run"} <= defined
    assert "hidden_thing" not in defined


@needs_compiler
def test_demand_is_what_nobody_else_provides(engine: Path) -> None:
    demand = symbols.collect_demand(engine, find_compiler()[0])
    assert demand.linked == {"aclrtMalloc"}
    assert demand.looked_up == {"aclnnAddGetWorkspaceSize", "aclrtNotInThisOne", "PTAGetExecCache"}
    assert demand.sonames == {"libascendcl.so", *load_rules("symbols")[0]["opened"]}


def test_no_engine_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no engine library"):
        symbols.collect_demand(tmp_path, "cc")


@needs_compiler
def test_not_an_elf_file(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("not a library, but long enough")
    with pytest.raises(SetupError, match=r"text\.so cannot be read: readelf: Error"):
        read_binary(path)


def rows(linked: list[str], looked_up: list[str], implemented: set[str]) -> list[str]:
    _, rules = load_rules("symbols")
    names = [*linked, *looked_up]
    return make_rows(names, rules, linked, implemented, null_on_failure={"aclCreateSomething"})


def test_states() -> None:
    made = rows(
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
    assert made == [
        "NOOP(MsprofReportApi)",
        "ABSENT(PTAGetExecCache)",
        "FAILING(PTALinked)",  # a linked name cannot be absent
        'ATB(_ZN3atb13CreateContextEPPNS_7ContextE, memprof_sim_atb_create_context, "")',
        "FAILING_NULL(aclCreateSomething)",  # it returns a pointer
        "OPERATOR(aclnnAddGetWorkspaceSize, Add, 0)",
        "NOOP(aclnnInit)",
        "FAILING(aclnnNoStage)",
        "IMPLEMENTED(aclrtMalloc)",
        "FAILING(aclrtUnheardOf)",
        "RUN(aclnnAdd)",
    ]


def test_an_operation_of_atb_says_of_which_parameters_it_is() -> None:
    name = "_ZN3atb15CreateOperationINS_5infer18SelfAttentionParamEEEvv"
    target = "memprof_sim_atb_create_operation"
    assert rows([name], [], set()) == [f'ATB({name}, {target}, "SelfAttention")']


def test_operators_of_atb_keep_their_prefix_and_run_as_its_own() -> None:
    assert rows([], ["AtbMLAGetWorkspaceSize", "AtbMLA", "aclnnMLAGetWorkspaceSize"], set()) == [
        "OPERATOR(AtbMLAGetWorkspaceSize, AtbMLA, 0)",
        "OPERATOR(aclnnMLAGetWorkspaceSize, MLA, 1)",
        "RUN_ATB(AtbMLA)",
        "RUN(aclnnMLA)",
    ]


def test_operators_come_in_two_stages() -> None:
    asked = ["aclnnFooGetWorkspaceSize", "aclnnBarGetMaxWorkspaceSize", "aclnnFoo"]
    made = [
        "OPERATOR(aclnnBarGetMaxWorkspaceSize, Bar, 0)",
        "OPERATOR(aclnnFooGetWorkspaceSize, Foo, 1)",
        "RUN(aclnnBar)",
        "RUN(aclnnFoo)",
    ]
    assert rows([], asked, set()) == made
    assert rows([], [*asked, "aclnnBar"], set()) == made
    assert "RUN(aclnnFoo)" not in rows([], asked, {"aclnnFoo"})


@needs_compiler
def test_bodies_name_themselves_and_operators_their_index(tmp_path: Path) -> None:
    """The rows, completed by ``native/generated`` and called."""
    made = rows(
        ["aclrtUnheardOf", "aclCreateSomething", "MsprofReportApi"],
        ["PTAGetExecCache", "aclnnFooGetWorkspaceSize", "aclnnBarGetWorkspaceSize"],
        set(),
    )
    (tmp_path / "names.inc").write_text("\n".join(made))
    (tmp_path / "main.cpp").write_text(
        """
        #include <cstdio>
        extern const char *const memprof_sim_aclnn_names[];
        extern "C" {
        int memprof_sim_unimplemented(const char *name) { std::printf("%s ", name); return 7; }
        int aclrtUnheardOf();
        void *aclCreateSomething();
        int MsprofReportApi();
        void aclnnFooGetWorkspaceSize();
        void aclnnBar();
        int PTAGetExecCache() __attribute__((weak));
        }
        extern "C" __attribute__((visibility("hidden"))) void memprof_sim_atb_run() {}
        extern "C" __attribute__((visibility("hidden"))) void memprof_sim_aclnn_run() {
          std::printf("run ");
        }
        extern "C" __attribute__((visibility("hidden"))) void memprof_sim_aclnn_entry() {
        #if defined(__x86_64__)
          unsigned index;
          asm volatile("" : "=a"(index));
          std::printf("%s ", memprof_sim_aclnn_names[index]);
        #endif
        }
        int main() {
          std::printf("%d ", aclrtUnheardOf());
          std::printf("%d ", aclCreateSomething() == nullptr);
          std::printf("%d %d ", MsprofReportApi(), PTAGetExecCache == nullptr);
          aclnnBar();
          aclnnFooGetWorkspaceSize();
        }
        """
    )
    generated = [str(path) for path in (NATIVE_DIR / "generated").iterdir()]
    command = [*find_compiler(), "-O1", f"-I{tmp_path}", str(tmp_path / "main.cpp"), *generated]
    subprocess.run([*command, "-o", str(tmp_path / "main")], check=True)
    done = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, check=True)
    assert done.stdout == "aclrtUnheardOf 7 aclCreateSomething 1 0 1 run Foo "


@pytest.mark.parametrize("name", ["symbols", "left_out"])
def test_every_rule_has_a_state_that_native_knows_and_a_reason(name: str) -> None:
    source = {"symbols": "generated/names.cpp", "left_out": "left_out.c"}[name]
    known = re.findall(r"#define ([A-Z_]+)\(name", (NATIVE_DIR / source).read_text())
    for rule in load_rules(name)[1]:
        assert rule.state.upper() in known
        assert rule.reason or rule.state == "atb"
        assert bool(rule.target) == (rule.state == "atb")
