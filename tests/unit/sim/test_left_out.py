"""Stand-ins for libraries that are not there: found in real binaries, compiled, loaded, failing by
name."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys

import pytest

from vllm_memprof.errors import SetupError
from vllm_memprof.sim import build
from vllm_memprof.sim.build import NATIVE_DIR, build_left_out, load_rules, make_rows
from vllm_memprof.sim.elf import read_binary

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")


def compile_library(target, source, *options):
    text = target.with_suffix(".c")
    text.write_text(source)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-w", str(text), "-o", str(target), *options], check=True
    )


@pytest.fixture
def site_packages(tmp_path):
    """An environment whose torch links two libraries, one with symbol versions, that are then taken
    away."""
    gone = tmp_path / "gone"
    libs = tmp_path / "site" / "torch" / "lib"
    gone.mkdir()
    libs.mkdir(parents=True)
    (gone / "v.map").write_text("libfancy.so.12 { global: *; };\n")
    compile_library(
        gone / "libfancy.so.12",
        "int fancyMalloc(void){return 0;} int __cudaRegister(void){return 0;}",
        "-Wl,-soname,libfancy.so.12",
        f"-Wl,--version-script={gone / 'v.map'}",
    )
    compile_library(
        gone / "libplain.so.2", "int plainInit(void){return 0;}", "-Wl,-soname,libplain.so.2"
    )
    compile_library(
        libs / "libtorch_x.so",
        "int fancyMalloc(void); int plainInit(void); int __cudaRegister(void);"
        "int use_fancy(void){return fancyMalloc();} int use_plain(void){return plainInit();}"
        "int loaded; __attribute__((constructor)) "
        "static void at_load(void){loaded = __cudaRegister() + 1;}",
        str(gone / "libfancy.so.12"),
        str(gone / "libplain.so.2"),
    )
    shutil.rmtree(gone)
    return tmp_path / "site"


def test_what_the_binaries_want_is_read_from_them(site_packages, tmp_path):
    (site_packages / "torch/lib/libtorch_x.so.txt").write_text("notes")  # only looks like a library
    assert build_left_out(site_packages, tmp_path / "out") == {"libfancy.so.12", "libplain.so.2"}
    made = read_binary(tmp_path / "out" / "libleft_out.so").defined
    assert {"fancyMalloc", "__cudaRegister", "plainInit"} <= made
    assert "use_fancy" not in made
    rows = (tmp_path / "out" / "names.inc").read_text().splitlines()
    assert rows == ["NOOP(__cudaRegister)", "FAILING(fancyMalloc)", "FAILING(plainInit)"]


def test_a_library_that_is_there_gets_no_stand_in(site_packages, tmp_path):
    (site_packages / "nvidia").mkdir()
    (site_packages / "nvidia" / "libfancy.so.12").touch()
    assert build_left_out(site_packages, tmp_path) == {"libplain.so.2"}
    assert read_binary(tmp_path / "libleft_out.so").defined >= {"plainInit"}
    assert "fancyMalloc" not in (tmp_path / "names.inc").read_text()


def test_stand_ins_load_and_fail_by_name(site_packages, tmp_path, capfd):
    out = tmp_path / "out"
    build_left_out(site_packages, out)
    code = (
        "import ctypes, sys; x = ctypes.CDLL(sys.argv[1]);"
        "print(ctypes.c_int.in_dll(x, 'loaded').value, x.use_fancy(), x.use_plain())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(site_packages / "torch/lib/libtorch_x.so")],
        env={"LD_LIBRARY_PATH": str(out)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["1", "100", "100"], done.stderr
    assert "fancyMalloc: no CUDA here" in done.stderr
    assert "plainInit: no CUDA here" in done.stderr
    assert "__cudaRegister" not in done.stderr


def test_messages_of_errors_are_text(tmp_path):
    """The result is read as a string: a code in its place is an address that nobody mapped."""
    texts = ["cudaGetErrorString", "cudaGetErrorName", "cublasGetStatusString", "ncclGetLastError"]
    codes = ["cudaGetLastError", "cuGetErrorString", "cudaMalloc"]
    rows = make_rows([*texts, *codes], load_rules("left_out")[1])
    (tmp_path / "names.inc").write_text("\n".join(rows))
    library = tmp_path / "libtexts.so"
    options = ["-shared", "-fPIC", "-fno-builtin", "-w", f"-I{tmp_path}"]
    source = str(NATIVE_DIR / "left_out.c")
    subprocess.run(["gcc", *options, source, "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    for name in texts:
        function = getattr(loaded, name)
        function.restype = ctypes.c_char_p
        assert b"no CUDA here" in function(100)
    no_device = 100  # cudaErrorNoDevice
    assert [getattr(loaded, name)() for name in codes] == [no_device] * 3


def test_nothing_is_built_where_nothing_is_missing(tmp_path):
    libs = tmp_path / "site" / "torch" / "lib"
    libs.mkdir(parents=True)
    compile_library(libs / "libcpu.so", "int f(void){return 1;}")
    assert build_left_out(tmp_path / "site", tmp_path / "out") == set()
    assert not (tmp_path / "out").exists()


def test_a_compiler_that_fails_is_named(site_packages, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "find_compiler", lambda: ["false"])
    with pytest.raises(SetupError, match=r"linking libleft_out\.so failed \(false exited with 1"):
        build_left_out(site_packages, tmp_path / "out")
