"""Measures a plan's seconds and the host memory of all its processes at the worst moment.

Without options: large models on one rank of many, against the limits of 20 s and 4 GiB; the exit
status is 1 where one is above. ``--models`` plans every model preset, and writes
``docs/models.json`` and the page made from it; ``--check`` compares that page with the file, and
starts nothing.

Host memory is the sum of the proportional set sizes (a page that processes share counts once), read
every 0.2 s. Each plan is a first one: vLLM's cache of compiled models and of what it knows of a
model's class is empty.

    .venv/bin/python scripts/bench_plan.py [--graphs] [--only REGEX] [--json FILE] [--stack NAME]
    .venv/bin/python scripts/bench_plan.py --models [--only REGEX]
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

LIMIT_SECONDS = 20.0
LIMIT_BYTES = 4 << 30
ROOT = Path(__file__).parent.parent
DATA = ROOT / "docs" / "models.json"
PAGE = ROOT / "docs" / "models.md"
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
#: Devices on which a model is planned for the list: the tensor-parallel size at which people serve
#: it, or the least.
MODELS = {
    "Qwen/Qwen2-0.5B-Instruct": (1,),
    "Qwen/Qwen1.5-MoE-A2.7B": (1,),
    "Qwen/Qwen3-Embedding-0.6B": (1,),
    "tencent/Hunyuan-A13B-Instruct": (4,),
    "Qwen/Qwen3-0.6B": (1,),
    "Qwen/Qwen3-1.7B": (1,),
    "Qwen/Qwen3-4B": (1,),
    "Qwen/Qwen3-8B": (1,),
    "Qwen/Qwen3-14B": (1, 2),
    "Qwen/Qwen3-32B": (2, 4),
    "Qwen/Qwen3-30B-A3B": (2,),
    "Qwen/Qwen3-235B-A22B": (16,),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (4,),
    "Qwen/Qwen3-VL-4B-Instruct": (1,),
    "Qwen/Qwen3-VL-8B-Instruct": (1,),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (2,),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": (16,),
    "Qwen/Qwen2.5-VL-7B-Instruct": (1,),
    "Qwen/Qwen2.5-VL-72B-Instruct": (4,),
    "deepseek-ai/DeepSeek-V3": (32,),
    "deepseek-ai/DeepSeek-R1": (32,),
    "meta-llama/Meta-Llama-3-8B-Instruct": (1,),
    "meta-llama/Meta-Llama-3-70B-Instruct": (4,),
    "meta-llama/Llama-3.1-8B-Instruct": (1,),
    "meta-llama/Llama-3.1-70B-Instruct": (4,),
    "zai-org/GLM-4-32B-0414": (2,),
    "openai/gpt-oss-20b": (1,),
    "openai/gpt-oss-120b": (8,),
}
#: The same in W8A8 (``--quantization ascend``).
QUANTIZED = {
    "Qwen/Qwen3-32B": (4,),
    "Qwen/Qwen3-30B-A3B": (2,),
    "Qwen/Qwen3-235B-A22B": (8,),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (4,),
    "Qwen/Qwen2.5-VL-72B-Instruct": (4,),
    "deepseek-ai/DeepSeek-V3": (16,),
    "meta-llama/Llama-3.1-70B-Instruct": (4,),
    "deepseek-ai/DeepSeek-V4-Flash": (16,),
    "zai-org/GLM-5": (16,),
    "zai-org/GLM-5.1": (16,),
}
#: Context of the models that do not have 32,768 tokens.
SHORTER = {
    "Qwen/Qwen1.5-MoE-A2.7B": 8192,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8192,
    "meta-llama/Meta-Llama-3-70B-Instruct": 8192,
}


def plan(model: str, arguments: str, stack: str | None) -> dict[str, Any]:
    """One plan in processes of its own: what it took, and the figures of the rank that ran."""
    with tempfile.TemporaryDirectory(prefix="memprof-bench-") as folder:
        command = [
            sys.executable,
            "-m",
            "vllm_memprof",
            "plan",
            model,
            "--device",
            "sim:910b",
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
        env = {**os.environ, "VLLM_CACHE_ROOT": folder + "/vllm"}
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
        if engine.returncode:
            return {**row, "error": text[-2000:]}
        report = json.loads((Path(folder) / "run" / "report.json").read_text())
    rank = report["ranks"][0]
    terms = {term["name"]: term["bytes"] for term in rank["budget"]["terms"]}
    kv = {name: rank["kv"][name] for name in ("tokens", "max_concurrency", "max_model_len")}
    return {
        **row,
        "weights_bytes": terms["weights"],
        "kv_cache_bytes": rank["budget"]["engine_kv_cache_bytes"],
        **kv,
    }


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
        return f"{cost}  {row['model']} {row['arguments']}: FAILED\n{row['error']}"
    sizes = f"weights {_gib(row['weights_bytes'])} GiB, KV {_gib(row['kv_cache_bytes'])} GiB"
    sizes += f", {row['tokens']:,} tokens"
    return f"{cost}  {row['model']} {row['arguments']}: {sizes}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f}"


def cases_of_models() -> list[tuple[str, str]]:
    """Model and arguments of every row of the list."""
    cases = []
    for options, table in (("", MODELS), (" --quantization ascend", QUANTIZED)):
        for model, sizes in table.items():
            for size in sizes:
                length = (
                    LENGTH.replace("32768", str(SHORTER[model])) if model in SHORTER else LENGTH
                )
                cases.append((model, f"--tensor-parallel-size {size} {length} {EAGER}{options}"))
    return cases


def write_page(rows: list[dict[str, Any]]) -> str:
    """The page of the models, from the rows of the data file."""
    lines = [
        "# Models without weights",
        "",
        "Presets (all: `memprof sim list`), planned by the real engine (vllm-ascend 0.23.0) on a",
        "simulated Ascend 910B with 60.96 GiB: what one rank holds, with `--max-model-len 32768`",
        "(Llama 3, Qwen1.5-MoE: 8192), `--enforce-eager`, the engine's defaults. The weights are",
        "measured; the KV cache is what the engine grants, and contains what the simulation models",
        "([what is exact](concepts/simulation.md), [how far off](accuracy.md)). Made by",
        "`scripts/bench_plan.py --models`, from [models.json](models.json).",
        "",
        "| model | TP | weights, GiB | KV cache, GiB | tokens |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in sorted(
        rows,
        key=lambda row: (
            row["model"].lower(),
            "quantization" in row["arguments"],
            row["arguments"],
        ),
    ):
        words = row["arguments"].split()
        name = row["model"] + (", W8A8" if "--quantization" in words else "")
        size = words[words.index("--tensor-parallel-size") + 1]
        sizes = f"{_gib(row['weights_bytes'])} | {_gib(row['kv_cache_bytes'])} | {row['tokens']:,}"
        lines.append(f"| {name} | {size} | {sizes} |")
    return "\n".join(lines) + "\n" + NOTES


NOTES = """
- Expert models are divided over the ranks as the engine does it without `--enable-expert-parallel`.
- DeepSeek-V3 and R1, gpt-oss: bfloat16. Their public checkpoints are FP8 and MXFP4, which
  vllm-ascend does not take on 910B and 910C; people convert them, or use W8A8.
