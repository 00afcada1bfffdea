"""The unmodified SGLang on the simulated device, without memprof in it: it starts, it answers, and
what a tiny model computes is what the CPU computes.

CI runs SGLang through `test_sglang.py`; this is part of make test-full.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_tokens import NEW_TOKENS, ON_CPU, PROMPTS, SMALLER
from tests.support.engine import require_stack, run_in_engine
from tests.support.png import write_png
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.runtime import SimRuntime, prepare_runtime

pytestmark = [pytest.mark.sim, pytest.mark.full, pytest.mark.timeout(600)]

STACK = "sglang-0.5.23"

#: Starts an engine with the arguments of argv[1], runs the jobs of argv[2] one by one.
ON_DEVICE = """
import json, sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(**json.loads(sys.argv[1]))
    made = []
    for job in json.loads(sys.argv[2]):
        answers = engine.generate(**job)
        answers = answers if isinstance(answers, list) else [answers]
        made.append([(each["output_ids"], each["meta_info"]["prompt_tokens"]) for each in answers])
    engine.shutdown()
    print("RESULT " + json.dumps(made))
"""


@pytest.fixture
def runtime() -> SimRuntime:
    return prepare_runtime("910b", require_stack(STACK))


def run_engine(
    runtime: SimRuntime,
    tmp_path: Path,
    jobs: list[dict[str, Any]],
    env: dict[str, str],
    **engine: Any,
) -> tuple[list[list[tuple[list[int], int]]], str]:
    """Token ids and prompt lengths of each job, and the log."""
    script = tmp_path / "device.py"
    script.write_text(ON_DEVICE)
    arguments = {"random_seed": 1, "max_running_requests": 4, "log_level": "info", **engine}
    return run_in_engine(
        runtime,
        script,
        json.dumps(arguments),
        json.dumps(jobs),
        MEMPROF_SIM_STATE=str(tmp_path / "devices"),
        **env,
    )


def test_greedy_tokens_are_those_of_the_cpu(runtime: SimRuntime, tmp_path: Path) -> None:
    """In float32; with ``ASCEND_USE_FIA=1`` every attention is one that computes here."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("memprof/tiny", []).path, folder)
    config = json.loads((folder / "config.json").read_text())
    changed = {**config, **SMALLER["memprof/tiny"], "dtype": "float32", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(changed))
    (tmp_path / "cpu.py").write_text(ON_CPU)
    job = json.dumps({"prompts": PROMPTS, "new_tokens": NEW_TOKENS})
    cpu, _ = run_in_engine(
        runtime,
        tmp_path / "cpu.py",
        str(folder),
        "float32",
        job,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert len({token for made in cpu["tokens"] for token in made}) > 50

    greedy = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    alone = [{"input_ids": [each], "sampling_params": greedy} for each in PROMPTS]
    made, _ = run_engine(
        runtime,
        tmp_path,
        [*alone, {"input_ids": PROMPTS, "sampling_params": greedy}],
        {"ASCEND_USE_FIA": "1"},
        model_path=str(folder),
        dtype="float32",
        mem_fraction_static=0.3,
        max_total_tokens=4096,
        context_length=512,
        chunked_prefill_size=256,
        disable_cuda_graph=True,
        disable_radix_cache=True,
    )
    assert [answers[0][0] for answers in made[:-1]] == cpu["tokens"]
    assert [tokens for tokens, _ in made[-1]] == cpu["tokens"]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    ("model", "tp"),
    [("memprof/tiny", 1), ("memprof/tiny", 2), ("memprof/tiny-moe", 2), ("memprof/tiny-vl", 2)],
)
def test_every_kind_of_model_answers(
    runtime: SimRuntime, tmp_path: Path, model: str, tp: int, graphs: bool
) -> None:
    resolved = resolve_model(model, [])
    params = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    jobs = [{"input_ids": [list(range(1, 40)), list(range(5, 300))], "sampling_params": params}]
    if model.endswith("-vl"):
        images = []
        for number, size in enumerate([(64, 64), (160, 96), (224, 224)]):
            images.append(str(tmp_path / f"{number}.png"))
            write_png(Path(images[-1]), *size)
        picture = "<|vision_start|><|image_pad|><|vision_end|>"
        jobs.append(
            {"prompt": picture * 3 + "what?", "image_data": images, "sampling_params": params}
        )
    made, log = run_engine(
        runtime,
        tmp_path,
        jobs,
        resolved.env,
        model_path=resolved.path,
        load_format="dummy",
        tp_size=tp,
        disable_cuda_graph=not graphs,
        mem_fraction_static=0.5,
        context_length=4096,
    )
    assert [[len(tokens) for tokens, _ in answers] for answers in made] == [
        [5] * len(answers) for answers in made
    ]
    assert [length for _, length in made[0]] == [39, 295]
    if model.endswith("-vl"):
        # a token per 32 x 32 pixels: 4, 15 and 49, each picture between two marks
        assert made[1][0][1] > 4 + 15 + 49 + 6
    assert ("Capture target decode NPU graph end" in log) is graphs
    assert "computes nothing from here on" not in log
