"""SGLang's diffusion runtime: a miniature of its worker, and the events that capture writes."""

from __future__ import annotations

from vllm_memprof.engines.sglang_diffusion import actions as sglang_diffusion

from .conftest import Recorded, Run

START = """
import torch, torch_npu, sglang.version
from sglang.multimodal_gen.runtime.managers.worker_bootstrap import bootstrap_scheduler_process
worker = bootstrap_scheduler_process()
"""


def names(recorded: Recorded, phase: str) -> list[object]:
    edges = recorded.edges(phase)
    return [edge["detail"]["name"] for edge in edges if edge["edge"] == "after"]


def calls(recorded: Recorded) -> list[dict[str, object]]:
    return [edge["detail"] for edge in recorded.edges("empty_cache") if edge["edge"] == "after"]


def test_a_start_up_is_a_row_of_phases(run_engine: Run) -> None:
    recorded = run_engine(START)

    assert recorded.code == 0, recorded.err
    assert [line for line in recorded.outline() if "empty_cache" not in line] == [
        "device_init before",
        "hccl_init before",
        "hccl_init after",
        "device_init after",
        "weight_load before",
        "component_load before",
        "component_load after",
        "component_load before",
        "component_load after",
        "weight_load after",
    ]
    assert names(recorded, "component_load") == ["transformer", "vae"]
    identity = recorded.kind("identity")[-1]
    assert (identity["role"], identity["device_index"]) == ("worker", 0)
    assert [event["what"] for event in recorded.kind("ready")] == ["model"]
    bad = {"missing", "never_called", "error", "overwritten"}
    required = [hook for hook in recorded.kind("hook") if hook["need"] == "required"]
    assert len(required) >= 3
    assert not [hook for hook in required if hook["state"] in bad]
    assert not recorded.kind("error")


def test_a_reading_that_empties_the_cache_has_its_site(run_engine: Run) -> None:
    """Not that of the platform, which every reading passes."""
    functions = [call["function"] for call in calls(run_engine(START))]

    assert functions == ["ComponentLoader.load"] * 4


def test_a_request_is_a_row_of_stages(run_engine: Run) -> None:
    recorded = run_engine(START + "worker.execute_forward([1]); worker.execute_forward([2])")

    assert recorded.code == 0, recorded.err
    assert names(recorded, "stage") == ["TextEncodingStage", "DecodingStage"] * 2
    requests = [edge["id"] for edge in recorded.edges("request") if edge["edge"] == "before"]
    parents = [edge["parent"] for edge in recorded.edges("stage") if edge["edge"] == "before"]
    assert parents == [requests[0], requests[0], requests[1], requests[1]]


def test_a_call_knows_whether_a_request_is_under_way(run_engine: Run) -> None:
    code = "worker.execute_forward([1], release=True); torch_npu.npu.empty_cache()"
    during, after = calls(run_engine(START + code))[-2:]

    assert (during["requests"], during["in_step"]) == (1, True)
    assert (after["requests"], after["in_step"]) == (0, False)


def test_a_server_records_its_first_requests_alone(run_engine: Run) -> None:
    """After them nobody knows whether one is under way."""
    most = sglang_diffusion.RECORDED_REQUESTS
    code = (
        f"for number in range({most} + 3): worker.execute_forward([number])\n"
        "worker.execute_forward([1], release=True)"
    )
    recorded = run_engine(START + code)

    assert len(recorded.edges("request")) == 2 * most
    assert len(recorded.edges("stage")) == 4 * most
    assert calls(recorded)[-1]["requests"] is None


def test_a_process_that_is_not_recorded_is_left_alone(run_engine: Run) -> None:
    code = "print(hasattr(type(worker).execute_forward, '__memprof__'))"
    recorded = run_engine(START + code, record=False)

    assert recorded.out.strip() == "False"
    assert not recorded.files
