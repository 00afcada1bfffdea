"""The lock of a stack from pip's answers, and where each failure of a new stack goes."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts import add_stack
from vllm_memprof.sim.stacks import load_stack, parse_lock


def row(name: str, version: str, *asked: str, url: str = "x.whl") -> dict[str, Any]:
    return {
        "name": name,
        "version": version,
        "requires_dist": list(asked),
        "url": url,
        "sha256": "ab",
    }


ROOTS = {
    "torch": row("torch", "2.10.0+cpu", "filelock", "sympy", "triton; sys_platform == 'x'"),
    "torch-npu": row("torch_npu", "2.10.0.post4", "torch==2.10.0+cpu"),
    "torchvision": row("torchvision", "0.25.0"),
    "torchaudio": row("torchaudio", "2.10.0"),
    "vllm": row("vllm", "0.26.0", url="x.tar.gz"),
    "vllm-ascend": row("vllm_ascend", "0.26.0rc1"),
}  # fmt: skip
NAMES = ("setuptools", "wheel", "packaging", "setuptools-scm", "numpy", "filelock",
         "mpmath", "pillow", "PyYAML", "decorator", "scipy", "attrs", "psutil",
         "regex")  # fmt: skip
OTHERS = {name.lower(): row(name, "1.0") for name in NAMES}
OTHERS |= {
    "sympy": row("sympy", "1.0", "mpmath", "gmpy2; extra == 'gmpy'"),
    "setuptools-rust": row("setuptools-rust", "1.0", "semantic-version"),
    "semantic-version": row("semantic-version", "1.0"),
}


def test_every_package_is_in_one_chunk_and_what_torch_needs_beside_it() -> None:
    chunks = {
        chunk.title: dict(chunk.pins) for chunk in parse_lock(add_stack.lock_text(ROOTS, OTHERS))
    }
    assert [*chunks] == [
        "build tools", "torch", "torch_npu and vllm-ascend", "libraries of the engine, part 1 of 4",
    ]  # fmt: skip
    assert {"setuptools-rust", "semantic-version"} <= chunks["build tools"].keys()
    assert {*chunks["torch"]} == {"torch", "filelock", "mpmath", "numpy", "sympy"}
    assert {"vllm-ascend", "scipy"} <= chunks["torch_npu and vllm-ascend"].keys()
    pinned = [name for pins in chunks.values() for name in pins]
    assert sorted(pinned) == sorted({*OTHERS, *ROOTS} - {"vllm"})


def test_a_release_without_a_wheel_is_built() -> None:
    built = ROOTS | {"vllm-ascend": row("vllm_ascend", "0.30.0", url="x.tar.gz")}
    assert "vllm_ascend" not in add_stack.lock_text(built, OTHERS)


def test_the_other_file_is_that_of_a_stack_like_it() -> None:
    like = load_stack("vllm-ascend-0.23.0")
    text = add_stack.toml_text(like, "vllm-ascend-0.26.0rc1", "0.26.0rc1", ROOTS)
    assert "0.23.0" not in text
    assert 'engine_version = "0.26.0rc1"' in text
    assert 'requirement = "vllm==0.26.0 --hash=sha256:ab"' in text
    source = load_stack("vllm-ascend-0.30.0rc2")
    text = add_stack.toml_text(source, "vllm-ascend-0.26.0rc1", "0.26.0rc1", ROOTS)
    assert 'requirement = "vllm_ascend==0.26.0rc1 --hash=sha256:ab"' in text


def test_a_stub_is_a_wheel(tmp_path: Path) -> None:
    add_stack.write_stub(tmp_path, "triton-ascend", "3.2.2")
    (wheel,) = tmp_path.iterdir()
    assert wheel.name == "triton_ascend-3.2.2-py3-none-any.whl"
    metadata = zipfile.ZipFile(wheel).read("triton_ascend-3.2.2.dist-info/METADATA").decode()
    assert "Name: triton-ascend\nVersion: 3.2.2\n" in metadata


@pytest.mark.parametrize("name", ["triton", "nvidia-cudnn-cu13", "cuda-bindings", "pandas-stubs"])
def test_left_out(name: str) -> None:
    assert add_stack.LEFT_OUT.fullmatch(name)
    assert not add_stack.LEFT_OUT.fullmatch(f"my{name}2")


def test_what_two_locks_do_not_share() -> None:
    assert [
        line.split() for line in add_stack.differences("a==1\nB_c==2\n", "a==1\nb-c==3\nd==1")
    ] == [
        ["b-c", "2", "3"],
        ["d", "-", "1"],
    ]


def test_each_failure_names_its_file() -> None:
    budget = {"equation": "E4", "residual_bytes": 7, "audit": [
        {"name": "weights", "difference_bytes": 9, "agrees": False},
        {"name": "requested", "difference_bytes": 0, "agrees": True},
    ]}  # fmt: skip
    report = {
        "not_measured": [{"phase": "graph_capture", "reason": "eager mode"},
                         {"phase": "mm_profile", "reason": "its hook was not called"}],
        "ranks": [{"label": "TP0", "budget": budget}, {"label": "TP1", "budget": None}],
    }  # fmt: skip
    events = [
        {"kind": "hook", "need": "required", "state": "missing", "hook": "w.profile_run"},
        {"kind": "hook", "need": "required", "state": "bound", "hook": "w.weight_load"},
        {"kind": "hook", "need": "optional", "state": "missing", "hook": "r.mm_batch"},
    ]
    log = "[memprof simulated device] aclrtNew is not implemented: the call fails (pid 1)\n" * 2
    found = add_stack.problems_of(report, events, log)
    assert [(line, add_stack.place_of(line).split("/")[-1]) for line in found] == [
        ("not measured: mm_profile: its hook was not called", "names.json"),
        ("residual: 7 bytes (TP0)", "equations.toml"),
        ("cross-check: weights 9 bytes (TP0)", "equations.toml"),
        ("equation: none for this release (TP1)", "equations.toml"),
        ("hook w.profile_run: missing", "hooks.json"),
        ("aclrtNew is not implemented: the call fails", "0002-unimplemented-calls-fail.md"),
    ]


def test_hashes_take_the_place_of_those_that_a_lock_has() -> None:
    text = "# chunk: a\nB_c==2 \\\n    --hash=sha256:old \\\n    --hash=sha256:older\nd==1\n"
    hashes = {("b-c", "2"): ["x86", "arm"], ("d", "1"): ["pure"]}
    assert add_stack.with_hashes(text, hashes) == (
        "# chunk: a\nB_c==2 \\\n    --hash=sha256:x86 \\\n    --hash=sha256:arm\n"
        "d==1 \\\n    --hash=sha256:pure\n"
    )


def test_two_versions_are_asked_for_one_after_the_other(monkeypatch) -> None:
    calls = []

    def ask(like, asked, *options, **env):
        machine = "aarch64" if any("aarch64" in option for option in options) else "x86_64"
        calls.append((machine, list(asked)))
        pins = [line.split("==") for line in asked]
        return {
            name: row(name, at) | {"sha256": f"{name}{at}{machine * (name == 'a')}"}
            for name, at in pins
        }

    monkeypatch.setattr(add_stack, "ask_pip", ask)
    assert add_stack.hashes_of([("a", "1"), ("b", "1"), ("a", "2")]) == {
        ("a", "1"): ["a1x86_64", "a1aarch64"],
        ("a", "2"): ["a2x86_64", "a2aarch64"],
        ("b", "1"): ["b1"],
    }
    assert [sorted(asked) for machine, asked in calls if machine == "x86_64"] == [
        ["a==1", "b==1"],
        ["a==2"],
    ]


def test_a_source_distribution_keeps_no_old_hash() -> None:
    text = 'requirement = "vllm==0.13.0 --hash=sha256:00"\nrequirement = "vllm_ascend==0.1"\n'
    assert add_stack.with_source_hash(text, "vllm", row("vllm", "2")).splitlines() == [
        'requirement = "vllm==2 --hash=sha256:ab"',
        'requirement = "vllm_ascend==0.1"',
    ]
