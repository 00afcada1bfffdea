"""The whole simulated device compiles and links for aarch64, the machine of most Ascend hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_memprof.sim import build
from vllm_memprof.sim.extensions import target_of

pytestmark = pytest.mark.timeout(600)
COMPILER = "aarch64-linux-gnu-g++"


def test_the_shim_is_built_for_aarch64(engine_python: Path, tmp_path: Path, monkeypatch) -> None:
    if shutil.which(COMPILER) is None:
        if os.environ.get("MEMPROF_REQUIRE_CROSS"):
            pytest.fail(f"{COMPILER} is required")
        pytest.skip(f"no {COMPILER} (Debian, Ubuntu: apt install g++-aarch64-linux-gnu)")
    monkeypatch.setenv("CXX", COMPILER)
    # it is not run: -O0 compiles sooner
    monkeypatch.setattr(build, "_FLAGS", [flag for flag in build._FLAGS if flag != "-O1"])
    # the headers and the names that are asked for are the same in both wheels
    library = build.build_shim(target_of(engine_python).site_packages, tmp_path, print)
    told = subprocess.run(
        ["aarch64-linux-gnu-readelf", "-h", "-d", str(library)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "AArch64" in told
    needed = [line.split("[")[1] for line in told.splitlines() if "(NEEDED)" in line]
    assert {name.partition(".so")[0] for name in needed} <= {
        "libstdc++",
        "libm",
        "libgcc_s",
        "libc",
        "ld-linux-aarch64",
    }
