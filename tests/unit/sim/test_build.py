"""What the builder says when it cannot build."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from vllm_memprof.errors import SetupError
from vllm_memprof.sim import build


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SetupError, match="no C\\+\\+ compiler") as caught:
        build.find_compiler()
    assert "apt install g++" in str(caught.value.hint)


def test_cxx_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -O0")
    assert build.find_compiler() == [sys.executable, "-O0"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SetupError, match="'no-such-compiler' was not found"):
        build.find_compiler()


def test_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: ["g++"])
    with pytest.raises(SetupError, match="no engine library below"):
        build.build_shim(tmp_path / "site", tmp_path / "out", print)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to fail with")
def test_a_failed_compilation_shows_the_first_errors(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int ok;\nint broken( { return 0; }\n")
    with pytest.raises(SetupError, match=r"compiling broken.cpp failed[\s\S]*broken.cpp:2:"):
        build.compile_objects(["g++"], [source], tmp_path / "objects", "")
    assert not list((tmp_path / "objects").glob("*.o"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_an_object_is_compiled_once_for_what_it_is_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = tmp_path / "one.cpp", tmp_path / "objects"
    source.write_text("int one() { return 1; }\n")
    ran = []
    run = build.run_compiler
    monkeypatch.setattr(
        build, "run_compiler", lambda command, what: (ran.append(what), run(command, what))
    )
    first = build.compile_objects(["g++", "-I/first"], [source], folder, "headers")
    assert build.compile_objects(["g++", "-I/second"], [source], folder, "headers") == first
    assert ran == ["compiling one.cpp"]
    assert build.compile_objects(["g++"], [source], folder, "newer headers") != first
    source.write_text("int one() { return 2; }\n")
    build.compile_objects(["g++"], [source], folder, "headers")
    assert len(ran) == len(list(folder.iterdir())) == 3


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_library_answers_under_the_wanted_names_alone(tmp_path: Path) -> None:
    source, library = tmp_path / "one.cpp", tmp_path / "out" / "libone.so"
    source.write_text('extern "C" int one() { return 1; }\n')
    library.parent.mkdir()
    for name, target in {"libold.so": "libone.so", "libforeign.so": "libthere.so"}.items():
        (library.parent / name).symlink_to(target)
    (library.parent / "libfile.so.2").write_text("of an earlier setup")
    (library.parent / "libother.so").write_text("somebody else's")
    command = ["g++", "-shared", "-fPIC", str(source)]
    assert build.link_library(command, library, ["libfile.so.2", "libone.so"]) == library
    there = {path.name: path.resolve().name for path in library.parent.iterdir()}
    assert there == {
        "libone.so": "libone.so",
        "libfile.so.2": "libone.so",
        "libforeign.so": "libthere.so",
        "libother.so": "libother.so",
    }
    first = library.stat().st_ino
    build.link_library(command, library)
    assert library.stat().st_ino == first  # a process may be loading it
    source.write_text('extern "C" int two() { return 2; }\n')
    build.link_library(command, library)
    assert library.stat().st_ino != first
    assert sorted(path.name for path in library.parent.iterdir()) == [
        "libforeign.so",
        "libone.so",
        "libother.so",
    ]
