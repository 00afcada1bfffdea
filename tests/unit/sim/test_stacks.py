"""Stack files and locks: every pin exact, nothing left out by accident, cache folders where the
user wants them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.stacks import version_of
from vllm_memprof.errors import UsageError
from vllm_memprof.sim import stacks
from vllm_memprof.sim.stacks import (
    EXTRAS_DIR,
    cache_dir,
    default_prefix,
    list_stacks,
    load_extra,
    load_stack,
    normalize,
    parse_lock,
)


def test_the_default_stack_is_one_of_the_list():
    assert load_stack().name in [stack.name for stack in list_stacks()]


def test_the_reference_stack_holds_what_the_release_names():
    stack = load_stack("vllm-ascend-0.23.0")
    expected = {
        "torch": "2.10.0",
        "torch_npu": "2.10.0.post4",
        "torchvision": "0.25.0",
        "torchaudio": "2.10.0",
        "vllm_ascend": "0.23.0",
        "vllm": "0.23.0",
        "transformers": "5.5.4",
    }
    assert {name: version_of(stack, name) for name in expected} == expected
    assert stack.builds[0].env["VLLM_TARGET_DEVICE"] == "empty"


def test_the_stack_of_sglang_holds_what_the_release_names_but_for_torch():
    """Requires-Dist of sglang 0.5.23; of torch it names 2.14.1, for which there is no torch_npu."""
    stack, other = load_stack("sglang-0.5.23"), load_stack("vllm-ascend-0.23.0")
    expected = {
        "sglang": "0.5.23",
        "transformers": "5.19.0",
        "tokenizers": "0.23.2",
        "openai": "2.8.0",
        "openai-harmony": "0.0.4",
        "xgrammar": "0.2.7",
        "compressed-tensors": "0.18.0",
        "sentencepiece": "0.2.1",
        "soundfile": "0.13.1",
    }
    assert {name: version_of(stack, name) for name in expected} == expected
    for name in ("vllm", "vllm-ascend", "triton", "flashinfer-python", "sglang-kernel", "numba"):
        assert version_of(stack, name) is None
    pins = {pin for chunk in stack.chunks for pin in chunk.pins}
    shared = pins & {pin for chunk in other.chunks for pin in chunk.pins}
    assert {name for name, _ in shared} >= {"torch", "torch-npu", "torchvision", "scipy"}
    assert len(pins - shared) < 20  # what it downloads beside the other
    assert (stack.engine, stack.engine_version) == ("sglang", "0.5.23")


@pytest.mark.parametrize(
    "name", ["triton", "triton-ascend", "cmake", "nvidia-cudnn-cu12", "sentry-sdk"]
)
def test_what_the_engine_does_not_need_is_left_out(name):
    assert version_of(load_stack(), name) is None


def test_build_requirements_come_before_the_build():
    first = {name for name, _ in load_stack().chunks[0].pins}
    assert {"setuptools", "setuptools-rust", "setuptools-scm", "wheel"} <= first


def test_unknown_stack_lists_the_known_ones():
    with pytest.raises(UsageError) as caught:
        load_stack("vllm-ascend-9")
    assert "vllm-ascend-0.23.0" in (caught.value.hint or "")


def test_a_path_is_not_a_stack_name():
    with pytest.raises(UsageError):
        load_stack("../stacks/vllm-ascend-0.23.0")


def test_lock_chunks():
    chunks = parse_lock(
        "# note\n# chunk: a\nTorch_NPU==2.1.post4\n\n# chunk: b\nx.y==1\n# chunk: empty\n"
    )
    assert [(chunk.title, chunk.pins) for chunk in chunks] == [
        ("a", (("torch-npu", "2.1.post4"),)),
        ("b", (("x-y", "1"),)),
    ]


@pytest.mark.parametrize(
    "line", ["torch>=2", "torch", "torch==2; python_version<'3.12'", "-r other.txt"]
)
def test_a_lock_holds_exact_pins_only(line):
    with pytest.raises(ValueError, match="not an exact pin"):
        parse_lock(line)


def test_a_package_is_pinned_once():
    with pytest.raises(ValueError, match="twice"):
        parse_lock("a_b==1\nA-B==1")


def test_normalize():
    assert normalize("Foo__Bar.baz-q") == "foo-bar-baz-q"


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.delenv("MEMPROF_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "memprof"
    assert default_prefix("s") == tmp_path / "memprof" / "stacks" / "s"
    monkeypatch.setenv(
        "XDG_CACHE_HOME", "relative"
    )  # the specification: relative paths are ignored
    assert cache_dir() == Path.home() / ".cache" / "memprof"
    monkeypatch.setenv("MEMPROF_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"


def test_every_stack_file_parses():
    assert len(list_stacks()) == len(list(stacks.STACKS_DIR.glob("*.toml")))


def test_every_file_that_a_setup_takes_has_its_hash():
    pin = re.compile(r"(\s+--hash=sha256:[0-9a-f]{64}){1,2}")
    extras = [chunk for path in EXTRAS_DIR.glob("*.lock") for chunk in load_extra(path.stem)]
    chunks = [*extras, *(chunk for stack in list_stacks() for chunk in stack.chunks)]
    assert all(pin.fullmatch(chunk.hashes[name]) for chunk in chunks for name, _ in chunk.pins)
    assert all(pin.fullmatch(build.hashes) for stack in list_stacks() for build in stack.builds)


def test_a_lock_has_hashes_on_lines_of_their_own():
    (chunk,) = parse_lock("a==1 \\\n    --hash=sha256:0a \\\n    --hash=sha256:0b\nB==2\n")
    lines = [line.split() for line in chunk.requirements(chunk.pins)]
    assert lines == [["a==1", "--hash=sha256:0a", "--hash=sha256:0b"], ["b==2"]]
