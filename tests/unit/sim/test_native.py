"""The sources of the shim: they depend on each other one way, and objects have owners."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from vllm_memprof.sim import build
from vllm_memprof.sim.build import NATIVE_DIR, native_sources

SOURCES = [path for path in native_sources() if path.suffix in (".cpp", ".h")]


def module_of(path: Path) -> str:
    """A header and its source are one module."""
    return str(path.relative_to(NATIVE_DIR).with_suffix(""))


def test_includes_exist_and_form_no_circle() -> None:
    needs: dict[str, set[str]] = {}
    for path in SOURCES:
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            header = NATIVE_DIR / name
            assert header.is_file(), f"{path.name} includes {name}"
            needs.setdefault(module_of(path), set()).add(module_of(header))
    for module, others in needs.items():
        others.discard(module)
    TopologicalSorter(needs).prepare()  # raises CycleError


def test_nothing_is_allocated_or_freed_by_hand() -> None:
    for path in SOURCES:
        code = re.sub(r"//.*|\"(?:[^\"\\\n]|\\.)*\"", "", path.read_text())
        found = re.findall(r"\b(?:new|delete|malloc|calloc)\b(?!:)", code)
        assert not found, f"{module_of(path)}: {found}; see ownership.h"


def test_every_file_is_part_of_the_fingerprint_and_of_the_object_keys(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "symbols.toml").write_text("")
    kernel, header = tmp_path / "kernels" / "one.cpp", tmp_path / "kernels" / "shared.h"
    kernel.write_text('#include "kernels/shared.h"\nint one() { return 1; }\n')
    header.write_text("")
    monkeypatch.setattr(build, "NATIVE_DIR", tmp_path)
    monkeypatch.setattr(build, "_SIM_DIR", Path("/"))
    site_packages = tmp_path / "site-packages"

    def state() -> str:
        return build._fingerprint(site_packages, ["g++"])

    work = tmp_path / "work"
    work.mkdir()
    flags = [f"-I{tmp_path}"]
    states, objects = {state()}, {build._compile(build.find_compiler(), flags, kernel, work)}
    for changed in (kernel, header):
        changed.write_text(changed.read_text() + "// more\n")
        states.add(state())
        objects.add(build._compile(build.find_compiler(), flags, kernel, work))
    assert len(states) == len(objects) == 3
    assert len(list(work.glob("*.o"))) == 1


def test_an_object_of_another_shim_is_linked_where_it_is_the_same(
    tmp_path: Path, monkeypatch
) -> None:
    kernel = tmp_path / "one.cpp"
    kernel.write_text("int one() { return 1; }\n")
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    compiler = build.find_compiler()
    made = build._compile(compiler, ["-I/first"], kernel, folders[0], "headers")
    commands = []
    monkeypatch.setattr(build, "run_compiler", lambda command, what: commands.append(command))
    linked = build._compile(compiler, ["-I/second"], kernel, folders[1], "headers", folders[:1])
    assert linked.samefile(made)
    assert commands == []
    with pytest.raises(FileNotFoundError):  # the compiler, which makes nothing here, is asked
        build._compile(compiler, ["-I/second"], kernel, folders[1], "newer", folders[:1])
    assert len(commands) == 1
