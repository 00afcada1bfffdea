"""Rows of docs/models.json, and the page docs/models.md made from them.

In: `CASES`, and what plans of them gave. Out: a row per model, precision, stack and device; a plan
that does not start is a row with the reason. No engine here: scripts/bench_plan.py plans.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scripts.model_cases import CASES, DEVICES, Case
from vllm_memprof.layout import list_weights, text_config
from vllm_memprof.sim.presets import find_preset
from vllm_memprof.sim.profiles import flat_text, load_profile
from vllm_memprof.sim.quantization import describe

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
def constants_of(device: str, arguments: str) -> str:
    """Return a digest of the constants of a device's profile on which figures of a plan depend.

    Args:
        device: name of the profile.
        arguments: of the engine; where they ask for one device, nothing is exchanged.
    """
    lines = flat_text(load_profile(device)).splitlines()
    without: tuple[str, ...] = ("stream_count=", "event_count=", "other_chip_total_bytes=0")
    if set(re.findall(r"-parallel-size (\d+)", arguments)) <= {"1"}:
        without += ("hccl_base_bytes=",)
    kept = [line for line in lines if not line.startswith(without)]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:12]


def is_current(row: Row) -> bool:
    """Return whether a row was planned with the constants of today's profile."""
    digest = constants_of(row["device"], row.get("arguments", ""))
    return bool(row.get("constants") == digest)


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
    """Return the page of the first device, from the rows of the data file."""
    known = {key_of(row): row for row in rows}
    device = next(iter(DEVICES))
    told, refused = [], {}
    for case in sorted(CASES, key=lambda case: case.name.lower()):
        row = known.get(Plan(case, case.stacks[0], device).key)
        share = _gib(share_of(case, device))
        told.append(
            "| " + " | ".join([case.name, case.parallel[device], share, *_cells(row)]) + " |"
        )
        if row is not None and "error" in row:
            refused[case.name] = textwrap.shorten(row["error"], 160, placeholder="…")
    lines = [
        INTRODUCTION.strip(),
        "",
        "| model | devices | checkpoint | weights | KV cache | tokens |",
        "|---|---|---:|---:|---:|---:|",
        *told,
        "",
    ]
    for name, why in refused.items():
        said = f"- {name} does not start: {why}"
        lines += textwrap.wrap(said, 98, subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines) + "\n" + NOTES


def share_of(case: Case, device: str) -> int:
    """Return the bytes that one rank has of the checkpoint if nothing is there twice.

    Experts are divided over all ranks of expert parallelism, everything else over those of tensor
    parallelism.
    """
    sizes = dict(re.findall(r"([TD]P)(\d+)", case.parallel[device]))
    experts, rest = _bytes_of(case.model, case.quantized, "pooling" in case.more)
    ranks = int(sizes["TP"])
    everywhere = int(sizes.get("DP", 1)) if "EP" in case.parallel[device] else 1
    return round(experts / (ranks * everywhere) + rest / ranks)


@cache
def _bytes_of(model: str, quantized: bool, pooling: bool) -> tuple[float, float]:
    """Return the published weights of the experts and of everything else, bytes."""
    preset = find_preset(model)
    assert preset is not None, model
    four_bits = "w4a8" in model.lower()
    types = ((quantized or four_bits) and describe(preset.config, four_bits)) or {}
    packed = text_config(preset.config).get("quantization_config")
    found = [0.0, 0.0]
    for name, shape in (list_weights(preset.config) or {}).items():
        experts = ".experts." in name
        first = re.sub(r"\.experts\.\d+\.", ".experts.0.", name) if experts and types else name
        known = types.get(first, "FLOAT")
        bits: float = {"FLOAT": 16, "W4A8_DYNAMIC": 4}.get(known, 8)
        if packed and experts:  # values, and a scale of each group
            weights = packed["config_groups"]["group_0"]["weights"]
            bits = weights["num_bits"] + 16 / weights["group_size"]
        if name != "lm_head.weight" or not pooling:
            found[not experts] += math.prod(shape) * bits / 8
    return found[0], found[1]


def _cells(row: Row | None) -> list[str]:
    if row is None:
        return ["", "", "not planned"]
    if "error" in row:
        return ["", "", "does not start"]
    mark = "" if is_current(row) else "\\*"
    if row["kv_cache_bytes"] is None:  # an encoder
        return [_gib(row["weights_bytes"]), "none", mark]
    sizes = [_gib(row["weights_bytes"]), _gib(row["kv_cache_bytes"])]
    return [*sizes, f"{row['tokens']:,}{mark}"]


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f}"


INTRODUCTION = """
# Models without weights

Presets of the models that vllm-ascend's pages name (all, with other names: `memprof sim list`),
planned by vllm-ascend 0.23.0, or the release a row names, on a simulated Ascend 910B, 60.96 GiB:
one rank, GiB, `--max-model-len 32768`, or what the model has at most, `--enforce-eager`. TP, DP
and EP (`--enable-expert-parallel`) as those pages recommend. *checkpoint*: the rank's share of the
published weights. *weights*: measured; above it are what every rank has whole, scales, tables of
positions and formats of the device. The KV cache contains [modelled
values](concepts/simulation.md) ([how far off](accuracy.md)); tokens are those of one data-parallel
replica. \\*: planned with older device constants. Made by `python -m scripts.bench_plan --models`;
[models.json](models.json): A3 and 0.30.0rc2 as well.
"""
NOTES = """
## Notes

- DeepSeek, Kimi-K2-Instruct, MiniMax-M2, gpt-oss: bfloat16, or W8A8 if the table says so. Their
  public checkpoints are FP8 and MXFP4, which vllm-ascend does not take on 910B and A3.
- W8A8: `--quantization ascend`, or the name of a W8A8 or W4A8 checkpoint. Without weights memprof
  generates `quant_model_description.json` as msmodelslim's recipe of the model has it, or takes
  yours next to config.json.
- Kimi-K2-Thinking: `targets` of its quantization are MoE, as vllm-ascend's page asks for.
- A different model: a folder with its `config.json` is enough; missing files (tokenizer,
  preprocessor) are generated. A folder that is elsewhere is planned as the preset of its name.
- Qwen2.5-Omni and Qwen3-Omni: the thinker, which is what vLLM loads.
- Tokens of a hybrid model (Qwen3-Next, Qwen3.5) are the engine's value: concurrency × length.
"""
