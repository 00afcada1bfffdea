"""Rows of docs/models.json, and the page docs/models.md made from them.

In: `CASES`, and what plans of them gave. Out: a row per model, precision, stack and device; a plan
that does not start is a row with the reason. No engine here: scripts/bench_plan.py plans.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scripts.model_cases import CASES, DEVICES, STACKS, Case
from vllm_memprof.sim.profiles import flat_text, load_profile

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
    return [
        Plan(case, stack, device)
        for case in CASES
        for stack in case.stacks
        for device in case.parallel
    ]


@cache
def constants_of(device: str) -> str:
    """Return a digest of the constants of a device's profile on which figures depend."""
    lines = flat_text(load_profile(device)).splitlines()
    kept = [line for line in lines if not line.startswith(("stream_count=", "event_count="))]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:12]


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
    """Return the page of the default stack, from the rows of the data file."""
    known = {key_of(row): row for row in rows}
    told, failed = [], {}
    for case in sorted(CASES, key=lambda case: case.name.lower()):
        cells = []
        for device in DEVICES:
            row = known.get(Plan(case, STACKS[0], device).key)
            cells += [case.parallel[device], *_cells(row)]
            if row is not None and "error" in row:
                failed[case.name] = textwrap.shorten(row["error"], 160, placeholder="…")
        told.append("| " + " | ".join([case.name, *cells]) + " |")
    heads = [f"{title} | weights | KV cache | tokens" for title in DEVICES.values()]
    lines = [
        INTRODUCTION.strip(),
        "",
        "| model | " + " | ".join(heads) + " |",
        "|---|" + "---|---:|---:|---:|" * len(DEVICES),
        *told,
        "",
    ]
    for name, why in failed.items():
        said = f"- {name} does not start: {why}"
        lines += textwrap.wrap(said, 98, subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines) + "\n" + NOTES


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


INTRODUCTION = """
# Models without weights

Presets (all: `memprof sim list`), planned by vllm-ascend 0.23.0 on a simulated Ascend 910B (60.96
GiB) and one die of an A3 (61.27 GiB): one rank, GiB, `--max-model-len 32768` (Llama 3 and
Qwen1.5-MoE 8192), `--enforce-eager`. TP, DP and EP (`--enable-expert-parallel`) as vllm-ascend's
pages recommend them (`scripts/model_cases.py` names the page). Weights are measured, the KV cache
contains [modelled values](concepts/simulation.md) ([how far off](accuracy.md)); tokens are those of
one data-parallel replica. \\*: planned with older constants of the device. Made by `python -m
scripts.bench_plan --models`; [models.json](models.json) has 0.30.0rc2 as well.
"""
NOTES = """
## Notes

- DeepSeek-V3 and R1, Kimi-K2, MiniMax-M2, gpt-oss: bfloat16, or W8A8 if the table says so. Their
  public checkpoints are FP8 and MXFP4, which vllm-ascend does not take on 910B and A3.
- W8A8: `--quantization ascend`. Without weights memprof generates `quant_model_description.json`
  (8 bits in attention and MLP projections and experts), or takes yours next to config.json. Not
  generated for gpt-oss, Qwen2.5-Omni and MiniCPM3.
- A different model: a folder with its `config.json` is enough; missing files (tokenizer,
  preprocessor) are generated.
- Qwen2.5-Omni: the thinker, which is what vLLM loads.
- gpt-oss-120b on A3 with TP4, as its page has it, has 0.29 GiB for the KV cache; one request of
  32,768 tokens needs 0.32: so TP8 here.
- Tokens of a hybrid model (Qwen3-Next, Qwen3.5) are the engine's value: concurrency × length.
"""
