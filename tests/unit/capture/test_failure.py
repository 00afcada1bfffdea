"""A failed allocation is read after its exception: chain, requests of the step, segments."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.capture.conftest import START_UP, Run
from vllm_memprof.capture import failure
from vllm_memprof.capture.failure import LOGGERS
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.record.failures import asked_for, is_out_of_memory, stage_of
from vllm_memprof.record.segments import pools_of

#: The allocator calls its observers and raises, as torch_npu does.
ALLOCATOR = """
from torch_npu import _C

def fail(size=5000):
    before = len(_C.listings)
    for callback in _C.observers:
        callback(0, size, _C.TOTAL, _C.free())
    print("listed in the callback:", len(_C.listings) - before)
    raise RuntimeError("NPU out of memory. Tried to allocate 4.88 KiB (NPU 0; ...)")
"""
#: A step that fails inside the merge of embeddings, and the worker's loop that logs it.
STEP = """
import logging, gc, weakref

class Output:
    num_scheduled_tokens = {"chat-1-abcd": 40, "chat-2-efgh": 1}
    scheduled_encoder_inputs = {"chat-1-abcd": [0]}

class Tensor:
    pass

kept = []

def _merge_multimodal_embeddings():
    activation = Tensor()
    kept.append(weakref.ref(activation))
    fail()

def execute_model(scheduler_output):
    _merge_multimodal_embeddings()

def step(log):
    try:
        execute_model(Output())
    except Exception:
        log.exception("WorkerProc hit an exception.")
