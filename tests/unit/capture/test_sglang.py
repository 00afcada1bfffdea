"""SGLang's processes: a miniature of its scheduler, and the events that capture writes about it."""

from __future__ import annotations

import pytest

from .conftest import Recorded, Run

START_UP = """
import torch, torch_npu, sglang.version
from types import SimpleNamespace
from sglang.srt import runtime_context
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.managers.scheduler import run_scheduler_process
"""
START = START_UP + "scheduler = run_scheduler_process()\n"
REQUEST = """
class Request:
    def __init__(self, rid, output):
        self.rid, self.origin_input_ids, self.output_ids, self.output = rid, [1, 2, 3], [], output
        self.prefix_indices = []
    def finished(self):
        return len(self.output_ids) >= self.output
def batch(*requests, extend=None):
    mode = SimpleNamespace(is_extend=lambda: extend is not None)
    return SimpleNamespace(reqs=list(requests), forward_mode=mode, extend_lens=extend)
"""


def figures(recorded: Recorded) -> dict[str, object]:
    return recorded.kind("figures")[-1]["values"]


def test_a_start_up_is_a_row_of_phases(run_engine: Run) -> None:
    recorded = run_engine(START)

    assert recorded.code == 0, recorded.err
    assert [line for line in recorded.outline() if "empty_cache" not in line] == [
        "device_init before",
        "hccl_init before",
        "hccl_init after",
        "device_init after",
        "weight_load before",
        "weight_load after",
        "kv_cache_sizing before",
        "kv_cache_sizing after",
        "kv_cache_alloc before",
        "request_pool before",
        "request_pool after",
        "kv_cache_alloc after",
        "warm_up before",
        "graph_capture before",
        "graph_capture after",
        "warm_up after",
    ]
    identity = recorded.kind("identity")[-1]
    assert (identity["label"], identity["rank"], identity["world_size"]) == ("TP1", 1, 2)
    assert identity["roles"] == ["engine_core", "worker"]
    assert [event["what"] for event in recorded.kind("ready")] == ["model"]
    bad = {"missing", "never_called", "error", "overwritten"}
    required = [hook for hook in recorded.kind("hook") if hook["need"] == "required"]
    assert len(required) >= 8
    assert not [hook for hook in required if hook["state"] in bad]


def test_the_equation_gets_what_the_engine_has_read(run_engine: Run) -> None:
    """Free before the weights: 1000 - 10 - 2; after them 100 less. Half of 988, less 100, less 8
    set aside, is 386: 193 tokens of 2 bytes, in pages of 4 tokens 192."""
    values = figures(run_engine(START))

    assert values["least_free_before_load_bytes"] == 988
    assert values["least_free_after_load_bytes"] == 888
    assert values["mem_fraction_static"] == 0.5
    assert values["mm_reserved_bytes"] == 8
    assert values["profiled_bytes"] == 386
    assert values["page_bytes"] == 8
    assert values["kv_cache_bytes"] == 384
    assert values["graph_bytes"] == 10
    assert "limited_tokens" not in values


def test_the_plan_is_that_of_all_ranks(run_engine: Run) -> None:
    plan = run_engine(START).kind("kv_plan")[-1]

    assert (plan["tokens"], plan["blocks"], plan["block_size"]) == (192, 48, 4)
    assert (plan["available_bytes"], plan["planned_bytes"]) == ([386, 386], [384, 384])
    assert (plan["bytes_per_token"], plan["padding_bytes"]) == (2, 8)
    assert plan["max_concurrency"] == 12
    assert plan["groups"][0]["type"] == "MHATokenToKVPool"
    assert plan["num_gpu_blocks_override"] is None


def test_tokens_that_the_user_has_limited(run_engine: Run) -> None:
    limit = "runtime_context.SCHEDULE.max_total_tokens = 40\n"
    recorded = run_engine(START_UP + limit + "run_scheduler_process()")

    assert figures(recorded)["limited_tokens"] == 40
    assert recorded.kind("kv_plan")[-1]["num_gpu_blocks_override"] == 10


POOLS = """
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.model_executor.pool_configurator import HybridSWAPoolConfigurator
kv_cache_configurator.DefaultPoolConfigurator = HybridSWAPoolConfigurator
"""


def test_pools_of_several_kinds_may_take_what_was_profiled(run_engine: Run) -> None:
    """Of 386 bytes 128 tokens: what a token takes, and the pools, is not known."""
    recorded = run_engine(START_UP + POOLS + "run_scheduler_process()")

    assert recorded.code == 0, recorded.err
    values, plan = figures(recorded), recorded.kind("kv_plan")[-1]
    assert values["kv_cache_bytes"] == 386
    assert not {"page_bytes", "limited_tokens"} & values.keys()
    assert (plan["tokens"], plan["blocks"], plan["bytes_per_token"]) == (128, 32, None)
    assert (plan["available_bytes"], plan["planned_bytes"]) == ([386, 386], [None, None])


