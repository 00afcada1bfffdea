"""The observer changes nothing: the engine's own figures with and without memprof."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]

ARGS = ["--enforce-eager", "--max-model-len", "4096", "--gpu-memory-utilization", "0.5"]

#: Prints what the engine itself exposes in bytes, from the worker object and from the KV configuration.
READ_FIGURES = """
import json, sys
from vllm import LLM

if __name__ == "__main__":
    llm = LLM(sys.argv[1], load_format="dummy", enforce_eager=True, max_model_len=4096, gpu_memory_utilization=0.5)
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    config = core.vllm_config.cache_config
    print("FIGURES " + json.dumps({
        "available": int(worker.available_kv_cache_memory_bytes),
        "weights": int(worker.model_runner.model_memory_usage),
        "peak_activation": int(worker.peak_activation_memory),
        "non_torch": int(worker.non_torch_memory),
        "free_after": int(worker.init_snapshot.free_memory),
        "blocks": config.num_gpu_blocks,
    }))
"""


def engine_figures(runtime, model_path: str, script, extra_env: dict[str, str]) -> dict[str, int]:
    script.write_text(READ_FIGURES)
    env = {**os.environ, **runtime.env, "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **extra_env}
    done = subprocess.run(
        [str(runtime.python), str(script), model_path],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    line = re.search(r"^FIGURES (.*)$", done.stdout, re.MULTILINE)
    assert line, done.stdout[-3000:]
    return json.loads(line.group(1))


def test_engine_bytes_are_identical_with_and_without(sim_stack, tmp_path):
    from vllm_memprof.sim.presets import resolve_model
    from vllm_memprof.sim.runtime import prepare_runtime

    runtime = prepare_runtime("910b", sim_stack)
    path = resolve_model("memprof/tiny", []).path
    plain = engine_figures(runtime, path, tmp_path / "figures.py", {})
    run_dir = tmp_path / "run"
    (run_dir / "events").mkdir(parents=True)
    observed = engine_figures(runtime, path, tmp_path / "figures.py", {"MEMPROF_RUN_DIR": str(run_dir)})
    assert list((run_dir / "events").glob("*.jsonl")), "memprof was not loaded, the comparison proves nothing"
    assert observed == plain
    assert plain["available"] > 0
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
    done = subprocess.run([str(runtime.python), "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "False"]
