"""The observer changes nothing: the engine's own figures with and without memprof."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.support.engine import OLD_STACK, STACK, require_stack, run_in_engine

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]

ARGS = ["--enforce-eager", "--max-model-len", "4096", "--gpu-memory-utilization", "0.5"]

#: Prints what the engine itself exposes in bytes, from the worker object and from the KV
#: configuration; releases differ in what they keep. The allocator's own counters come last: memprof
#: must not have moved them either.
READ_FIGURES = """
import json, sys
from vllm import LLM

def read(source, path):
    for name in path.split("."):
        source = getattr(source, name, None)
    return None if source is None else int(source)

if __name__ == "__main__":
    llm = LLM(sys.argv[1], load_format="dummy", enforce_eager=True, max_model_len=4096, gpu_memory_utilization=0.5)
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    figures = {
        "available": read(worker, "available_kv_cache_memory_bytes"),
        "weights": read(worker, "model_runner.model_memory_usage"),
        "peak_activation": read(worker, "peak_activation_memory"),
        "non_torch": read(worker, "non_torch_memory"),
        "free_after": read(worker, "init_snapshot.free_memory"),
        "free_at_start": read(worker, "init_npu_memory"),
        "blocks": core.vllm_config.cache_config.num_gpu_blocks,
    }
    import torch
    stats = torch.npu.memory_stats()
    for name in ("allocated_bytes", "reserved_bytes"):
        for statistic in ("current", "peak"):
            figures[f"{name}.{statistic}"] = stats[f"{name}.all.{statistic}"]
    print("RESULT " + json.dumps(figures))
"""
#: What each release holds of the above.
HELD = {
    STACK: {"available", "weights", "peak_activation", "non_torch", "free_after"},
    OLD_STACK: {"free_at_start", "printed"},
}
ALWAYS = {"blocks"} | {
    f"{name}_bytes.{which}" for name in ("allocated", "reserved") for which in ("current", "peak")
}


def engine_figures(runtime, model_path: str, script, extra_env: dict[str, str]) -> dict[str, int]:
    script.write_text(READ_FIGURES)
    figures, output = run_in_engine(runtime, script, model_path, **extra_env)
    printed = re.search(r"Available memory: (\d+), total memory", output)
    return figures | {"printed": int(printed.group(1)) if printed else None}


@pytest.mark.full  # CI: test_capture.py, two workers
@pytest.mark.parametrize("stack", [STACK, OLD_STACK])
def test_engine_bytes_are_identical_with_and_without(stack, tmp_path):
    from vllm_memprof.sim.presets import resolve_model
    from vllm_memprof.sim.runtime import prepare_runtime

    runtime = prepare_runtime("910b", require_stack(stack))
    path = resolve_model("memprof/tiny", []).path
    plain = engine_figures(runtime, path, tmp_path / "figures.py", {})
    run_dir = tmp_path / "run"
    (run_dir / "events").mkdir(parents=True)
    observed = engine_figures(
        runtime, path, tmp_path / "figures.py", {"MEMPROF_RUN_DIR": str(run_dir)}
    )
    assert list((run_dir / "events").glob("*.jsonl")), (
        "memprof was not loaded, the comparison proves nothing"
    )
    assert observed == plain
    always = {
        "blocks",
        "allocated_bytes.current",
        "allocated_bytes.peak",
        "reserved_bytes.current",
        "reserved_bytes.peak",
    }
    printed = {"printed"} if stack == OLD_STACK else set()
    assert {name for name, value in plain.items() if value is not None} == HELD[
        stack
    ] | always | printed
    assert all(value >= 0 for value in plain.values() if value is not None)
    assert plain["blocks"] > 0


def test_without_the_launcher_nothing_is_hooked(sim_stack, tmp_path):
    from vllm_memprof.sim.runtime import prepare_runtime

    runtime = prepare_runtime("910b", sim_stack)
    code = (
        "import sys; from vllm_memprof.capture.plugin import register; register(); register();"
        "print(sorted(m for m in sys.modules if m.startswith(('pandas', 'rich', 'typer', 'torch', 'vllm.'))));"
        "print(any('memprof' in type(f).__module__ for f in sys.meta_path))"
    )
    env = {**os.environ, **runtime.env}
    env.pop("MEMPROF_RUN_DIR", None)
    done = subprocess.run(
        [str(runtime.python), "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "False"]
