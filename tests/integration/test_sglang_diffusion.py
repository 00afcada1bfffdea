"""SGLang's diffusion runtime on the simulated device, recorded: a Z-Image of a few layers with random
weights makes an image. The tables of docs/engines.md are what these tests print (``pytest -s``).

The packages that the runtime needs besides are in no stack (docs/engines.md has the command that
adds them); without them these tests are skipped.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import (
    RunResult,
    finish,
    require_stack,
    run_in_engine,
    start_memprof,
)
from tests.support.planted import plant
from vllm_memprof.engines import ENGINES
from vllm_memprof.launch.interpreter import probe_interpreter
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.runtime import prepare_runtime
from vllm_memprof.units import GIB, MIB

pytestmark = [pytest.mark.sim, pytest.mark.full, pytest.mark.timeout(600)]

STACK = "sglang-0.5.23"
DIFFUSION = ENGINES["sglang-diffusion"]
ARGS = [
    "--engine", "sglang-diffusion", "--device", "sim:910b", "--stack", STACK, "--log-level",
    "debug", "--width", "256", "--height", "256", "--num-inference-steps", "3", "--seed", "1",
]  # fmt: skip
COMPONENTS = ["transformer", "text_encoder", "vae", "tokenizer", "scheduler"]
#: As the classes are called; the runtime prints the denoising stage under another name.
STAGES = [
    "InputValidationStage",
    "TextEncodingStage",
    "LatentPreparationStage",
    "TimestepPreparationStage",
    "ProgressiveDenoisingStageRouter",
    "DecodingStage",
]

#: Writes the pipeline into the folder of argv[1], with the tokenizer of the folder of argv[2].
WRITE = """
import json, shutil, sys
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3Model

