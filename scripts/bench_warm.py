"""Measures what a warm process saves: plans with one, and without, one after the other in one run.

Per case and round: a cold plan (``MEMPROF_NO_WARM=1``), the first plan that starts a warm process,
and further ones; median and range of each, and the ratio of medians to the cold ones. In graph mode
the engine's cache of compiled models is empty for the first plan of each kind in a round, and a
second cold plan finds it filled. ``--sweep N`` makes a sweep of N plans that no cache has. The
first line says how busy the machine was before.

    .venv/bin/python -m scripts.bench_warm [--rounds 3] [--only REGEX] [--sweep 100] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LENGTH = "--max-model-len 32768"
#: Name -> (arguments, whether the engine compiles the model).
CASES = {
    "8B eager": (f"Qwen/Qwen3-8B --enforce-eager {LENGTH}", False),
    "235B TP16 eager": (
        f"Qwen/Qwen3-235B-A22B --tensor-parallel-size 16 --enforce-eager {LENGTH}",
        False,
    ),
    "DeepSeek-V3 TP32 eager": (
        f"deepseek-ai/DeepSeek-V3 --tensor-parallel-size 32 --enforce-eager {LENGTH}",
        False,
    ),
    "8B graphs": (f"Qwen/Qwen3-8B {LENGTH}", True),
    "235B TP16 graphs": (f"Qwen/Qwen3-235B-A22B --tensor-parallel-size 16 {LENGTH}", True),
}
#: Plans after the first with a warm process, in each round.
FURTHER = 2


def plan(arguments: str, folder: Path, env: dict[str, str]) -> float:
    """One plan; returns its seconds."""
    run_dir = folder / f"run-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "vllm_memprof", "plan", "--device", "sim:910b", "-q"]
    command += ["--run-dir", str(run_dir), *shlex.split(arguments)]
    begin = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"{arguments}: status {done.returncode}\n{done.stderr[-2000:]}")
    return seconds


def measure(arguments: str, compiles: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of every plan of a case, by kind."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for kind in ("cold", "warm"):
            with tempfile.TemporaryDirectory(prefix="memprof-bench-") as name:
                folder = Path(name)
                env = {**os.environ, "MEMPROF_NO_WARM": "1" if kind == "cold" else "0"}
                if compiles:
                    env["VLLM_CACHE_ROOT"] = str(folder / "vllm")
                else:
                    env["OF_THIS_ROUND"] = name  # no warm process has this environment yet
                again = (1 if compiles else 0) if kind == "cold" else FURTHER
                first = "cold" if kind == "cold" else "first warm"
                found.setdefault(first, []).append(plan(arguments, folder, env))
                for _ in range(again):
                    further = "cold again" if kind == "cold" else "further warm"
                    found.setdefault(further, []).append(plan(arguments, folder, env))
    return found


def sweep(count: int) -> tuple[float, int]:
    """A sweep of plans that no cache has: seconds, and rows that are not ok."""
    with tempfile.TemporaryDirectory(prefix="memprof-bench-") as name:
        values = ",".join(str(8 + place) for place in range(count))
        command = [sys.executable, "-m", "vllm_memprof", "sweep", "Qwen/Qwen3-8B", "-q"]
        command += ["--device", "sim:910b", "--enforce-eager", *shlex.split(LENGTH), "--no-cache"]
        command += ["--over", f"max-num-seqs={values}", "-o", f"{name}/sweep"]
        begin = time.perf_counter()
        subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
        rows = json.loads((Path(name) / "sweep" / "sweep.json").read_text())["rows"]
        return seconds, sum(row["status"] != "ok" for row in rows)


def show(seconds: list[float]) -> str:
    return (
        f"{statistics.median(seconds):6.2f} s ({min(seconds):.2f} to {max(seconds):.2f}, "
        f"{len(seconds)} plans)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only cases in which this expression is found")
    parser.add_argument("--sweep", type=int, metavar="N", help="also a sweep of N plans")
    parser.add_argument("--json", type=Path, help="write the seconds to a file")
    options = parser.parse_args()
    load = ", ".join(f"{each:.2f}" for each in os.getloadavg())
    print(f"{os.cpu_count()} cores; load before: {load}", flush=True)
    rows: dict[str, dict[str, list[float]]] = {}
    for name, (arguments, compiles) in CASES.items():
        if not re.search(options.only, name):
            continue
        rows[name] = measure(arguments, compiles, options.rounds)
        cold = statistics.median(rows[name]["cold"])
        for kind, seconds in rows[name].items():
            ratio = statistics.median(seconds) / cold
            print(f"{name:24} {kind:13} {show(seconds)}, {ratio:.2f} of cold", flush=True)
    if options.sweep:
        seconds, failed = sweep(options.sweep)
        each = seconds / options.sweep
        print(f"sweep of {options.sweep}: {seconds:.0f} s, {each:.2f} s each, {failed} not ok")
        rows["sweep"] = {"seconds": [seconds]}
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