"""
LOGGER = "vllm.v1.executor.multiproc_executor"


def test_a_failure_in_a_phase_is_read_once_with_its_chain_and_segments(run_engine: Run) -> None:
    code = START_UP + ALLOCATOR
    code += (
        "from vllm_ascend.worker.worker import NPUWorker\n"
        "class Model:\n"
        "    def embed_multimodal(self):\n"
        "        fail()\n"
        "plain = NPUWorker.determine_available_memory\n"
        "NPUWorker.determine_available_memory = lambda self: Model().embed_multimodal()\n"
        "EngineCore(executor())\n"
    )
    recorded = run_engine(code)

    assert recorded.code == 1
    assert "listed in the callback: 0" in recorded.out
    [oom], [failure] = recorded.edges("oom"), recorded.kind("failure")
    [before, _] = recorded.edges("profile_run")
    assert (failure["oom"], oom["parent"]) == (oom["id"], before["id"])
    assert failure["message"].startswith("RuntimeError: NPU out of memory. Tried to allocate")
    assert stage_of(failure["chain"]) == "mm_encoder"
    assert failure["chain"][0].endswith(":fail")
    assert failure["requests"] is None
    reserved = failure["snapshot"]["reserved_bytes"]
    assert sum(pool["total_bytes"] for pool in failure["pools"]) == reserved
    assert all(pool["fitting_bytes"] == 0 for pool in failure["pools"])  # 5000 of 1000 bytes
    assert not recorded.kind("error")


def test_a_failed_step_is_read_where_the_engine_logs_it(run_engine: Run) -> None:
    code = START_UP + ALLOCATOR + STEP
    code += (
        "EngineCore(executor())\n"
        f"log = logging.getLogger({LOGGER!r})\n"
        "seen = []\n"
        "handler = logging.Handler()\n"
        "handler.emit = lambda record: seen.append((record.getMessage(), record.funcName))\n"
        "log.addHandler(handler)\n"
        "step(log)\n"
        "print('logged:', seen)\n"
        "gc.collect()\n"
        "print('activation is kept:', kept[0]() is not None)\n"
    )
    recorded = run_engine(code)

    assert recorded.code == 0, recorded.err
    [failure] = recorded.kind("failure")
    assert failure["requests"] == [
        {"id": "chat-1-abcd", "scheduled_tokens": 40, "prompt_tokens": None, "items": []},
        {"id": "chat-2-efgh", "scheduled_tokens": 1, "prompt_tokens": None, "items": []},
    ]
    assert stage_of(failure["chain"]) == "mm_merge"
    assert "logged: [('WorkerProc hit an exception.', 'step')]" in recorded.out
    assert "activation is kept: False" in recorded.out
    assert not recorded.kind("error")


def test_an_allocator_without_an_observer_is_read_from_its_message(run_engine: Run) -> None:
    code = START_UP + STEP.replace("    fail()", "    raise RuntimeError(MESSAGE)")
    code += (
        "MESSAGE = ('NPU out of memory. NPUWorkspaceAllocator tried to allocate 2.50 GiB'\n"
        "           '(NPU 0; 60.96 GiB total capacity; 1.00 GiB free).')\n"
        f"EngineCore(executor())\nstep(logging.getLogger({LOGGER!r}))\n"
    )
    recorded = run_engine(code)

    [oom], [failure] = recorded.edges("oom"), recorded.kind("failure")
    assert (oom["hook"], failure["oom"]) == ("oom.raised", oom["id"])
    assert oom["detail"]["requested_bytes"] == 5 << 29
    assert oom["detail"]["requested_half_unit_bytes"] == 5_368_709
    assert oom["detail"]["npu_workspace"] is True


def test_another_exception_is_no_failed_allocation(run_engine: Run) -> None:
    code = START_UP + STEP.replace("    fail()", "    raise ValueError('a bad request')")
    code += f"EngineCore(executor())\nstep(logging.getLogger({LOGGER!r}))\n"
    recorded = run_engine(code)

    assert recorded.code == 0, recorded.err
    assert not recorded.kind("failure")
    assert not recorded.edges("oom")


@pytest.mark.parametrize(
    ("backend", "package", "name"),
    [
        ("npu", "torch_npu", "_npu_attach_out_of_memory_observer"),
        ("cuda", "torch", "_cuda_attach_out_of_memory_observer"),
    ],
)
def test_the_allocator_of_each_backend_is_observed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, package: str, name: str
) -> None:
    attached: list[object] = []
    module = SimpleNamespace(_C=SimpleNamespace(**{name: attached.append}))
    monkeypatch.setitem(sys.modules, package, module)
    loggers = [logging.getLogger(each) for each in LOGGERS]
    for logger in loggers:
        monkeypatch.setattr(logger, "filters", [])
    recorder = Recorder(tmp_path)
    recorder.probe.backend = backend
    failure.observe(recorder)
    failure.observe(recorder)
    assert len(attached) == 1
    assert [len(logger.filters) for logger in loggers] == [1, 1]


def segment(size: int, blocks: str, **more: object) -> dict[str, object]:
    """A segment of blocks, "a7 f3 p2": allocated, free, pending."""
    states = {"a": "active_allocated", "f": "inactive", "p": "active_pending_free"}
    listed = [{"size": int(each[1:]), "state": states[each[0]]} for each in blocks.split()]
    assert sum(int(str(block["size"])) for block in listed) == size
    return {"device": 0, "total_size": size, "blocks": listed, "segment_type": "large", **more}


def test_segments_are_added_up_by_pool_and_stream() -> None:
    segments = [
        segment(30, "a10 f15 p5"),
        segment(20, "f20"),
        segment(8, "a2 f6", stream=7),
        segment(4, "f4", segment_type="small"),
        segment(9, "f9", segment_pool_id=(0, 1)),
        segment(50, "a50", device=1),
        segment(40, "f40"),  # the operator workspace, which reserved does not count
    ]
    pools = pools_of(segments, device=0, reserved=71, requested=18)
    assert pools is not None
    found = {(p["private"], p["small"], p["stream"]): p for p in pools}
    common = found[False, False, "0"]
    assert (common["total_bytes"], common["allocated_bytes"], common["pending_bytes"]) == (
        50,
        10,
        5,
    )
    assert (common["free_bytes"], common["free_blocks"]) == (35, 2)
    assert (common["largest_free_bytes"], common["fitting_bytes"]) == (20, 20)
    assert found[False, False, "7"]["free_bytes"] == 6
    assert found[False, True, "0"]["free_bytes"] == 4
    assert found[True, False, "0"]["free_bytes"] == 9
    assert len(found) == 4


def test_segments_of_another_allocator_are_not_divided() -> None:
    assert pools_of([segment(30, "a30")], device=0, reserved=20, requested=1) is None


#: The simulated device's words, which torch_npu appends to an error of its own.
SIMULATED = (
    "[memprof simulated device] device 0 has 37329306 of 65452113920 bytes free, 100663296 "
    "requested (error 207001)"
)


@pytest.mark.parametrize(
    ("message", "size", "half"),
    [
        ("CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has", 22 << 20, 5243),
        ("Failed to allocate resource[DeviceMemory] with info [size:2097152]", 2 << 20, 0),
        ("Tried to allocate 512 bytes", 512, 0),
        (f"The Inner error is reported as above. {SIMULATED}", 100663296, 0),
        ("out of memory", None, 0),
    ],
)
def test_what_a_message_says_was_asked_for(message: str, size: int | None, half: int) -> None:
    asked = asked_for(message)
    assert (asked["requested_bytes"], asked["requested_half_unit_bytes"]) == (size, half)
    assert is_out_of_memory("RuntimeError", message) == (size != 512)
    assert asked["outside_torch"] == ("DeviceMemory" in message or SIMULATED in message)


def test_the_innermost_function_tells_the_stage() -> None:
    forward = "vllm_ascend.worker.model_runner_v1:NPUModelRunner._model_forward"
    encoder = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._execute_mm_encoder"
    assert stage_of(["m:Attention.forward", encoder, forward]) == "mm_encoder"
    assert stage_of(["m:Qwen3.embed_input_ids", forward]) == "embedding"
    assert stage_of(["m:Qwen3VL.embed_input_ids", forward], multimodal=True) == "mm_merge"
    assert stage_of(["m:main"]) is None