def test_a_limit_makes_such_pools_smaller_by_what_is_not_known(run_engine: Run) -> None:
    limit = "runtime_context.SCHEDULE.max_total_tokens = 40\n"
    recorded = run_engine(START_UP + POOLS + limit + "run_scheduler_process()")

    values = figures(recorded)
    assert (values["limited_tokens"], values.get("kv_cache_bytes")) == (40, None)
    assert recorded.kind("kv_plan")[-1]["num_gpu_blocks_override"] == 10


PLAN = START_UP + "from sglang.srt.managers.scheduler import Scheduler\n"


@pytest.mark.parametrize(
    ("setup", "pools"),
    [
        ("", 1),
        ("Scheduler.drafts = True\n", 2),
        ("Scheduler.makes_pools = 'make_pools'\ndel Scheduler.init_memory_pools\n", 1),
    ],
    ids=["one model", "a draft model", "a release that makes its pools elsewhere"],
)
def test_a_plan_ends_when_every_pool_is_there(run_engine: Run, setup: str, pools: int) -> None:
    recorded = run_engine(PLAN + setup + "run_scheduler_process()", MEMPROF_STOP_AFTER="kv_plan")

    assert recorded.code == 0, recorded.err
    assert "Traceback" not in recorded.err
    ended = [event for event in recorded.edges("kv_cache_alloc") if event["edge"] == "after"]
    assert len(ended) == pools
    assert recorded.kind("kv_plan")[-1]["tokens"] == 192
    assert not recorded.edges("warm_up")
    assert not recorded.edges("graph_capture")
    assert not recorded.kind("ready"), "the process that started all ranks says when they are ready"
    bad = {"missing", "never_called", "error", "overwritten"}
    required = [hook for hook in recorded.kind("hook") if hook["need"] == "required"]
    assert len(required) >= 8
    assert not [hook for hook in required if hook["state"] in bad]


def test_without_graphs_nothing_is_captured(run_engine: Run) -> None:
    recorded = run_engine(
        START_UP + "cuda_graph_setup.BACKEND = 'disabled'\nrun_scheduler_process()"
    )

    assert not recorded.edges("graph_capture")
    assert figures(recorded)["graph_bytes"] is None


def test_every_call_of_empty_cache_has_its_site(run_engine: Run) -> None:
    calls = [event for event in run_engine(START).edges("empty_cache") if event["edge"] == "after"]

    assert [call["detail"]["function"].rpartition(".")[2] for call in calls] == [
        "get_available_gpu_memory",
        "get_available_gpu_memory",
    ]
    assert any("_profile_available_bytes" in entry for entry in calls[1]["detail"]["chain"])


def test_what_a_request_asks_of_a_scheduler_is_a_phase(run_engine: Run) -> None:
    recorded = run_engine(
        START
        + "scheduler.flush_cache(empty_cache=False)\n"
        + "scheduler.pause_generation(SimpleNamespace(mode='in_place'))\n"
    )

    flush, pause = recorded.edges("flush_cache")[-1], recorded.edges("pause")[-1]
    assert flush["detail"]["success"] is False
    assert flush["detail"]["empty_cache"] is False
    assert pause["detail"]["mode"] == "in_place"


def test_the_first_batch_is_a_phase_and_the_next_is_none(run_engine: Run) -> None:
    code = (
        START
        + "for _ in range(20): scheduler.run_batch(SimpleNamespace(reqs=[]))\n"
        + (
            "from sglang.srt.managers.tp_worker import TpModelWorker\n"
            "print(hasattr(TpModelWorker.forward_batch_generation, '__memprof__'))"
        )
    )
    recorded = run_engine(code)

    assert len(recorded.edges("request")) == 2
    assert recorded.out.strip() == "False", "the row is taken off once it has seen its batches"


def test_a_failed_allocation_that_ends_the_scheduler_is_read(run_engine: Run) -> None:
    code = START + REQUEST + "scheduler.run_event_loop(batch(Request('a', 2), extend=[3]))"
    recorded = run_engine(code)

    assert recorded.code == 1
    failure = recorded.kind("failure")[-1]
    assert failure["requests"] == [
        {"id": "a", "scheduled_tokens": 3, "prompt_tokens": 3, "items": []}
    ]
    assert "Tried to allocate 2.00 GiB" in failure["message"]
    assert recorded.edges("oom")[-1]["detail"]["requested_bytes"] == 2 << 30


def test_requests_of_batches_are_steps(run_engine: Run) -> None:
    code = (
        START
        + REQUEST
        + (
            "first, second = Request('a', 2), Request('b', 1)\n"
            "for one in (batch(first, second, extend=[3, 3]), batch(first)):\n"
            "    scheduler.run_batch(one)\n"
            "    scheduler.process_batch_result(one, None)\n"
            "import vllm_memprof.capture.plugin as p\n"
            "sampler = p.RECORDER.sampler\n"
            "print(sampler.pace.step, sorted(sampler._requests), p.RECORDER.requests)\n"
        )
    )
    recorded = run_engine(code, MEMPROF_SAMPLE="1")

    assert recorded.code == 0, recorded.err
    # two batches, and an end after each of them
    assert recorded.out.strip() == "4 [] {}"
    assert not recorded.kind("error")
