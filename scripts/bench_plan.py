"""Measures a plan's seconds and the host memory of all its processes at the worst moment.

Without options: large models on one rank of many, against the limits of 20 s and 4 GiB; the exit
status is 1 where one is above. ``--models`` plans every model preset on the stacks and devices of
scripts/model_cases.py, those rows that are not in ``docs/models.json`` yet or were planned with
other constants of the device (``--again``: all), and writes that file and the page made from it;
``--check`` compares the page with the file, and starts nothing.

Host memory is the sum of the proportional set sizes (a page that processes share counts once), read
every 0.2 s. Each plan of a large model is a first one: vLLM's cache of compiled models and of what
it knows of a model's class is empty.

    .venv/bin/python -m scripts.bench_plan [--graphs] [--only REGEX] [--json FILE] [--stack NAME]
    .venv/bin/python -m scripts.bench_plan --models [--only REGEX] [--again] [--at-most N]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from scripts.model_plans import (
    PAGE,
    constants_of,
    is_current,
    keep_row,
    list_plans,
    load_rows,
    write_page,
)

LIMIT_SECONDS = 20.0
LIMIT_BYTES = 4 << 30
#: What a row of the list of models keeps of a plan.
KEPT = ("weights_bytes", "kv_cache_bytes", "tokens", "max_concurrency", "error")
LENGTH = "--max-model-len 32768"
#: Without it (``--graphs``) the engine compiles the model before it measures, which takes most of
#: the time.
EAGER = "--enforce-eager"

#: Model and arguments; what the limits are for.
LARGE = (
    ("Qwen/Qwen3-235B-A22B", f"--tensor-parallel-size 16 {LENGTH}"),
    ("deepseek-ai/DeepSeek-V3", f"--tensor-parallel-size 32 {LENGTH}"),
    ("deepseek-ai/DeepSeek-V3", f"--tensor-parallel-size 8 --pipeline-parallel-size 4 {LENGTH}"),
    (
        "deepseek-ai/DeepSeek-V3",
        f"--data-parallel-size 4 --tensor-parallel-size 8 --enable-expert-parallel {LENGTH}",
    ),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", f"--tensor-parallel-size 4 {LENGTH}"),
    ("Qwen/Qwen3-VL-30B-A3B-Instruct", f"--tensor-parallel-size 2 {LENGTH}"),
)


def plan(
    model: str, arguments: str, stack: str | None, device: str = "910b", fresh: bool = True
) -> dict[str, Any]:
    """One plan: what it took, and the figures of the rank that ran.

    Args:
        model: preset.
        arguments: of the engine.
        stack: None: the default.
        device: profile.
        fresh: in processes of its own, with nothing in vLLM's cache; else it may be the fork of a
            process that has imported the engine, which has the same figures.
    """
    with tempfile.TemporaryDirectory(prefix="memprof-bench-") as folder:
        command = [
            sys.executable,
            "-m",
            "vllm_memprof",
            "plan",
            model,
            "--device",
            f"sim:{device}",
            "--ranks",
            "one",
            "-q",
        ]
        command += [
            "--run-dir",
            folder + "/run",
            *(["--stack", stack] if stack else []),
            *shlex.split(arguments),
        ]
        begin, cpu_before = time.perf_counter(), _cpu_seconds()
        env = {**os.environ, **({"VLLM_CACHE_ROOT": folder + "/vllm"} if fresh else {})}
        with open(folder + "/output", "w+") as output:
            engine = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
            peak = _watch_memory(engine)
            seconds = time.perf_counter() - begin
            output.seek(0)
            text = output.read()
        cpu = round(_cpu_seconds() - cpu_before, 1)
        row: dict[str, Any] = {
            "model": model,
            "arguments": arguments,
            "seconds": round(seconds, 1),
            "cpu_seconds": cpu,
        }
        row["host_peak_bytes"] = peak
        file = Path(folder) / "run" / "report.json"
        report = json.loads(file.read_text()) if file.is_file() else None
        if report is None or engine.returncode:
            told = [line.strip() for line in text.splitlines() if line.strip()]
            reason = (report and report["run"]["exit_reason"]) or "".join(told[-1:])
            return {**row, "error": _one_line(reason), "output": text[-2000:]}
    rank = report["ranks"][0]
    terms = {term["name"]: term["bytes"] for term in rank["budget"]["terms"]}
    kv = {name: rank["kv"][name] for name in ("tokens", "max_concurrency", "max_model_len")}
    return {
        **row,
        "weights_bytes": terms["weights"],
        "kv_cache_bytes": rank["budget"]["engine_kv_cache_bytes"],
        **kv,
    }


def _one_line(reason: str) -> str:
    """A message without line ends and folders of this machine, and not longer than a few lines."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.+-]+/)+", "", " ".join(reason.split()))[:400]


