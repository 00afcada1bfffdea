"""The audit of empty_cache, sleep mode and weight updates, with the miniature engine."""

from __future__ import annotations

from .conftest import START_UP, Run

SERVING = START_UP + (
    "EngineCore(executor())\n"
    "worker = wrapper.worker\n"
    "worker.model_runner.requests = {}\n"
    "import threading\n"
    "def execute_model():\n"
    "    torch_npu.npu.empty_cache()\n"
    "def get_available_memory():\n"
    "    torch_npu.npu.empty_cache()\n"
)
ASLEEP = START_UP + (
    "EngineCore(executor())\n"
    "worker = wrapper.worker\n"
    "from torch_npu import _C\n"
    "from vllm_ascend.device_allocator.camem import CaMemAllocator\n"
    "pool = CaMemAllocator.get_instance()\n"
    "_C.allocate(300)\n"
    "pool.add(200, 'weights'); pool.add(90, 'kv_cache'); pool.add(10, 'sleep_persistent')\n"
)


def details(recorded, phase="empty_cache"):
    return [event["detail"] for event in recorded.edges(phase) if event["edge"] == "after"]


def test_calls_in_a_step_and_beside_one_are_told_apart(run_engine: Run) -> None:
    recorded = run_engine(
        SERVING + "torch_npu.npu.empty_cache()\n"
        "worker.model_runner.requests = {'a': 1, 'b': 2}\n"
        "torch_npu.npu.empty_cache()\n"
        "execute_model()\n"
    )

    assert recorded.code == 0, recorded.err
    idle, beside, inside = details(recorded)[-3:]
    assert [(d["requests"], d["in_step"]) for d in (idle, beside, inside)] == [
        (0, False),
        (2, False),
        (2, True),
    ]
    assert inside["function"] == "execute_model"


def test_workspace_is_read_while_serving_only_when_no_request_runs(run_engine: Run) -> None:
    recorded = run_engine(
        SERVING + "from torch_npu import _C\n"
        "_C.workspace = 5\n"
        "worker.model_runner.requests = {'a': 1}\n"
        "torch_npu.npu.empty_cache()\n"
        "_C.workspace = 6\n"
        "worker.model_runner.requests = {}\n"
        "torch_npu.npu.empty_cache()\n"
    )

    edges = [
        event["snapshot"]["npu_workspace_bytes"] for event in recorded.edges("empty_cache")[-4:]
    ]
    assert edges == [None, None, 6, 0]


def test_requests_are_unknown_where_the_runner_has_no_known_list(run_engine: Run) -> None:
    recorded = run_engine(
        SERVING + "del worker.model_runner.requests\ntorch_npu.npu.empty_cache()\n"
    )

    assert details(recorded)[-1]["requests"] is None
    assert not recorded.kind("error")


def test_the_chain_names_who_wanted_it(run_engine: Run) -> None:
    recorded = run_engine(SERVING + "get_available_memory()\n")

    assert details(recorded)[-1]["chain"][0] == "__main__:get_available_memory"
    profile = details(recorded)[1]["chain"]
    assert any(entry.endswith(":memory_profiling") for entry in profile)


