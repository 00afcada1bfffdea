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


def test_no_engine(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot run the engine's interpreter"):
        build.build_shim(tmp_path / "bin" / "python", tmp_path / "out")
    with pytest.raises(SetupError, match="torch_npu is not installed"):
        build.build_shim(Path(sys.executable), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to fail with")
def test_a_failed_compilation_shows_the_first_errors(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int ok;\nint broken( { return 0; }\n")
    with pytest.raises(SetupError, match=r"compiling broken.cpp failed[\s\S]*broken.cpp:2:"):
        build._compile(["g++"], [], source, tmp_path)
    assert not list(tmp_path.glob("*.o"))
