"""Measures how fast ``memprof explain`` reads a generated log, beside ``grep -c`` on it as the
yardstick.

The log is what a busy server leaves behind: a start-up with its memory lines at the beginning, then
access lines, statistics and request lines, and rare memory lines. ``--steps`` adds the line per
step that Ascend prints at DEBUG.

    .venv/bin/python scripts/bench_explain.py [--mib 1024] [--steps] [--file FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: Extended regular expression of the yardstick: the lines that a person would look for.
PATTERN = (
    r"KV cache memory|KV cache size|weights took|loading took|out of memory|Free memory on device"
)

START = """\
(APIServer pid=100) INFO 01-01 00:00:00 [api_server.py:1] vLLM API server version 0.23.0
(EngineCore_DP0 pid=200) INFO 01-01 00:00:01 [core.py:1] Initializing a V1 LLM engine (v0.23.0) \
with config: model='org/model', max_seq_len=32768, tensor_parallel_size=2, \
pipeline_parallel_size=1, enforce_eager=False,
(Worker_TP0 pid=301) INFO 01-01 00:01:00 [model_runner_v1.py:1] Loading model weights took 9.1948 GB
(Worker_TP1 pid=302) INFO 01-01 00:01:00 [model_runner_v1.py:1] Loading model weights took 9.1948 GB
(Worker_TP0 pid=301) INFO 01-01 00:01:10 [worker.py:1] Available KV cache memory: 44.30 GiB
(Worker_TP1 pid=302) INFO 01-01 00:01:10 [worker.py:1] Available KV cache memory: 44.28 GiB
(EngineCore_DP0 pid=200) INFO 01-01 00:01:11 [kv_cache_utils.py:1] GPU KV cache size: 645,120 tokens
"""
OOM = (
    "(Worker_TP0 pid=301) ERROR 01-02 03:04:05 [multiproc_executor.py:1] RuntimeError: NPU out of "
    "memory. Tried to "
    "allocate 4.50 GiB (NPU 0; 60.96 GiB total capacity; 52.87 GiB already allocated; 52.87 GiB "
    "current active; "
    "2.77 GiB free; 56.89 GiB reserved in total by PyTorch)\n"
)


def block(seed: int, steps: bool) -> bytes:
    """Some MiB of ordinary serving lines."""
    rng = random.Random(seed)
    lines = []
    for number in range(60_000):
        kind = rng.random()
        stamp = f"INFO 01-01 {number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}"
        if steps and kind < 0.5:
            reserved = rng.choice((53.2, 53.21, 54.0, 55.5))
            rank = number % 2
            allocated = reserved - rng.randrange(9) / 100
            lines.append(
                f"(Worker_TP{rank} pid={301 + rank}) DEBUG {stamp[5:]} [worker.py:605] torch "
                f"reserved memory: "
                f"{reserved:.2f} GiB, torch allocated memory: {allocated:.2f} GiB"
            )
        elif kind < 0.7:
            client = f"10.0.{rng.randrange(256)}.{rng.randrange(256)}:{rng.randrange(65536)}"
            lines.append(
                f'(APIServer pid=100) INFO:     {client} - "POST /v1/chat/completions HTTP/1.1" '
                f"200 OK"
            )
        elif kind < 0.9:
            lines.append(
                f"(APIServer pid=100) {stamp} [logger.py:41] Received request "
                f"chatcmpl-{rng.getrandbits(128):032x}: "
                "params: SamplingParams(n=1, temperature=0.7, top_p=0.8, max_tokens=1024), "
                "lora_request: None."
            )
        else:
            prompt, generation, used, hits = (rng.random() * most for most in (900, 400, 90, 90))
            lines.append(
                f"(APIServer pid=100) {stamp} [loggers.py:127] Engine 000: Avg prompt throughput: "
                f"{prompt:.1f} "
                f"tokens/s, Avg generation throughput: {generation:.1f} tokens/s, Running: 8 "
                f"reqs, Waiting: 0 reqs, "
                f"GPU KV cache usage: {used:.1f}%, Prefix cache hit rate: {hits:.1f}%"
            )
    return ("\n".join(lines) + "\n").encode()


def write_log(path: Path, size_bytes: int, steps: bool) -> None:
    blocks = itertools.cycle([block(seed, steps) for seed in range(4)])
    with path.open("wb") as out:
        out.write(START.encode())
        while out.tell() < size_bytes:
            out.write(next(blocks))
        out.write(OOM.encode())


def timed(command: list[str]) -> tuple[float, int, str]:
    """(seconds, peak resident KiB of this and earlier children, output)."""
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument(
        "--steps",
        action="store_true",
        help="half of the lines are those that Ascend prints per step",
    )
    parser.add_argument("--file", type=Path, help="an existing log instead of a generated one")
    parser.add_argument("--json", type=Path, help="write the result to a file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "server.log"
        if args.file is None:
            write_log(path, args.mib << 20, args.steps)
        size_mib = path.stat().st_size / (1 << 20)
        path.open("rb").close()
        plain = timed(["grep", "-c", "-E", PATTERN, str(path)])
        local = timed(["env", "LC_ALL=C", "grep", "-c", "-E", PATTERN, str(path)])
        code = "import sys; from vllm_memprof.logs.to_record import read_log;"
        code += "print(len(read_log(sys.argv[1])))"
        ours = timed([sys.executable, "-c", code, str(path)])
    result = {
        "size_mib": round(size_mib),
        "grep_seconds": round(plain[0], 2),
        "grep_c_locale_seconds": round(local[0], 2),
        "explain_seconds": round(ours[0], 2),
        "explain_mib_per_second": round(size_mib / ours[0]),
        "explain_peak_rss_mib": round(ours[1] / 1024),
        "runs": int(ours[2]),
        "cpus": os.cpu_count(),
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