def test_calls_of_several_threads_do_not_mix(run_engine: Run) -> None:
    recorded = run_engine(
        SERVING
        + "threads = [threading.Thread(target=execute_model, name=f'T{i}') for i in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )

    assert sorted(d["thread"] for d in details(recorded)[-4:]) == ["T0", "T1", "T2", "T3"]
    assert all(d["seconds"] >= 0 for d in details(recorded)[-4:])
    assert not recorded.kind("error")


def test_without_being_asked_memprof_never_empties_the_cache(run_engine: Run) -> None:
    recorded = run_engine(SERVING)

    assert not [d for d in details(recorded) if d.get("by")]


def test_the_experiment_calls_once_at_the_end_of_each_named_phase(run_engine: Run) -> None:
    recorded = run_engine(
        SERVING, MEMPROF_EMPTY_CACHE_AT="weight_load,mm_profile,graph_capture,warm_up"
    )

    own = [d for d in details(recorded) if d.get("by") == "memprof"]
    assert [d["at"] for d in own] == ["weight_load", "mm_profile", "graph_capture", "warm_up"]
    assert own[0]["site"] == "--empty-cache-at weight_load"
    outline = recorded.outline()
    assert outline[outline.index("weight_load after") + 1] == "empty_cache before"
    assert outline[outline.index("warm_up after") + 1] == "empty_cache before"
    both = run_engine(SERVING)  # recorded beside the first
    assert len(outline) - 2 * len(own) == len(both.outline()) - len(outline)


def test_a_phase_that_failed_is_no_place_for_an_experiment(run_engine: Run) -> None:
    code = START_UP + (
        "from vllm_ascend.worker.worker import NPUWorker\n"
        "NPUWorker.fail_in = 'load_model'\n"
        "try:\n    EngineCore(executor())\nexcept MemoryError:\n    pass\n"
    )
    recorded = run_engine(code, MEMPROF_EMPTY_CACHE_AT="weight_load")

    assert not [d for d in details(recorded) if d.get("by")]


def test_a_sleeping_pool_does_not_make_non_torch_negative(run_engine: Run) -> None:
    recorded = run_engine(ASLEEP + "worker.sleep(level=1)\nworker.wake_up()\n")

    assert recorded.code == 0, recorded.err
    assert not recorded.kind("error")
    before, after = (event["snapshot"] for event in recorded.edges("sleep"))
    assert (before["unmapped_bytes"], after["unmapped_bytes"]) == (None, 290)
    assert before["non_torch_bytes"] == after["non_torch_bytes"] == 50
    assert after["device_free_bytes"] - before["device_free_bytes"] == 290
    inside = recorded.edges("empty_cache")[-1]
    assert inside["parent"] == recorded.edges("sleep")[0]["id"]
    assert inside["snapshot"]["non_torch_bytes"] == 50
    woken = recorded.edges("wake_up")[1]["snapshot"]
    assert (woken["unmapped_bytes"], woken["non_torch_bytes"]) == (0, 50)
    assert recorded.edges("sleep")[0]["detail"] == {"level": 1}


def test_waking_up_by_parts(run_engine: Run) -> None:
    recorded = run_engine(
        ASLEEP + "worker.sleep(2)\nworker.wake_up(['weights'])\nworker.wake_up(tags=['kv_cache'])\n"
    )

    ends = [event for event in recorded.edges("wake_up") if event["edge"] == "after"]
    assert [event["snapshot"]["unmapped_bytes"] for event in ends] == [90, 0]
    assert [event["snapshot"]["non_torch_bytes"] for event in ends] == [50, 50]
    assert [event["detail"]["tags"] for event in ends] == [["weights"], ["kv_cache"]]
    assert recorded.edges("sleep")[0]["detail"] == {"level": 2}


def test_a_pool_that_failed_half_way_leaves_non_torch_unknown(run_engine: Run) -> None:
    code = ASLEEP + (
        "def fail():\n    raise OSError('unmap')\n"
        "torch_npu.npu.empty_cache = fail\n"
        "try:\n    worker.sleep()\nexcept OSError:\n    pass\n"
    )
    after = run_engine(code).edges("sleep")[1]

    assert after["error"] == "OSError: unmap"
    assert after["snapshot"]["non_torch_bytes"] is None


def test_an_update_lasts_from_its_start_to_its_finish(run_engine: Run) -> None:
    recorded = run_engine(
        SERVING
        + "worker.start_weight_update()\nworker.update_weights({})\ntorch_npu.npu.empty_cache()\n"
        "worker.finish_weight_update()\n"
    )

    assert not recorded.kind("error")
    [before, after] = recorded.edges("weight_update")
    assert recorded.edges("empty_cache")[-1]["parent"] == before["id"] == after["id"]
    assert after["error"] is None


def test_an_update_that_could_not_start_is_over(run_engine: Run) -> None:
    recorded = run_engine(
        SERVING + "worker.fail_in = 'start_weight_update'\n"
        "try:\n    worker.start_weight_update()\nexcept RuntimeError:\n    pass\n"
        "worker.fail_in = None\nworker.update_weights({})\n"
    )

    edges = recorded.edges("weight_update")
    assert [(event["edge"], event["error"]) for event in edges] == [
        ("before", None),
        ("after", "RuntimeError: no transfer engine"),
        ("before", None),
        ("after", None),
    ]


def test_weights_sent_straight_to_the_model_are_an_update(run_engine: Run) -> None:
    """Loading the model for the first time goes through the same method and is none."""
    code = START_UP + (
        "from vllm_ascend.worker.model_runner_v1 import NPUModelRunner\n"
        "class Base:\n    def load_weights(self, weights):\n        return set(weights)\n"
        "class Model(Base):\n    pass\n"
        "NPUModelRunner.get_model = lambda self: self.model\n"
        "plain = NPUModelRunner.load_model\n"
        "def load_model(self):\n"
        "    plain(self); self.model = Model(); self.model.load_weights(['first'])\n"
        "NPUModelRunner.load_model = load_model\n"
        "EngineCore(executor())\n"
        "model = wrapper.worker.model_runner.model\n"
        "print(model.load_weights(['w']))\n"
        "wrapper.worker.start_weight_update(); model.load_weights([])\n"
        "wrapper.worker.finish_weight_update()\n"
    )
    recorded = run_engine(code)

    assert recorded.out.strip() == "{'w'}"
    assert not recorded.kind("error")
    readings_before = [
        event for event in recorded.edges("weight_update") if event["edge"] == "before"
    ]
    assert [event["detail"]["by"] for event in readings_before] == [
        "load_weights",
        "start_weight_update",
    ]