out, preset = Path(sys.argv[1]), Path(sys.argv[2])
torch.manual_seed(0)
AutoencoderKL(
    in_channels=3, out_channels=3, latent_channels=16, block_out_channels=(16, 16, 16, 16),
    down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    layers_per_block=1, norm_num_groups=4, use_quant_conv=False, use_post_quant_conv=False,
    scaling_factor=0.3611, shift_factor=0.1159,
).to(torch.bfloat16).save_pretrained(out / "vae")
FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(out / "scheduler")
ZImageTransformer2DModel(
    dim=512, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=256,
    axes_dims=[32, 48, 48], axes_lens=[1024, 512, 512], in_channels=16,
).to(torch.bfloat16).save_pretrained(out / "transformer")
# the runtime asks for these under other names
path = out / "transformer" / "config.json"
config = json.loads(path.read_text())
path.write_text(json.dumps({**config, "num_attention_heads": 4, "num_layers": 2}))
words = json.loads((preset / "config.json").read_text())["vocab_size"]
Qwen3Model(
    Qwen3Config(
        vocab_size=words, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
    )
).to(torch.bfloat16).save_pretrained(out / "text_encoder")
(out / "tokenizer").mkdir()
for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(preset / name, out / "tokenizer")
index = {
    "_class_name": "ZImagePipeline",
    "_diffusers_version": "0.37.0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3Model"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "ZImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
(out / "model_index.json").write_text(json.dumps(index))
print("RESULT " + json.dumps(None))
"""

#: Attention does not compute on the simulated device: its output is what the memory held. The
#: runtime refuses a stage whose output holds a NaN, which it does by chance.
UNCHECKED = """
def register():
    from sglang.multimodal_gen.runtime.pipelines_core.stages.base import PipelineStage

    PipelineStage._run_verification = lambda *args: None
"""
#: The debug line of each stage with the reading that empties the cache, as up to 0.5.11.
EMPTIES = (
    UNCHECKED
    + """
    import inspect, textwrap
    from sglang.multimodal_gen.runtime.utils import perf_logger

    lines, first = inspect.getsourcelines(perf_logger.StageProfiler.__enter__)
    source = textwrap.dedent("".join(lines))
    assert "empty_cache=False" in source
    source = "\\n" * (first - 1) + source.replace("empty_cache=False", "empty_cache=True")
    made = {}
    exec(compile(source, perf_logger.__file__, "exec"), vars(perf_logger), made)
    perf_logger.StageProfiler.__enter__ = made["__enter__"]
"""
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pipeline whose folder is called as the runtime knows its kind by."""
    runtime = prepare_runtime("910b", require_stack(STACK))
    facts = probe_interpreter(runtime.python, {**os.environ, **runtime.env})
    if not facts.has_engine(DIFFUSION):
        pytest.skip(f"the stack lacks the packages of the diffusion runtime: {DIFFUSION.needs}")
    folder = tmp_path_factory.mktemp("diffusion")
    (folder / "write.py").write_text(WRITE)
    target = folder / "tiny-Z-Image-Turbo"
    target.mkdir()
    preset = resolve_model("memprof/tiny", []).path
    run_in_engine(
        runtime, folder / "write.py", str(target), preset, TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    return str(target)


def generate(model: str, run_dir: Path, prompts: int, planted: str) -> RunResult:
    env = plant(Path(f"{run_dir}.plugin"), planted, "sglang.multimodal_gen.plugins")
    env["SGLANG_DIFFUSION_CACHE_ROOT"] = f"{run_dir}.cache"
    args = ["offline", model, *ARGS, "--output-path", f"{run_dir}.images"]
    args += [f"--prompt=picture {number}" for number in range(prompts)]
    process = start_memprof(args, run_dir, env={**os.environ, **env})
    run = finish(process, run_dir)
    assert run.returncode == 0, run.output[-3000:]
    assert len(list(Path(f"{run_dir}.images").glob("*.png"))) == prompts
    return run


def phases_of(run: RunResult, phase: str) -> list[dict[str, Any]]:
    [rank] = run.report["ranks"]
    return [each for each in rank["phases"] if each["phase"] == phase]


def is_reading(call: dict[str, Any]) -> bool:
    return any(entry.endswith(".get_available_gpu_memory") for entry in call["chain"])


def figures(log: str) -> list[float]:
    """Return the free memory that the runtime prints at the start of each stage, in GiB."""
    return [float(found) for found in re.findall(r"started\.\.\. \(([\d.]+) GB left\)", log)]


@pytest.fixture(scope="module")
def as_it_is(model: str, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return generate(model, tmp_path_factory.mktemp("as_it_is") / "run", 2, UNCHECKED)


def test_a_request_is_a_row_of_stages(as_it_is: RunResult) -> None:
    report = as_it_is.report
    assert report["run"]["engine"] == "sglang-diffusion"
    assert report["not_measured"] == []
    [rank] = report["ranks"]
    assert rank["label"] == "rank 0"
    loaded = [each["detail"]["name"] for each in phases_of(as_it_is, "component_load")]
    assert loaded == COMPONENTS
    stages = phases_of(as_it_is, "stage")
    assert [each["detail"]["name"] for each in stages] == STAGES * 2
    requests = [each["order"] for each in phases_of(as_it_is, "request")]
    assert [each["parent"] for each in stages] == [requests[0]] * 6 + [requests[1]] * 6
    for phase in rank["phases"]:
        if phase["phase"] != "empty_cache":
            assert not any(edge["unexplained_bytes"] for edge in phase["owners"].values())
    bad = {"missing", "never_called", "error", "overwritten"}
    hooks = [event for event in as_it_is.events() if event["kind"] == "hook"]
    assert {"sgd.role.worker", "sgd.weight_load", "sgd.stage"} <= {hook["hook"] for hook in hooks}
    assert not [hook for hook in hooks if hook["need"] == "required" and hook["state"] in bad]
    assert not [event for event in as_it_is.events() if event["kind"] == "error"]


def test_the_figures_of_the_log_are_those_of_the_phases(as_it_is: RunResult) -> None:
    """The line of a stage is printed at its start, after memprof's own reading."""
    read = [each["before"]["device_free_bytes"] / GIB for each in phases_of(as_it_is, "stage")]
    assert figures(as_it_is.engine_log) == [pytest.approx(each, abs=0.0051) for each in read]


def test_readings_empty_the_cache_while_the_parts_are_loaded(as_it_is: RunResult) -> None:
    [rank] = as_it_is.report["ranks"]
    calls = rank["empty_cache"]
    for call in calls:
        print(f"\n{call['phase']} {call['site']} {call['function']}: {call['freed_bytes']} bytes")
    assert {call["phase"] for call in calls} == {"component_load", "weight_load"}
    readings = [call for call in calls if is_reading(call)]
    assert [call["function"] for call in readings].count("ComponentLoader.load") == 10
    [finding] = [f for f in as_it_is.report["findings"] if f["id"] == "observation-empties-cache"]
    assert f"{len(readings)} calls" in finding["evidence"]
    assert "sglang's reading of free memory, also for its log lines" in finding["evidence"]


def test_lines_of_stages_that_empty_the_cache(
    model: str, as_it_is: RunResult, tmp_path: Path
) -> None:
    """As up to 0.5.11 (sgl-project/sglang#24397): each line then prints what the call has left."""
    run = generate(model, tmp_path / "run", 2, EMPTIES)
    [rank] = run.report["ranks"]
    calls = [call for call in rank["empty_cache"] if call["phase"] == "stage"]
    assert all(is_reading(call) and call["while_serving"] for call in calls)
    assert len(calls) == len(STAGES) * 2
    assert all(call["site"].startswith("perf_logger.py:") for call in calls)
    stages = phases_of(run, "stage")
    parents = [each["parent"] for each in phases_of(run, "empty_cache")]
    assert parents[-len(stages) :] == [stage["order"] for stage in stages]
    plain = phases_of(as_it_is, "stage")
    printed = zip(figures(as_it_is.engine_log), figures(run.engine_log), strict=True)
    for stage, other, call, (left, emptied) in zip(stages, plain, calls, printed, strict=True):
        print(
            f"\n{stage['detail']['name']}: freed {call['freed_bytes'] / MIB:.0f} MiB, "
            f"{call['seconds'] * 1e3:.2f} ms; printed {left:.2f}, {emptied:.2f} GB; reserved after "
            f"{other['after']['reserved_bytes'] / MIB:.0f}, "
            f"{stage['after']['reserved_bytes'] / MIB:.0f} MiB"
        )
    freed = sum(call["freed_bytes"] for call in calls)
    assert freed > 16 * MIB
    [finding] = [f for f in run.report["findings"] if f["id"] == "observation-empties-cache"]
    assert finding["severity"] == "warning"
    assert finding["bytes"] >= freed
    plain_figures, emptied_figures = figures(as_it_is.engine_log), figures(run.engine_log)
    assert min(emptied_figures) > min(plain_figures), "the line hides what the cache held"
    encoded = [each["after"]["reserved_bytes"] for each in (plain[1], stages[1], stages[7])]
    assert len(set(encoded)) == 1, "what was freed is taken again"
