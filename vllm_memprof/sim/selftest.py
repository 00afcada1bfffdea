"""A self-test of a stack: does a tiny model run without the host reading what nobody computed?

In: a stack that is set up, the preset of a small model. Out: the reads that poison mode found. Runs
in the launcher's process; the engine is a child.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from vllm_memprof.errors import SetupError, UsageError
from vllm_memprof.sim.poison import CALL_SITE_DIR, PoisonedRead, load_poisoned_reads, poison_env
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.runtime import prepare_runtime
from vllm_memprof.sim.setup import TIME_WAS_UP, run_command
from vllm_memprof.sim.stacks import load_stack

SCRIPT = Path(__file__).parent / "engine/generate.py"
ENGINE = "vllm-ascend"  # the one that the script runs
TIMEOUT_S = 600.0
_TAIL_LINES = 20


def run_selftest(stack: str | None, model: str, device: str) -> list[PoisonedRead]:
    """Run a model in poison mode, a few tokens long; return what the host read uncomputed.

    Args:
        stack: of the engine; None for the default.
        model: a preset all of whose tensors are small; see ``memprof sim list``.
        device: name of a device profile.

    Raises:
        UsageError: no such stack, device or quantization, or a stack of another engine.
        SetupError: the stack is not set up, or the engine failed.
    """
    if (chosen := load_stack(stack)).engine != ENGINE:
        raise UsageError(
            f"the self-test runs stacks of {ENGINE}; {chosen.name} has {chosen.engine}",
            "leave --stack out for the default; `memprof sim list` shows the others",
        )
    runtime = prepare_runtime(device, stack)
    resolved = resolve_model(model, [])
    with tempfile.TemporaryDirectory(prefix="memprof-sim-selftest-") as folder:
        reads = Path(folder) / "reads.jsonl"
        env = {**os.environ, **runtime.env, **resolved.env, **poison_env(reads)}
        env |= {
            "MEMPROF_SIM_STATE": f"{folder}/state",
            "PYTHONPATH": f"{CALL_SITE_DIR}{os.pathsep}{env['PYTHONPATH']}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        command = ["timeout", str(TIMEOUT_S), str(runtime.python), str(SCRIPT), resolved.path]
        lines: list[str] = []
        status = run_command(command, env, lines.append)
        if status == TIME_WAS_UP:
            raise SetupError(f"the engine did not end within {TIMEOUT_S:.0f} s")
        if not any("MEMPROF {" in line for line in lines):
            tail = "\n".join(lines[-_TAIL_LINES:])
            raise SetupError(f"the engine failed with status {status}:\n{tail}")
        return load_poisoned_reads(reads)