def _cpu_seconds() -> float:
    """Of all processes that ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _watch_memory(engine: subprocess.Popen[bytes]) -> int:
    """Waits for a process; the largest sum over its tree that was seen meanwhile, bytes."""
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.2):
            peak = max(peak, _tree_bytes(engine.pid))

    thread = threading.Thread(target=watch)
    thread.start()
    engine.wait()
    done.set()
    thread.join()
    return peak


def _tree_bytes(pid: int) -> int:
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0
    return sum(_proportional_bytes(process.pid) for process in processes)


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def show(row: dict[str, Any]) -> str:
    """One line for a person."""
    cost = f"{row['seconds']:6.1f} s ({row['cpu_seconds']:.1f} of a core)"
    cost += f" {row['host_peak_bytes'] / (1 << 20):6.0f} MiB"
    if "error" in row:
        return f"{cost}  {row['model']} {row['arguments']}: FAILED\n{row['output']}"
    sizes = f"weights {_gib(row['weights_bytes'])} GiB"
    if row["kv_cache_bytes"] is not None:  # else an encoder
        sizes += f", KV {_gib(row['kv_cache_bytes'])} GiB, {row['tokens']:,} tokens"
    return f"{cost}  {row['model']} {row['arguments']}: {sizes}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f}"


def plan_models(only: str, again: bool, at_most: int | None) -> bool:
    """Plan rows of the list of models, keep each as it comes; return whether all of them start.

    Args:
        only: a regular expression that is found in stack, device, model and arguments.
        again: plan rows that are there already, too.
        at_most: so many; None: all.
    """
    known = load_rows()
    wanted = [
        each
        for each in list_plans()
        if (again or not is_current(known.get(each.key, {"device": each.device})))
        and re.search(only, " ".join(each.key))
    ]
    wanted.sort(key=lambda each: each.key[1:3])  # those of a stack and device share warm processes
    started = True
    for each in wanted[:at_most]:
        model, stack, device, arguments = each.key
        outcome = plan(model, arguments, stack, device, fresh=False)
        print(f"{stack} {device} {show(outcome)}", flush=True)
        row = {"model": model, "stack": stack, "device": device, "arguments": arguments}
        row |= {name: outcome[name] for name in KEPT if name in outcome}
        row["constants"] = constants_of(device, arguments)
        PAGE.write_text(write_page(keep_row(row)), encoding="utf-8")
        started = started and "error" not in row
    return started


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--models", action="store_true", help="plan every preset, write docs/models.json and .md"
    )
    parser.add_argument(
        "--again", action="store_true", help="with --models: plan rows that are there anew"
    )
    parser.add_argument("--at-most", type=int, help="with --models: plan so many rows")
    parser.add_argument(
        "--check", action="store_true", help="exit status 1 when docs/models.md differs"
    )
    parser.add_argument("--page", action="store_true", help="write docs/models.md from the rows")
    parser.add_argument(
        "--graphs", action="store_true", help="the large models in graph mode; no limits"
    )
    parser.add_argument(
        "--only", default="", help="only cases in which this regular expression is found"
    )
    parser.add_argument("--stack", help="engine stack")
    parser.add_argument("--json", type=Path, help="write the rows to a file")
    return parser.parse_args()


def main() -> int:
    options = _parse()
    if options.check:
        same = PAGE.read_text(encoding="utf-8") == write_page([*load_rows().values()])
        if not same:
            print("docs/models.md differs from its rows: run python -m scripts.bench_plan --page")
        return 0 if same else 1
    if options.page:
        PAGE.write_text(write_page([*load_rows().values()]), encoding="utf-8")
        return 0
    if options.models:
        return 0 if plan_models(options.only, options.again, options.at_most) else 1
    large = (
        LARGE if options.graphs else [(model, f"{arguments} {EAGER}") for model, arguments in LARGE]
    )
    cases = [case for case in large if re.search(options.only, " ".join(case))]
    rows = []
    for case in cases:
        rows.append(plan(*case, options.stack))
        print(show(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    failed = [row for row in rows if "error" in row]
    if options.graphs:
        return 1 if failed else 0
    above = [r for r in rows if r["seconds"] > LIMIT_SECONDS or r["host_peak_bytes"] > LIMIT_BYTES]
    for row in above:
        print(
            f"above {LIMIT_SECONDS:g} s or {LIMIT_BYTES >> 30} GiB: {row['model']} "
            f"{row['arguments']}"
        )
    return 1 if failed or above else 0


if __name__ == "__main__":
    sys.exit(main())
