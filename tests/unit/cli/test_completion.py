"""TAB in a shell: the script that memprof prints, called as the shell calls it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """``memprof`` on PATH, and two runs in the working directory."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "memprof"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vllm_memprof "$@"\n')
    program.chmod(0o755)
    for name in ("20260101-Qwen3-8B", "20260102-tiny"):
        (tmp_path / "reports" / name).mkdir(parents=True)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}


LINES = {
    "memprof exp": {"explain"},
    "memprof s": {"serve", "share", "sweep", "sim"},
    "memprof plan memprof/ti": {"memprof/tiny"},
    "memprof plan Qwen/Qwen3-1": {"Qwen/Qwen3-14B"},
    "memprof fit memprof/tiny --device np": {"npu"},
    "memprof share memprof/tiny --device sim": {"sim", "sim:910b", "sim:ascend910b"},
    "memprof serve memprof/tiny --stack vllm-ascend-0.23": {"vllm-ascend-0.23.0"},
    "memprof plan memprof/tiny --stack=vllm-ascend-0.23": {"vllm-ascend-0.23.0"},
    "memprof sim setup --stack sg": {"sglang-0.5.23"},
    "memprof report 20260101": {"20260101-Qwen3-8B"},
    "memprof diff reports/20260102": {"reports/20260102-tiny"},
    "memprof check 2026": {"20260101-Qwen3-8B", "20260102-tiny"},
    "memprof calibrate memprof/tiny --ru": {"--run", "--run-dir"},
}


@pytest.mark.parametrize("line", LINES)
def test_bash(line: str, env: dict[str, str], tmp_path: Path) -> None:
    words = line.split()
    script = (
        'eval "$(_MEMPROF_COMPLETE=source_bash memprof)"\n'
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}\n"
        '_memprof_completion memprof; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert LINES[line] <= set(done.stdout.split()), done


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
@pytest.mark.parametrize("line", LINES)
def test_zsh(line: str, env: dict[str, str], tmp_path: Path) -> None:
    script = f'_TYPER_COMPLETE_ARGS="{line}" _MEMPROF_COMPLETE=complete_zsh memprof'
    done = subprocess.run(
        ["zsh", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    plain = re.sub(r"\\+:", ":", done.stdout)
    assert all(f'"{word}"' in plain for word in LINES[line]), done


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_there_for_each_shell(shell: str, env: dict[str, str]) -> None:
    env["_MEMPROF_COMPLETE"] = f"source_{shell}"
    done = subprocess.run(["memprof"], env=env, capture_output=True, text=True, check=True)
    assert "memprof" in done.stdout
