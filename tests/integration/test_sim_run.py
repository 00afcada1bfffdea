"""Programs that somebody else wrote, on a simulated device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]

RUN = [sys.executable, "-m", "vllm_memprof", "sim", "run"]
#: A library of a hub finds a preset by its name, and its weights; torch_npu finds eight devices.
TINY = """
import json, os, sys, torch, torch_npu
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer
folder = snapshot_download("Qwen/Qwen3-0.6B")
with safe_open(folder + "/model.safetensors", "pt") as file:
    weight = file.get_tensor("model.norm.weight")
size = os.stat(os.path.realpath(folder + "/model.safetensors"))
print(json.dumps({
    "devices": torch.npu.device_count(), "arguments": sys.argv[1:],
    "layers": AutoConfig.from_pretrained("Qwen/Qwen3-0.6B").num_hidden_layers,
    "tokens": len(AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")("hello").input_ids),
    "weight": [list(weight.shape), weight.sum().item(), str(weight.dtype)],
    "size": size.st_size, "on disk": size.st_blocks * 512,
    "here": torch.ones(3, device="npu").sum().item(),
}))
"""


def test_a_script_finds_devices_and_models(sim_stack) -> None:
    """What follows the program's name is the program's, also where memprof has such an option."""
    run = subprocess.run(
        [*RUN, "--dummy-weights", "python", "-c", TINY, "--device", "x"],
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    seen = json.loads(run.stdout.splitlines()[-1])
    assert seen["devices"] == 8
    assert seen["arguments"] == ["--device", "x"]
    assert (seen["layers"], seen["here"]) == (28, 3)
    assert seen["tokens"] > 0
    assert seen["weight"] == [[1024], 0.0, "torch.bfloat16"]
    assert seen["size"] > 1 << 30
    assert seen["on disk"] < 1 << 20


def test_its_status_and_signals_are_handed_on(sim_stack, tmp_path: Path) -> None:
    before = {*Path("/dev/shm").glob("memprof-sim-*")}
    ended = subprocess.run([*RUN, "sh", "-c", "exit 7"], check=False, timeout=60)
    assert ended.returncode == 7
    absent = subprocess.run([*RUN, "no-such"], capture_output=True, text=True, check=False)
    assert (absent.returncode, "no-such" in absent.stderr) == (1, True)
    ready = tmp_path / "ready"
    code = f"trap 'exit 9' TERM; touch {ready}; while :; do sleep 0.1; done"
    with subprocess.Popen([*RUN, "sh", "-c", code]) as process:
        until = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < until:
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 9
    after = {*Path("/dev/shm").glob(f"memprof-sim-{process.pid}-*")}
    assert after <= before
