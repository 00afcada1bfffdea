"""The sources of the shim: they depend on each other one way, and objects have owners."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

from vllm_memprof.sim import build
from vllm_memprof.sim.build import NATIVE_DIR, native_sources
from vllm_memprof.sim.runtime import fingerprint
from vllm_memprof.sim.stacks import load_stack

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


def test_every_file_is_part_of_the_fingerprint(tmp_path: Path, monkeypatch) -> None:
    """Also one in a folder below, of every kind."""
    monkeypatch.setattr(build, "NATIVE_DIR", tmp_path)
    (tmp_path / "kernels").mkdir()
    stack = load_stack()
    states = {fingerprint(stack)}
    for name in ("kernels/one.cpp", "kernels/shared.h", "names.S", "left_out.c", "symbols.toml"):
        (tmp_path / name).write_text("")
        states.add(fingerprint(stack))
        (tmp_path / name).write_text("// more\n")
        states.add(fingerprint(stack))
    assert len(states) == 11
