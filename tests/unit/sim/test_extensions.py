"""An extension module compiled from a source distribution, with a real compiler."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from vllm_memprof.errors import SetupError
from vllm_memprof.sim import extensions
from vllm_memprof.sim.build import find_compiler
from vllm_memprof.sim.extensions import Target, build_extension, fingerprint, target_of
from vllm_memprof.sim.stacks import Extension, load_stack

SOURCE = """
#include <Python.h>
#include "answer.h"
extern "C" int from_the_device();  // defined by nothing that is linked
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "binding", nullptr, -1, nullptr};
  PyObject *module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", ANSWER + MORE);
  return module;
}
"""
BINDING = Extension("pkg.binding", ("csrc/binding.cpp",), ("csrc/include",), ("MORE=2",))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source/csrc/include").mkdir(parents=True)
    (tmp_path / "source/csrc/binding.cpp").write_text(SOURCE)
    (tmp_path / "source/csrc/include/answer.h").write_text("#define ANSWER 40\n")
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(extensions, "_LINKED", {})  # there is no torch to link
    (tmp_path / "site/pkg").mkdir(parents=True)
    (tmp_path / "site/pkg/__init__.py").touch()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return Target(tmp_path / "site", Path(sysconfig.get_paths()["include"]), suffix)


def test_the_module_imports_from_its_package(source: Path, target: Target) -> None:
    other = target.file_of(BINDING).with_name("libother.so")
    other.write_text("")
    build_extension(BINDING, source, target, find_compiler())
    assert target.file_of(BINDING).is_file()
    assert other.is_file()  # the package's other libraries stay
    code = "import pkg.binding; print(pkg.binding.answer)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(target.site_packages)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "42\n", done.stderr


def test_finished_objects_are_kept(source: Path, target: Target) -> None:
    build_extension(BINDING, source, target, find_compiler())
    (built,) = (source / "objects").iterdir()
    number = built.stat().st_ino
    build_extension(BINDING, source, target, find_compiler())
    assert [path.stat().st_ino for path in (source / "objects").iterdir()] == [number]


def test_a_missing_file_is_named(source: Path, target: Target) -> None:
    wrong = dataclasses.replace(BINDING, sources=("csrc/other.cpp",))
    with pytest.raises(SetupError, match=r"has no csrc/other\.cpp"):
        build_extension(wrong, source, target, find_compiler())


def test_the_compilers_first_errors_are_shown(source: Path, target: Target) -> None:
    (source / "csrc/binding.cpp").write_text("int broken(;")
    with pytest.raises(SetupError, match=r"compiling binding.cpp failed[\s\S]*error"):
        build_extension(BINDING, source, target, find_compiler())
    assert not target.file_of(BINDING).exists()


def test_a_change_of_the_row_builds_it_again() -> None:
    other = dataclasses.replace(BINDING, defines=("MORE=3",))
    assert fingerprint(BINDING, "1", ["g++"]) != fingerprint(other, "1", ["g++"])
    assert fingerprint(BINDING, "1", ["g++"]) != fingerprint(BINDING, "2", ["g++"])


def test_an_interpreter_tells_where_its_packages_are() -> None:
    found = target_of(Path(sys.executable))
    assert found.site_packages == Path(sysconfig.get_paths()["purelib"])
    with pytest.raises(SetupError, match="cannot run"):
        target_of(Path("/nowhere/python"))


def test_the_newest_stack_compiles_the_operators_of_its_release() -> None:
    builds = {build.name: build for build in load_stack("vllm-ascend-0.30.0rc2").builds}
    extension = builds["vllm-ascend"].extension
    assert extension is not None
    assert extension.module == "vllm_ascend.vllm_ascend_C"
    assert len(extension.sources) == 5
