"""A whole start-up and three requests of the miniature engine, sampled and not."""

from __future__ import annotations

from pathlib import Path

from vllm_memprof.record.samples import Served, load_samples

from .conftest import START_UP, Run

#: Two requests, the second with an image of 96 x 128 pixels; then what has replaced the functions.
SERVE = (
    START_UP
    + """
import time
run = executor()
runner = wrapper.worker.model_runner if wrapper.__dict__.get("worker") else None

def execute(output):
    runner = wrapper.worker.model_runner
    if runner.execute_model(output) is None:
        runner.sample_tokens(None)

run.execute_model = execute
core = EngineCore(run)

class Grid(list):
    def tolist(self):
        return list(self)
    device = SimpleNamespace(type="cpu")
    shape = (3,)

image = SimpleNamespace(
    modality="image", identifier="h", data={"image_grid_thw": SimpleNamespace(data=Grid([1, 8, 6]))},
    mm_position=SimpleNamespace(length=12),
)

def request(name, features):
    return SimpleNamespace(request_id=name, num_prompt_tokens=14, mm_features=features,
                           num_output_tokens=0, status=None)

for name, features in (("text", []), ("image", [image])):
    core.add_request(request(name, features))
    for _ in range(3):
        core.step_fn()
wrapper.worker.shutdown()

from vllm_ascend.worker.model_runner_v1 import Model, NPUModelRunner
from vllm.v1.core.sched.scheduler import AscendScheduler, Scheduler
for function in (
    NPUModelRunner.execute_model, NPUModelRunner.sample_tokens, Model.embed_multimodal,
    Model.embed_input_ids, EngineCore.step, EngineCore.add_request, Scheduler._free_request,
    AscendScheduler._free_request,
):
    print(function.__qualname__, hasattr(function, "__wrapped__"), function.__code__.co_filename)
"""
)


def served(folder: Path) -> Served:
    [process] = (folder / "samples").iterdir()
    return load_samples(folder, process.name)


def test_without_sampling_every_function_in_the_path_of_a_token_is_the_engines_own(
    run_engine: Run, tmp_path: Path
) -> None:
    recorded = run_engine(SERVE)
    assert recorded.code == 0, recorded.err
    assert not (tmp_path / "samples").exists()
    lines = recorded.out.split("\n")
    functions = [line for line in lines if " True " in line or " False " in line]
    assert len(functions) == 8
    for line in functions:
        _, wrapped, file = line.split(" ", 2)
        assert wrapped == "False", line
        assert "fakes" in file, line


def test_with_sampling_each_step_request_and_stage_is_written(
    run_engine: Run, tmp_path: Path
) -> None:
    recorded = run_engine(SERVE, MEMPROF_SAMPLE="1")
    assert recorded.code == 0, recorded.err
    assert not recorded.kind("error")
    assert recorded.out.count(" True ") == 8
    found = served(tmp_path)
    assert [each.step for each in found.samples] == [1, 2, 3, 4, 5, 6]
    assert [each.figures["kv_blocks_used"] for each in found.kv_samples] == [3, 0, 0, 3, 0, 0]
    assert found.kv_samples[0].figures["kv_blocks_total"] == 10

    text, image = found.requests
    assert (text.id, text.prompt_tokens, text.output_tokens) == ("text", 14, 2)
    assert (image.items[0].size, image.reason) == ([96, 128], "FINISHED_STOPPED")

    assert [each.stage for each in found.stages] == ["mm_encoder", "mm_cache_insert", "mm_merge"]
    encoder, insert, merge = found.stages
    assert encoder.requests == ("image",)
    assert encoder.figures["allocated_total_bytes"] == 60
    assert insert.figures["encoder_cache_bytes"] == 20
    assert merge.figures["allocated_total_bytes"] == 250

    alone, with_image = found.request_memory
    assert (alone.left_allocated_bytes, alone.others) == (3, 0)  # three steps sample, one byte each
    assert with_image.left_allocated_bytes == 23
    assert (with_image.peak_exact, with_image.peak_stage) == (True, "mm_merge")


def test_the_profile_run_says_that_it_merged_nothing(run_engine: Run) -> None:
    recorded = run_engine(SERVE, MEMPROF_SAMPLE="1")
    [before, after] = recorded.edges("profile_run")
    assert before["detail"] == {}
    assert after["detail"] == {"mm_merge_ran": False}


def test_a_rate_of_steps_is_kept(run_engine: Run, tmp_path: Path) -> None:
    run_engine(SERVE, MEMPROF_SAMPLE="5")
    found = served(tmp_path)
    # the fifth, and the two in which a request is seen to have gone
    assert {each.step for each in found.kv_samples} == {5}
    assert {each.step for each in found.samples} >= {3, 6}
    assert len(found.request_memory) == 2


#: A memory history of torch, whose snapshot may fail.
HISTORY = """
import torch_npu

class memory:
    @staticmethod
    def _record_memory_history(enabled, **kwargs):
        print("history", enabled)

    @staticmethod
    def _snapshot():
        {body}

torch_npu.npu.memory = memory
"""
FINE = 'return {"segments": [], "device_traces": []}'


def serve_with(body: str) -> str:
    return SERVE.replace(
        "core = EngineCore(run)", HISTORY.replace("{body}", body) + "core = EngineCore(run)"
    )


def test_allocations_are_traced_over_requests_and_written_once(
    run_engine: Run, tmp_path: Path
) -> None:
    recorded = run_engine(serve_with(FINE), MEMPROF_SAMPLE="1", MEMPROF_TRACE_ALLOCATIONS="1")
    assert recorded.code == 0, recorded.err
    assert not recorded.kind("error")
    events = {event["memory"]: event for event in recorded.kind("allocations")}
    assert len(recorded.kind("allocations")) == 2
    assert [(each["asked"], each["requests"]) for each in events.values()] == [(1, 1)] * 2
    assert events["host"]["stacks"]
    assert events["device"]["snapshot"] is not None
    assert (tmp_path / events["device"]["snapshot"]).exists()
    assert [line for line in recorded.out.split("\n") if line.startswith("history")] == [
        "history all",
        "history None",
    ]


def test_without_the_option_nothing_is_traced(run_engine: Run, tmp_path: Path) -> None:
    recorded = run_engine(serve_with(FINE), MEMPROF_SAMPLE="1")
    assert "history" not in recorded.out
    assert not recorded.kind("allocations")
    assert not (tmp_path / "allocations").exists()


def test_a_history_that_fails_ends_the_tracing_and_no_step(run_engine: Run, tmp_path: Path) -> None:
    body = 'raise RuntimeError("no history")'
    recorded = run_engine(serve_with(body), MEMPROF_SAMPLE="1", MEMPROF_TRACE_ALLOCATIONS="1")
    assert recorded.code == 0, recorded.err
    [error] = recorded.kind("error")
    assert error["where"] == "tracing of device allocations"
    assert [event["memory"] for event in recorded.kind("allocations")] == ["host"]
    assert "history None" in recorded.out  # it is off again
    assert len(served(tmp_path).samples) == 6
