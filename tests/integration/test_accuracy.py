"""Published runs on hardware, planned: three cheap rows give what docs/accuracy.json keeps.

The others are planned by ``make accuracy``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine import OLD_STACK, STACK, require_stack

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]

#: One rank, eager: one of each device and equation, the smallest there are.
CHEAP = {
    "qwen3-embedding-0.6b-a3-eager": STACK,
    "qwen2-0.5b-a3-eager": OLD_STACK,
    "qwen3-8b-910b4-eager": "vllm-ascend-0.11.0",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if stack in (STACK, OLD_STACK) else pytest.mark.full)
        for name, stack in CHEAP.items()
    ],
)
def test_a_published_run_is_planned_as_kept(name):
    require_stack(CHEAP[name])
    command = [sys.executable, "-m", "scripts.accuracy", "--verify", "--only", f"^{name}$"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{name}: as kept\n"), done.stderr


@pytest.mark.full  # CI: the rows above; this one holds why a row needs its graph mode
def test_a_piece_of_a_graph_keeps_its_arguments_and_a_whole_graph_does_not(run_memprof):
    """The peak lies in the MLP: by default the piece after attention also holds what it was given.

    That is the residual, 1,024 elements of 2 bytes a token, and what attention gave, 16 heads of
    128.
    """
    tokens = 8192
    args = ["--max-model-len", "2048", "--max-num-batched-tokens", str(tokens)]
    args += ["--hf-overrides", '{"num_hidden_layers": 2}', "--stack", STACK]
    peaks = {}
    for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"):
        config = f'{{"cudagraph_mode": "{mode}"}}'
        run = run_memprof(
            *("plan", "Qwen/Qwen3-0.6B", "--device", "sim:a3", *args),
            *("--compilation-config", config),
        )
        assert run.returncode == 0, run.output
        [rank] = run.report["ranks"]
        peaks[mode] = rank["figures"]["peak_activation_bytes"]
    more = peaks["FULL_AND_PIECEWISE"] - peaks["FULL_DECODE_ONLY"]
    # of each token; what is left is 1 KiB, two small blocks
    assert more // tokens == (1024 + 16 * 128) * 2
    assert more % tokens <= 1024
