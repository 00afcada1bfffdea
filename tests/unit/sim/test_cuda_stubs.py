"""Stand-ins for libraries that are not there: found in real binaries, compiled, loaded, failing by
name."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys

import pytest

from vllm_memprof.errors import SetupError
from vllm_memprof.sim import cuda_stubs

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


def test_what_the_binaries_want_is_read_from_them(site_packages):
    wanted = cuda_stubs.find_wanted(site_packages)
    assert wanted.libraries == {"libfancy.so.12", "libplain.so.2"}
    assert wanted.versioned == {
        ("libfancy.so.12", "libfancy.so.12"): {"fancyMalloc", "__cudaRegister"}
    }
    assert wanted.unversioned == {"plainInit"}
    assert cuda_stubs.find_wanted(site_packages, ["libfancy.so.12"]).libraries == {"libplain.so.2"}


def test_a_file_that_only_looks_like_a_library_is_passed_over(site_packages):
    (site_packages / "torch/lib/libtorch_x.so.txt").write_text("notes")
    assert cuda_stubs.find_wanted(site_packages).libraries == {"libfancy.so.12", "libplain.so.2"}


def test_stand_ins_load_and_fail_by_name(site_packages, tmp_path, capfd):
    out = tmp_path / "out"
    built = cuda_stubs.build_left_out(site_packages, out, "gcc")
    assert sorted(path.name for path in built) == ["libfancy.so.12", "libplain.so.2"]
    assert sorted(path.name for path in out.iterdir()) == ["libfancy.so.12", "libplain.so.2"]
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


TEXT_FUNCTIONS = [
    "cudaGetErrorString",
    "cudaGetErrorName",
    "cublasGetStatusString",
    "ncclGetLastError",
]


def test_messages_of_errors_are_text(tmp_path):
    """The result is read as a string: a code in its place is an address that nobody mapped."""
    codes = ["cudaGetLastError", "cuGetErrorString", "cudaMalloc"]
    source, library = tmp_path / "texts.c", tmp_path / "libtexts.so"
    source.write_text(cuda_stubs.stand_in_source([*TEXT_FUNCTIONS, *codes]))
    options = ["-shared", "-fPIC", "-fno-builtin", "-w"]
    subprocess.run(["gcc", *options, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    for name in TEXT_FUNCTIONS:
        function = getattr(loaded, name)
        function.restype = ctypes.c_char_p
        assert b"no CUDA here" in function(100)
    assert [getattr(loaded, name)() for name in codes] == [cuda_stubs.NO_DEVICE] * 3


def test_nothing_is_built_where_nothing_is_missing(tmp_path):
    libs = tmp_path / "site" / "torch" / "lib"
    libs.mkdir(parents=True)
    compile_library(libs / "libcpu.so", "int f(void){return 1;}")
    assert cuda_stubs.build_left_out(tmp_path / "site", tmp_path / "out", "gcc") == []
    assert ctypes.CDLL(str(libs / "libcpu.so")).f() == 1


def test_a_compiler_that_fails_is_named(site_packages, tmp_path):
    with pytest.raises(SetupError, match=r"stand-in for libfancy\.so\.12"):
        cuda_stubs.build_left_out(site_packages, tmp_path / "out", "false")
