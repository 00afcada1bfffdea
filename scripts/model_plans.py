"""Rows of docs/models.json, and the page docs/models.md made from them.

In: `CASES`, and what plans of them gave. Out: a row per model, precision, stack and device; a plan
that does not start is a row with the reason. No engine here: scripts/bench_plan.py plans.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scripts.model_cases import CASES, DEVICES, STACKS, Case
from vllm_memprof.sim.profiles import load_profile

ROOT = Path(__file__).parent.parent
DATA = ROOT / "docs" / "models.json"
PAGE = ROOT / "docs" / "models.md"
Row = dict[str, Any]
Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Plan:
    """One row to be planned."""

    case: Case
    stack: str
    device: str

    @property
    def key(self) -> Key:
        """What makes a row another one; a row whose arguments changed is planned anew."""
        return (self.case.model, self.stack, self.device, self.case.arguments(self.device))


def list_plans() -> list[Plan]:
    """Return every row of the page, in the order in which they are planned."""
    return [Plan(case, stack, device) for case in CASES for stack in STACKS for device in DEVICES]


@cache
def constants_of(device: str) -> str:
    """Return a digest of the constants of a device's profile; figures depend on them."""
    return hashlib.sha256(repr(load_profile(device)).encode()).hexdigest()[:12]


def is_current(row: Row) -> bool:
    """Return whether a row was planned with the constants of today's profile."""
    return bool(row.get("constants") == constants_of(row["device"]))


def key_of(row: Row) -> Key:
    """Return the key of a row of the data file."""
    return (row["model"], row["stack"], row["device"], row["arguments"])


def load_rows(path: Path = DATA) -> dict[Key, Row]:
    """Return the rows of the data file."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {key_of(row): row for row in rows}


def keep_row(row: Row, path: Path = DATA) -> list[Row]:
    """Write a row into the data file, in the order of the plans; return all of its rows."""
    known = {**load_rows(path), key_of(row): row}
    kept = [known[plan.key] for plan in list_plans() if plan.key in known]
    path.write_text("[\n" + ",\n".join(" " + json.dumps(each) for each in kept) + "\n]\n")
    return kept


def write_page(rows: list[Row]) -> str:
    """Return the page, from the rows of the data file."""
    known = {key_of(row): row for row in rows}
    lines = [INTRODUCTION.strip()]
    for stack in STACKS:
        told, failed = [], []
        for case in sorted(CASES, key=lambda case: case.name.lower()):
            cells = []
            for device, title in DEVICES.items():
                row = known.get(Plan(case, stack, device).key)
                cells += [case.parallel[device], *_cells(row)]
                if row is not None and "error" in row:
                    failed += _wrapped(f"- {case.name}, {title}: {row['error']}")
            told.append("| " + " | ".join([case.name, *cells]) + " |")
        heads = [f"{title} | weights | KV cache | tokens" for title in DEVICES.values()]
        lines += [
            "",
            f"## {stack}",
            "",
            "| model | " + " | ".join(heads) + " |",
            "|---|" + "---|---:|---:|---:|" * len(DEVICES),
            *told,
        ]
        if failed:
            lines += ["", "What does not start, in the engine's words:", "", *failed]
    return "\n".join([*lines, "", *_sources()]) + "\n" + NOTES


def _cells(row: Row | None) -> list[str]:
    if row is None:
        return ["", "", "not planned"]
    if "error" in row:
        return ["", "", "does not start"]
    mark = "" if is_current(row) else "\\*"
    sizes = [_gib(row["weights_bytes"]), _gib(row["kv_cache_bytes"])]
    return [*sizes, f"{row['tokens']:,}{mark}"]


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f}"


def _sources() -> Iterator[str]:
    """Yield where the numbers of devices come from."""
    yield "## Where the numbers of devices come from"
    yield ""
    pages: dict[str, list[str]] = {}
    for case in CASES:
        pages.setdefault(case.page, []).append(case.name)
    for page, names in sorted(pages.items(), key=lambda item: (not item[0], item[0].lower())):
        where = f"vllm-ascend's `{page}`" if page else "No page of vllm-ascend; chosen here"
        yield from _wrapped(f"- {where}: {', '.join(sorted(set(names), key=str.lower))}.")


def _wrapped(text: str) -> Iterator[str]:
    line = ""
    for word in text.split():
        if len(line) + len(word) + 1 > 98:
            yield line
            line = "  " + word
        else:
            line = f"{line} {word}" if line else word
    yield line


INTRODUCTION = """
# Models without weights

Presets (all: `memprof sim list`), planned by the real engine on a simulated Ascend 910B with 60.96
GiB and on one die of an A3 with 61.27 GiB: what one rank holds, sizes in GiB, with
`--max-model-len 32768` (Llama 3, Qwen1.5-MoE: 8192), `--enforce-eager`, the engine's defaults. TP,
DP and PP are the sizes of tensor, data and pipeline parallelism, EP is `--enable-expert-parallel`:
as vllm-ascend's own pages recommend them, where they name the model
([below](#where-the-numbers-of-devices-come-from)). The weights are measured; the KV cache is what
the engine grants, and contains what the simulation models
([what is exact](concepts/simulation.md), [how far off](accuracy.md)). Tokens are those of one
data-parallel replica. "not planned": nobody has planned that row yet; \\*: planned with
constants of the device profile that have changed since. Made by
`python -m scripts.bench_plan --models`, from [models.json](models.json).
"""
NOTES = """
## Notes

- Expert models without EP are divided over the ranks as the engine does it.
- DeepSeek-V3 and R1, Kimi-K2, MiniMax-M2, gpt-oss: bfloat16, or W8A8 where the table says so. Their
  public checkpoints are FP8 and MXFP4, which vllm-ascend does not take on 910B and A3; people
  convert them, or use W8A8.
- W8A8: `--quantization ascend`. For a preset, or a folder without weights, memprof generates the
  description of the quantized weights (`quant_model_description.json`), with 8 bits in those layers
  that the W8A8 models published for Ascend quantize: attention and MLP projections and experts; not
  embeddings, output head, norms, routers, vision towers, of DeepSeek's attention not `kv_b_proj`,
  and of the linear attention of Qwen3-Next and Qwen3.5 not the output projection. A model of your
  own with another choice: put its file beside config.json. Not generated for gpt-oss,
  Qwen2.5-Omni and MiniCPM3. Layers for speculative decoding stay in bfloat16, those
  of DeepSeek-V4 aside.
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
- Qwen2.5-Omni: the thinker, which is what vLLM loads.
- gpt-oss-120b on A3: with TP4, as its page has it, 0.23.0 has 0.29 GiB left for the KV cache and
  0.30.0rc2 0.14, where one request of 32,768 tokens needs 0.32; so TP8 here.
- Hunyuan-A13B on 0.30.0rc2: its vLLM runs the model through the transformers library, and in that
  path vllm-ascend has not chosen how experts communicate.
- Tokens of a hybrid model (Qwen3-Next, Qwen3.5) are the engine's own figure: its concurrency times
  the length. The states of its linear attention do not grow with a request, so half as long
  requests are not twice as many.
"""
