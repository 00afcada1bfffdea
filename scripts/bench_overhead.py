"""What the observer costs: engine start-up time with and without memprof, on the simulated device.

Runs alternate (without, with, with, without, …) so that a drifting machine does not favour one side. Each pair gives a
ratio; the result is the median ratio with its smallest and largest value, beside the spread of the runs without
memprof, which is what the machine's own noise looks like. The engine's figures in bytes must agree in every run.

    .venv/bin/python scripts/bench_overhead.py [--pairs 5] [--model memprof/tiny] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START = """
import json, sys, time
begin = time.perf_counter()
from vllm import LLM

if __name__ == "__main__":
    llm = LLM(sys.argv[1], load_format="dummy", max_model_len=4096, enforce_eager=sys.argv[2] == "eager")
    seconds = time.perf_counter() - begin
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    print("START " + json.dumps({"seconds": seconds, "available": int(worker.available_kv_cache_memory_bytes),
                                 "blocks": core.vllm_config.cache_config.num_gpu_blocks}), flush=True)
    begin = time.perf_counter()
    from vllm import SamplingParams
    llm.generate(["a b c"], SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
    print("STEPS " + json.dumps({"seconds_per_token": (time.perf_counter() - begin) / 200}), flush=True)
"""


def run_once(python: Path, env: dict[str, str], script: Path, model: str, mode: str) -> dict[str, float]:
    """One engine start in a fresh process. Returns seconds, seconds_per_token, available (bytes) and blocks."""
    begin = time.perf_counter()
    done = subprocess.run(
        [str(python), str(script), model, mode], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    wall = time.perf_counter() - begin
    found = dict(re.findall(r"^(START|STEPS) (.*)$", done.stdout, re.MULTILINE))
    if set(found) != {"START", "STEPS"}:
        sys.exit(
            f"the engine did not start (exit status {done.returncode}):\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
        )
    return {**json.loads(found["START"]), **json.loads(found["STEPS"]), "wall_seconds": wall}


def ratio_line(name: str, plain: list[float], observed: list[float], unit: float, label: str) -> str:
    ratios = [with_ / without for with_, without in zip(observed, plain, strict=True)]
    noise = (max(plain) - min(plain)) / statistics.median(plain)
    return (
        f"| {name} | {statistics.median(plain) * unit:.2f} {label} | {statistics.median(observed) * unit:.2f} {label} "
        f"| {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) | {noise:.1%} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default="memprof/tiny")
    parser.add_argument("--mode", choices=["eager", "graph"], default="eager")
    parser.add_argument("--profile", default="910b")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from vllm_memprof.sim.presets import resolve_model
    from vllm_memprof.sim.runtime import prepare_runtime

    runtime = prepare_runtime(options.profile)
    model = resolve_model(options.model, [])
    base = {**os.environ, **runtime.env, **model.env, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    base.pop("MEMPROF_RUN_DIR", None)
    results: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "start.py")
        script.write_text(START)
        run_once(runtime.python, base, script, model.path, options.mode)  # page cache, byte code
        for pair in range(options.pairs):
            for side in ("without", "with") if pair % 2 == 0 else ("with", "without"):
                env = dict(base)
                if side == "with":
                    run_dir = Path(folder, f"run{pair}")
                    (run_dir / "events").mkdir(parents=True)
                    env["MEMPROF_RUN_DIR"] = str(run_dir)
                results[side].append(run_once(runtime.python, env, script, model.path, options.mode))
                if side == "with" and not list((run_dir / "events").glob("*.jsonl")):
                    sys.exit("memprof recorded nothing: the comparison would prove nothing")
                print(f"{side:>8}: {results[side][-1]['seconds']:.2f} s", file=sys.stderr)

    everything = [*results["without"], *results["with"]]
    figures = {(run["available"], run["blocks"]) for run in everything}
    print(f"{options.model}, {options.mode}, {options.pairs} interleaved pairs, profile {options.profile}\n")
    print("| what | without | with | ratio, median (min to max) | spread without |")
    print("|---|---|---|---|---|")
    for name, key, unit, label in (
        ("start-up", "seconds", 1.0, "s"),
        ("one token", "seconds_per_token", 1000.0, "ms"),
    ):
        print(ratio_line(name, [r[key] for r in results["without"]], [r[key] for r in results["with"]], unit, label))
    same = "identical in all runs" if len(figures) == 1 else f"DIFFER: {sorted(figures)}"
    print(f"\nAvailable KV cache bytes and blocks: {same}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if len(figures) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
