"""Measures the engine's start-up time with and without memprof, on the simulated device.

Runs alternate (without, with, with, without, …) so that a drifting machine does not favour one
side. Each pair gives a ratio; the result is the median ratio with its smallest and largest value,
beside the spread of the runs without memprof, which is what the machine's own noise looks like.
Processor time, of all threads of the engine's process, stands beside it, and the time that the
engine spent in memprof's own code (hooks, binding, plug-in), as a ratio to the rest of the same
start: it does not depend on how two runs differ. The engine's figures in bytes must agree in every
run.

With --attribution a third side is run in each turn: memprof without the readings of memory outside
torch (the runtime's counters, the driver's list of processes), so that their own cost can be told.

    .venv/bin/python scripts/bench_overhead.py [--pairs 5] [--attribution] [--model memprof/tiny]
        [--json FILE]
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
import json, os, sys, time
if os.environ.get("BENCH_NO_ATTRIBUTION"):
    from vllm_memprof.capture.probe import Probe
    Probe._outside_torch = lambda *args: {}
own, depth = 0.0, 0

def timed(holder, name):
    inner = getattr(holder, name)

    def outermost(*args, **kwargs):
        global own, depth
        depth, start = depth + 1, time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            depth -= 1
            own += 0 if depth else time.perf_counter() - start

    setattr(holder, name, outermost)

begin = time.perf_counter()
if os.environ.get("MEMPROF_RUN_DIR"):
    from vllm_memprof.capture import plugin
    from vllm_memprof.capture.binder import Binder
    from vllm_memprof.capture.observer import Observer
    own = time.perf_counter() - begin
    for holder, name in ((plugin, "register"), (Observer, "run"), (Observer, "self_check"),
                         (Binder, "_bind_loaded"), (Binder, "bind_instance"),
                         (Binder, "bind_model")):
        timed(holder, name)
from vllm import LLM

if __name__ == "__main__":
    eager = sys.argv[2] == "eager"
    llm = LLM(sys.argv[1], load_format="dummy", max_model_len=4096, enforce_eager=eager)
    seconds, processor, spent = time.perf_counter() - begin, time.process_time(), own
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    available = int(worker.available_kv_cache_memory_bytes)
    blocks = core.vllm_config.cache_config.num_gpu_blocks
    found = {"seconds": seconds, "processor": processor, "available": available, "blocks": blocks,
             "own": spent}
    print("START " + json.dumps(found), flush=True)
    begin = time.perf_counter()
    from vllm import SamplingParams
    llm.generate(["a b c"], SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
    found = {"seconds_per_token": (time.perf_counter() - begin) / 200}
    print("STEPS " + json.dumps(found), flush=True)
"""


def run_once(
    python: Path, env: dict[str, str], script: Path, model: str, mode: str
) -> dict[str, float]:
    """One engine start in a fresh process. Returns seconds, processor (seconds), seconds_per_token,
    available (bytes) and blocks.
    """
    begin = time.perf_counter()
    done = subprocess.run(
        [str(python), str(script), model, mode],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    wall = time.perf_counter() - begin
    found = dict(re.findall(r"^(START|STEPS) (.*)$", done.stdout, re.MULTILINE))
    if set(found) != {"START", "STEPS"}:
        sys.exit(
            f"the engine did not start (exit status "
            f"{done.returncode}):\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
        )
    return {**json.loads(found["START"]), **json.loads(found["STEPS"]), "wall_seconds": wall}


def readings(run_dir: Path) -> tuple[int, int]:
    """Edges at which the device was read in a run, and how many of them read the runtime's
    counters.
    """
    edges = counted = 0
    for path in (run_dir / "events").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            snapshot = json.loads(line).get("snapshot") or {}
            edges += snapshot.get("device_free_bytes") is not None
            counted += snapshot.get("components") is not None
    return edges, counted


def ratio_line(
    name: str, plain: list[float], observed: list[float], unit: float, label: str
) -> str:
    ratios = [with_ / without for with_, without in zip(observed, plain, strict=True)]
    noise = (max(plain) - min(plain)) / statistics.median(plain)
    return (
        f"| {name} | {statistics.median(plain) * unit:.2f} {label} | "
        f"{statistics.median(observed) * unit:.2f} {label} "
        f"| {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) | "
        f"{noise:.1%} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default="memprof/tiny")
    parser.add_argument("--mode", choices=["eager", "graph"], default="eager")
    parser.add_argument("--profile", default="910b")
    parser.add_argument(
        "--attribution", action="store_true", help="a third side without the readings outside torch"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from vllm_memprof.sim.presets import resolve_model
    from vllm_memprof.sim.runtime import prepare_runtime

    runtime = prepare_runtime(options.profile)
    model = resolve_model(options.model, [])
    base = {**os.environ, **runtime.env, **model.env, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    base.pop("MEMPROF_RUN_DIR", None)
    sides = ["without", "bare", "with"] if options.attribution else ["without", "with"]
    results: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    read: set[tuple[int, int]] = set()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "start.py")
        script.write_text(START)
        run_once(runtime.python, base, script, model.path, options.mode)  # page cache, byte code
        for pair in range(options.pairs):
            for side in sides if pair % 2 == 0 else reversed(sides):
                env = dict(base)
                if side == "bare":
                    env["BENCH_NO_ATTRIBUTION"] = "1"
                if side != "without":
                    run_dir = Path(folder, f"{side}{pair}")
                    (run_dir / "events").mkdir(parents=True)
                    env["MEMPROF_RUN_DIR"] = str(run_dir)
                results[side].append(
                    run_once(runtime.python, env, script, model.path, options.mode)
                )
                if side != "without" and not list((run_dir / "events").glob("*.jsonl")):
                    sys.exit("memprof recorded nothing: the comparison would prove nothing")
                if side == "with":
                    read.add(readings(run_dir))
                print(f"{side:>8}: {results[side][-1]['seconds']:.2f} s", file=sys.stderr)

    everything = [run for side in sides for run in results[side]]
    figures = {(run["available"], run["blocks"]) for run in everything}
    print(
        f"{options.model}, {options.mode}, {options.pairs} interleaved pairs, profile "
        f"{options.profile}\n"
    )
    print("| what | without | with | ratio, median (min to max) | spread without |")
    print("|---|---|---|---|---|")
    for name, key, unit, label in (
        ("start-up", "seconds", 1.0, "s"),
        ("start-up, processor", "processor", 1.0, "s"),
        ("one token", "seconds_per_token", 1000.0, "ms"),
    ):
        taken = {side: [run[key] for run in results[side]] for side in sides}
        print(ratio_line(name, taken["without"], taken["with"], unit, label))
        if options.attribution:
            print(
                ratio_line(f"{name}, attribution alone", taken["bare"], taken["with"], unit, label)
            )
    own = [run["own"] for run in results["with"]]
    shares = [run["seconds"] / (run["seconds"] - run["own"]) for run in results["with"]]
    print(
        f"| in memprof's own code |  | {statistics.median(own) * 1000:.0f} ms "
        f"| {statistics.median(shares):.4f} ({min(shares):.4f} to {max(shares):.4f}) |  |"
    )
    for edges, counted in sorted(read):
        print(
            f"\nOne start-up: the device was read at {edges} edges, the runtime's counters at "
            f"{counted} of them"
        )
    same = "identical in all runs" if len(figures) == 1 else f"DIFFER: {sorted(figures)}"
    print(f"\nAvailable KV cache bytes and blocks: {same}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if len(figures) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
