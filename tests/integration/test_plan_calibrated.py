"""``memprof calibrate``: a planted device is found again, and a log moves a plan as it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import MEMPROF, STACK
from vllm_memprof.sim.profiles import PROFILES_DIR, load_profile
from vllm_memprof.sim.stacks import default_prefix

# CI: tests/unit/plans/test_corrections.py, test_hardware.py
pytestmark = [pytest.mark.sim, pytest.mark.full, pytest.mark.timeout(900)]
MIB = 1 << 20
LOG = Path(__file__).parents[1] / "data" / "logs" / "made" / "a3_quick_start.log"
#: A device that is not as its profile has it.
TRUTH = {"name": '"truth"', "context_bytes": 400 * MIB, "kernels_bytes": 34 * MIB}


@pytest.fixture(scope="module")
def place(sim_stack: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in, with a cache of its own that leads to the stack."""
    folder = tmp_path_factory.mktemp("calibrated")
    (folder / "cache" / "stacks").mkdir(parents=True)
    (folder / "cache" / "stacks" / f"{STACK}.prefix").write_text(f"{default_prefix(STACK)}\n")
    return folder


def memprof(place: Path, *args: str, status: int = 0) -> str:
    env = {**os.environ, "MEMPROF_CACHE_DIR": str(place / "cache"), "NO_COLOR": "1"}
    done = subprocess.run(
        [*MEMPROF, *args], capture_output=True, text=True, cwd=place, env=env, timeout=850
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


def calibrated(place: Path, *args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(memprof(place, "calibrate", *args, "--format", "json"))
    return found


def kv_and_headroom(run_dir: Path) -> tuple[int, int]:
    (rank,) = json.loads((run_dir / "report.json").read_text())["ranks"]
    return rank["budget"]["engine_kv_cache_bytes"], rank["budget"]["headroom_bytes"]


def test_a_device_that_differs_from_its_profile_is_found_again(place: Path) -> None:
    """Its run says that it was on hardware; the profile of the plan knows nothing of its values."""
    profile = (PROFILES_DIR / "ascend910b.toml").read_text()
    for key, value in TRUTH.items():
        profile, count = re.subn(rf"(?m)^{key} = \S+", f"{key} = {value}", profile)
        assert count == 1, key
    (place / "truth.toml").write_text(profile)
    tiny = ["memprof/tiny", "--enforce-eager", "--gpu-memory-utilization=0.5"]
    memprof(place, "plan", *tiny, "--device", "sim:truth.toml", "--run-dir", "hardware",
            "--max-model-len=2048")  # fmt: skip
    refused = memprof(
        place, "calibrate", *tiny, "--device", "sim:910b", "--run", "hardware", status=3
    )
    assert "is of a simulated device" in refused
    record = place / "hardware" / "run.json"
    run = json.loads(record.read_text())
    record.write_text(json.dumps(run | {"simulated": False, "device": "Ascend910B3"}))

    asked = [*tiny, "--max-model-len=4096", "--max-num-batched-tokens=4096"]
    memprof(place, "plan", *asked, "--device", "sim:truth.toml", "--run-dir", "wanted")
    found = calibrated(place, *asked, "--device", "sim:910b", "--run", "hardware",
                       "--run-dir", "found")  # fmt: skip
    made = load_profile(str(place / "found" / found["profile"])).memory
    assert made == load_profile(str(place / "truth.toml")).memory
    applied = {row["owner"]: row["applied_bytes"] for row in found["corrections"]}
    assert applied["kernels"] == 34 * MIB
    assert applied["context"] == 400 * MIB - load_profile("910b").memory.context_bytes
    wanted, headroom = kv_and_headroom(place / "wanted")
    assert found["corrected"]["kv_cache_bytes"] == wanted != found["without"]["kv_cache_bytes"]
    assert found["corrected"]["headroom_bytes"] == headroom != found["without"]["headroom_bytes"]
    assert not found["same_command"]


def test_a_published_log_moves_another_plan_by_what_it_says_and_is_no_evidence_for_itself(
    place: Path,
) -> None:
    asked = ["Qwen/Qwen3-0.6B", "--device", "sim:a3", "--run", str(LOG)]
    own = ["--max-model-len=40960", "--max-num-batched-tokens=8192"]
    other = calibrated(place, *asked, "--enforce-eager", "--max-model-len=4096",
                       "--gpu-memory-utilization=0.8")  # fmt: skip
    rows = {row["owner"]: row for row in other["corrections"]}
    one, context = rows["non_torch"], rows["context"]
    assert one["hardware"]["bytes"] == 32_212_255  # 0.03 GiB
    assert one["simulated"]["bytes"] == 0
    assert context["applied_bytes"] == context["difference_bytes"] > 0
    pages = -(-32_212_255 // (2 * MIB)) * 2 * MIB
    assert other["kv_cache_change_bytes"] == -pages
    assert not other["same_command"]
    same = calibrated(place, *asked, *own, "--gpu-memory-utilization=0.92")
    assert same["same_command"]
    assert any("by construction" in note for note in same["notes"])
    assert same["own"]["cached"]
    assert same["without"]["kv_cache_bytes"] == same["own"]["kv_cache_bytes"]
