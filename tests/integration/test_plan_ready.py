"""``memprof plan --until ready``: the engine's largest batches, and the same batches by ``vllm.LLM``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import (
    OLD_STACK,
    STACK,
    RunResult,
    finish,
    read_events,
    require_stack,
    run_in_engine,
    start_memprof,
)
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.runtime import prepare_runtime

pytestmark = [pytest.mark.sim, pytest.mark.timeout(900)]

#: The batches of a plan, handed to ``vllm.LLM`` as prompts; images and videos of the same sizes,
#: each of its own noise, through its own front end.
OFFLINE = """
import json, sys, time, types
import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams
from vllm_memprof.engines.vllm import batch_limits, full_step, multimodal_batch

MARKS = {"image": "image_token_id", "video": "video_token_id"}


def another(source, random):
    if isinstance(source, Image.Image):
        noise = random.integers(0, 255, (source.height, source.width, 3), dtype=np.uint8)
        return Image.fromarray(noise)
    frames, metadata = source
    return random.integers(0, 255, frames.shape, dtype=np.uint8), metadata


def asked(prompt, config, random):
    if not prompt.items:
        return {"prompt_token_ids": prompt.tokens}
    modality = prompt.items[0].modality
    one = [config.vision_start_token_id, getattr(config, MARKS[modality]), config.vision_end_token_id]
    data = [another(item.source, random) for item in prompt.items]
    return {
        "prompt_token_ids": one * len(data) + prompt.text, "multi_modal_data": {modality: data}
    }


