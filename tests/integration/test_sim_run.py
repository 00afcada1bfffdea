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
with safe_open(folder + "/model-0.safetensors", "pt") as file:
    weight = file.get_tensor("model.norm.weight")
size = os.stat(os.path.realpath(folder + "/model-0.safetensors"))
print(json.dumps({
    "devices": torch.npu.device_count(), "arguments": sys.argv[1:],
    "by another name": os.listdir(snapshot_download("LLM-Research/Meta-Llama-3-8B-Instruct")),
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
    assert "model-0.safetensors" in seen["by another name"]
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


ENGINES = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    for length in map(int, sys.argv[1:]):
        llm = LLM("memprof/tiny", load_format="dummy", max_model_len=length, max_num_seqs=4,
                  enforce_eager=True, gpu_memory_utilization=0.3)
        llm.generate(["hello"], SamplingParams(max_tokens=2))
        del llm
"""
#: A server that is started, asked whether it is there, and ended, as by hand.
SERVER = """
vllm serve memprof/tiny --load-format dummy --max-model-len 1024 --enforce-eager --port $1 &
until python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$1/health')" 2>/dev/null
do kill -0 $! || exit 5; sleep 1; done
kill $!; wait $!; exit 0
"""


def reported(tmp_path: Path, *command: str) -> tuple[str, list[dict]]:
    """What ``sim run --report`` prints, and the reports of its engines, the first one first."""
    env = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "VLLM_PLUGINS": "ascend"}
    run = subprocess.run(
        [*RUN, "--report", *command],
        capture_output=True, text=True, check=False, timeout=250, cwd=tmp_path, env=env,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    folders = (tmp_path / "reports").glob("*/report.json")
    found = [json.loads(path.read_text()) for path in folders]
    return run.stdout + run.stderr, sorted(found, key=lambda each: each["run"]["start_t_ns"])


@pytest.mark.parametrize(
    "lengths", [["512"], pytest.param(["1024", "2048"], marks=pytest.mark.full)], ids=len
)
def test_each_engine_of_a_script_has_a_report(
    lengths: list[str], sim_stack, tmp_path: Path
) -> None:
    script = tmp_path / "engines.py"
    script.write_text(ENGINES)
    printed, reports = reported(tmp_path, "python", str(script), *lengths)
    assert [str(each["ranks"][0]["kv"]["max_model_len"]) for each in reports] == lengths
    for report in reports:
        assert (report["run"]["model"], report["run"]["outcome"]) == ("memprof/tiny", "ok")
        assert report["ranks"][0]["budget"]["residual_bytes"] == 0
    assert printed.count("memprof  memprof/tiny  vllm-ascend 0.23.0") == len(lengths)


@pytest.mark.full
def test_a_server_started_by_hand_has_a_report(sim_stack, tmp_path: Path) -> None:
    _, [report] = reported(tmp_path, "sh", "-c", SERVER, "sh", "28765")
    assert (report["run"]["mode"], report["run"]["outcome"]) == ("serve", "ok")
    assert report["ranks"][0]["kv"]["max_model_len"] == 1024


def test_a_program_without_an_engine_is_told(sim_stack, tmp_path: Path) -> None:
    printed, reports = reported(tmp_path, "python", "-c", "print(1)")
    assert not reports
    assert "the program started no engine" in printed


def test_torch_has_no_nccl_as_beside_an_npu(sim_stack) -> None:
    """The stack's torch is built for CUDA; vLLM asks it for NCCL, and takes Gloo without."""
    asked = (
        "from vllm.platforms import current_platform as here; import torch.distributed as d; "
        "print(here.device_type, d.is_backend_available('nccl'), d.is_backend_available('gloo'))"
    )
    run = subprocess.run(
        [*RUN, "python", "-c", asked], capture_output=True, text=True, check=False, timeout=200
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "npu False True"
