"""The sources of the shim: they depend on each other one way, and objects have owners."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

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