- W8A8: `--quantization ascend`. For a preset, or a folder without weights, memprof generates the
  description of the quantized weights (`quant_model_description.json`), with 8 bits in those layers
  that the W8A8 models published for Ascend quantize: attention and MLP projections and experts; not
  embeddings, output head, norms, routers, vision towers, and of DeepSeek's attention not
  `kv_b_proj`. A model of your own with another choice: put its file beside config.json. Not
  generated for gpt-oss.
- Without `--enforce-eager` the engine compiles the model before it measures: Qwen3-235B-A22B with
  TP=16 took 34 s at the first time instead of 12 (20 s again, from the engine's cache), and gave
  616,832 tokens instead of 616,960. Where one rank is planned, pieces of the model that are alike
  are compiled once.
- Another model: a folder with its `config.json` alone is enough. What is missing (tokenizer,
  preprocessor) is generated in a folder of memprof's cache, with links to its files; the folder
  itself is only read. Files of a processor (images, audio, video) are those of the model's kind: of
  the kinds with a preset, and of Qwen3.5 and Qwen2.5-Omni, with the patches and token ids of the
  configuration. They decide how large the multimodal profile is, and a note names them. Of another
  kind they have to lie in the folder.
- Tokens of a hybrid model (Qwen3-Next) are the engine's own figure: its concurrency times the
  length. The states of its linear attention do not grow with a request, so half as long requests
  are not twice as many.
"""


def _keep(row: dict[str, Any]) -> None:
    """Write a row into the data file, and the page again; a failed plan changes nothing."""
    if "error" in row:
        return
    before = json.loads(DATA.read_text()) if DATA.exists() else []
    known = {(each["model"], each["arguments"]): each for each in [*before, row]}
    kept = [known[case] for case in cases_of_models() if case in known]
    DATA.write_text("[\n" + ",\n".join(" " + json.dumps(each) for each in kept) + "\n]\n")
    PAGE.write_text(write_page(kept))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--models", action="store_true", help="plan every preset, write docs/models.json and .md"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit status 1 when docs/models.md differs"
    )
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
        same = PAGE.read_text() == write_page(json.loads(DATA.read_text()))
        print(
            ""
            if same
            else "docs/models.md differs from docs/models.json: run scripts/bench_plan.py --models"
        )
        return 0 if same else 1
    large = (
        LARGE if options.graphs else [(model, f"{arguments} {EAGER}") for model, arguments in LARGE]
    )
    every = cases_of_models() if options.models else large
    cases = [case for case in every if re.search(options.only, " ".join(case))]
    rows = []
    for case in cases:
        rows.append(plan(*case, options.stack))
        print(show(rows[-1]), flush=True)
        if options.models:
            _keep(rows[-1])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    failed = [row for row in rows if "error" in row]
    if options.models or options.graphs:
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