if __name__ == "__main__":
    llm = LLM(**json.loads(sys.argv[1]))
    # its workers get 4 seconds to end: of eight on two cores some are killed before their last reading
    from vllm.v1.executor import multiproc_executor  # not before the workers have been forked
    slow = {**vars(time), "time": lambda: time.time() / 20}
    multiproc_executor.time = types.SimpleNamespace(**slow)
    config, core = llm.llm_engine.vllm_config, llm.llm_engine.engine_core.engine_core
    limits, random = batch_limits.Limits.of(config), np.random.default_rng(0)
    found = multimodal_batch.largest(config, core.scheduler, limits)
    order = sorted(found, key=multimodal_batch.Batch.largest_item, reverse=True)
    media = [batch.prompts for batch in order if batch.prompts]
    for batch in [*media, *full_step.text_of(limits)]:
        prompts = [asked(prompt, config.model_config.hf_config, random) for prompt in batch]
        sampling = SamplingParams(**full_step.SAMPLING, max_tokens=batch[0].new_tokens)
        llm.generate(prompts, sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    print("RESULT {}")
"""
#: Peaks of a process until its end, bytes.
PEAKS = ("allocated_run_peak_bytes", "reserved_run_peak_bytes")
#: What serving leaves beside torch, bytes, at a moment that both runs have: before the shutdown.
BESIDE = ("npu_workspace_bytes", "graph_pool_bytes")


def plan(run_dir: Path, model: str, *args: str, stack: str = STACK) -> RunResult:
    command = ["plan", model, "--device", "sim:910b", "--stack", stack, "--until", "ready", *args]
    run = finish(start_memprof(command, run_dir), run_dir)
    assert run.returncode == 0, run.output[-3000:] + run.engine_log[-3000:]
    return run


def at_the_end(run_dir: Path) -> dict[int, dict[str, int]]:
    """Readings of each rank as its shutdown begins."""
    ranks: dict[str, int] = {}
    found: dict[int, dict[str, int]] = {}
    for event in read_events(run_dir):
        if event["kind"] == "identity":
            ranks[event["file"]] = event["rank"]
        if event["kind"] == "phase" and (event["phase"], event["edge"]) == ("shutdown", "before"):
            reading = event["snapshot"]
            found[ranks[event["file"]]] = {name: reading[name] for name in (*PEAKS, *BESIDE)}
    return found


def driven(model: str, stack: str, tmp_path: Path, **settings: Any) -> dict[int, dict[str, int]]:
    """The same of ``vllm.LLM``, which got the batches as prompts."""
    resolved = resolve_model(model, [])
    script, run_dir = tmp_path / "offline.py", tmp_path / "driven"
    script.write_text(OFFLINE)
    (run_dir / "events").mkdir(parents=True)
    env = {
        **resolved.env,
        "MEMPROF_SIM_STATE": str(tmp_path / "devices"),
        "MEMPROF_RUN_DIR": str(run_dir),
        "MEMPROF_SAMPLE": "1",
    }
    given = json.dumps({"model": resolved.path, "load_format": "dummy", **settings})
    run_in_engine(prepare_runtime("910b", stack), script, given, timeout_s=400, **env)
    return at_the_end(run_dir)


@pytest.mark.full
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_peaks_are_those_of_the_same_batches_by_llm(
    sim_stack: str, tmp_path: Path, eager: bool
) -> None:
    args = ["--max-model-len=4096", "--max-num-seqs=16", "--max-num-batched-tokens=1024"]
    args += ["--load-format=dummy", *(["--enforce-eager"] if eager else [])]
    run = plan(tmp_path / "run", "memprof/tiny", *args)
    step = run.info["full_step"]
    assert (step["prefill_tokens"], step["decode_requests"]) == (1024, 16)
    assert step["modalities"] == []
    assert 4096 - 128 < step["decode_length"] <= 4096
    report = run.report
    missing = {gap["phase"] for gap in report["not_measured"]}
    assert missing == ({"graph_capture"} if eager else set())
    [rank] = report["ranks"]
    assert rank["samples"], "every step was read"
    assert all(item["bytes"] is not None for item in rank["budget"]["held_at_peak"])
    found = at_the_end(tmp_path / "run")
    assert found == driven(
        "memprof/tiny", sim_stack, tmp_path,
        max_model_len=4096, max_num_seqs=16, max_num_batched_tokens=1024, enforce_eager=eager,
    )  # fmt: skip
    assert (found[0]["graph_pool_bytes"] > 0) is not eager


CASES = {
    "dense-eager": ("memprof/tiny", {"enforce_eager": True}),
    "dense-tp2": ("memprof/tiny", {"tensor_parallel_size": 2}),
    "moe-tp2-ep": (
        "memprof/tiny-moe",
        {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enforce_eager": True},
    ),
    "vl": ("memprof/tiny-vl", {"enforce_eager": True}),
    "without-prefixes": ("memprof/tiny", {"enable_prefix_caching": False, "enforce_eager": True}),
    "8b-tp2": ("Qwen/Qwen3-8B", {"tensor_parallel_size": 2}),
    "moe-tp2-ep-graphs": (
        "memprof/tiny-moe",
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
    # the largest image does not fit a request, and what fits leaves the encoder room for another
    "vl-tp2-graphs": (
        "memprof/tiny-vl",
        {"tensor_parallel_size": 2, "max_model_len": 900, "max_num_batched_tokens": 2500},
    ),
    # prompts of two steps: the second reads the cached part
    "mla-eager": (
        "memprof/tiny-mla",
        {"enforce_eager": True, "max_model_len": 4096, "max_num_batched_tokens": 2048},
    ),
    "mla-tp2-graphs": (
        "memprof/tiny-mla",
        {"tensor_parallel_size": 2, "max_model_len": 4096, "max_num_batched_tokens": 2048},
    ),
    "8b-tp8": ("Qwen/Qwen3-8B", {"tensor_parallel_size": 8, "enforce_eager": True}),
    "30b-moe-tp4-ep": (
        "Qwen/Qwen3-30B-A3B",
        {"tensor_parallel_size": 4, "enable_expert_parallel": True, "enforce_eager": True},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stack", [STACK, OLD_STACK])
def test_peaks_of_other_models(case: str, stack: str, tmp_path: Path) -> None:
    require_stack(stack)
    model, settings = CASES[case]
    # batched tokens as `vllm serve` has them on this device; LLM has other defaults
    settings = {
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        **settings,
    }
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        flags.append(f"--no-{flag}" if value is False else f"--{flag}")
        flags += [] if isinstance(value, bool) else [str(value)]
    flags += ["--load-format=dummy"]
    plan(tmp_path / "run", model, *flags, "--ranks", "all", stack=stack)
    found = at_the_end(tmp_path / "run")
    assert found == driven(model, stack, tmp_path, **settings)
    assert set(found) == set(range(settings.get("tensor_parallel_size", 1)))
    if len(found) > 1:  # and the one that a plan runs alone, which has the least, is as among all
        plan(tmp_path / "alone", model, *flags, "--ranks", "one", stack=stack)
        [(rank, peaks)] = at_the_end(tmp_path / "alone").items()
        assert peaks == found[rank]


@pytest.mark.full
def test_batches_that_a_rank_alone_cannot_have_are_refused(sim_stack: str, tmp_path: Path) -> None:
    command = [
        "plan", "memprof/tiny", "--device", "sim:910b", "--until", "ready", "--ranks", "one",
        "--pipeline-parallel-size", "2",
    ]  # fmt: skip
    run = finish(start_memprof(command, tmp_path / "run"), tmp_path / "run")
    assert run.returncode == 2
    assert "a pipeline stage alone gets no batch" in run.output
