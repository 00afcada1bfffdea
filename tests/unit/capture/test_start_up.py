"""A whole start-up of the miniature engine: phases, nesting, figures, the plan, and what is left
alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tests.support.names import KV_PLAN
from vllm_memprof.record.schema import (
    EVENTS_SCHEMA,
    FIGURES,
    SNAPSHOT_FIELDS,
    SNAPSHOT_OBJECTS,
)

from .conftest import START_UP, Run

FULL = START_UP + "EngineCore(executor())\nwrapper.worker.shutdown()\n"


def test_phases_in_their_order_and_nested(run_engine: Run) -> None:
    recorded = run_engine(FULL)

    assert recorded.code == 0, recorded.err
    assert recorded.outline() == [
        "device_init before",
        "empty_cache before",
        "empty_cache after",
        "hccl_init before",
        "hccl_init after",
        "device_init after",
        "weight_load before",
        "weight_load after",
        "profile_run before",
        "empty_cache before",
        "empty_cache after",
        "mm_profile before",
        "mm_profile after",
        "communicator before",
        "communicator after",
        "empty_cache before",
        "empty_cache after",
        "profile_run after",
        "kv_cache_alloc before",
        "kv_cache_alloc after",
        "warm_up before",
        "graph_capture before",
        "graph_capture after",
        "warm_up after",
        "shutdown before",
        "empty_cache before",
        "empty_cache after",
        "shutdown after",
    ]
    ids = {event["phase"]: event["id"] for event in recorded.kind("phase")}
    for inner, outer in (
        ("mm_profile", "profile_run"),
        ("communicator", "profile_run"),
        ("graph_capture", "warm_up"),
    ):
        assert recorded.edges(inner)[0]["parent"] == ids[outer]
    assert recorded.edges("profile_run")[0]["parent"] is None
    assert not recorded.kind("error")


def test_snapshots_carry_every_field_and_the_first_edge_leaves_the_device_alone(
    run_engine: Run,
) -> None:
    recorded = run_engine(FULL)

    before, after = recorded.edges("device_init")
    assert before["snapshot"]["device_total_bytes"] is None
    assert before["snapshot"]["host_rss_bytes"] > 0
    assert before["snapshot"]["allocated_bytes"] is None
    assert set(after["snapshot"]) == {
        "t_ns",
        *SNAPSHOT_FIELDS,
        *SNAPSHOT_OBJECTS,
        "read_again",
    }
    assert after["snapshot"]["non_torch_bytes"] == 10
    ends = [event["snapshot"] for event in recorded.edges("profile_run")]
    assert (ends[0]["npu_workspace_bytes"], ends[1]["npu_workspace_bytes"]) == (0, 0)
    cleared = [event["snapshot"] for event in recorded.edges("empty_cache")][4:6]
    assert (cleared[0]["npu_workspace_bytes"], cleared[1]["npu_workspace_bytes"]) == (5, 0)


def test_peaks_survive_the_engine_s_resets(run_engine: Run) -> None:
    recorded = run_engine(FULL)

    end_of_profile = recorded.edges("profile_run")[1]["snapshot"]
    assert (end_of_profile["allocated_peak_bytes"], end_of_profile["allocated_run_peak_bytes"]) == (
        300,
        300,
    )
    spiky = START_UP + (
        "from torch_npu import _C, npu\n"
        "import vllm_memprof.capture.plugin as p\n"
        "npu.initialized = True; _C.allocate(500); _C.release(500); npu.reset_peak_memory_stats()\n"
        "s = p.RECORDER.probe.snapshot()\n"
        "names = ('allocated_peak_bytes', 'allocated_run_peak_bytes', 'reserved_run_peak_bytes')\n"
        "print(*(s[name] for name in names))"
    )
    assert run_engine(spiky).out.split() == ["0", "500", "500"]


def test_multimodal_profile_ends_at_the_full_size_dummy_run(run_engine: Run) -> None:
    before, after = run_engine(FULL).edges("mm_profile")

    assert (before["snapshot"]["allocated_bytes"], after["snapshot"]["allocated_bytes"]) == (
        100,
        150,
    )


def test_draft_lora_and_connector_are_phases_of_their_own(run_engine: Run) -> None:
    """A start without them does not have them, though the engine calls the connector's function."""
    options = (
        "from vllm_ascend.worker.worker import NPUModelRunner, NPUWorker\n"
        "NPUModelRunner.with_draft_and_lora = True\n"
        "NPUWorker.kv_transfer_config = object()\n"
    )
    recorded = run_engine(START_UP + options + "EngineCore(executor())\n")
    grown = {"draft_load": 30, "lora_load": 12, "kv_connector": 8}
    ids = {event["phase"]: event["id"] for event in recorded.kind("phase")}
    for phase, size in grown.items():
        before, after = recorded.edges(phase)
        held = [event["snapshot"]["allocated_bytes"] for event in (before, after)]
        assert held[1] - held[0] == size
        outer = "kv_cache_alloc" if phase == "kv_connector" else "weight_load"
        assert before["parent"] == ids[outer]
    _, loaded = recorded.edges("draft_load")
    assert loaded["detail"]["layers"] == ["mtp.0.attn"]  # those that the drafter added
    assert not recorded.kind("error")


def test_communicator_is_read_when_its_queued_work_is_done(run_engine: Run) -> None:
    code = "import os\nos.environ['HCCL_BUFFSIZE'] = '20'\n"
    code += "from vllm_memprof.capture import communicators\ncommunicators._BUFFERS = 2\n"
    before, after = run_engine(code + FULL).edges("communicator")

    assert before["detail"] == {
        "group": "tp:0",
        "names": ["tp:0"],
        "ranks": [0, 1],
        "op": "allreduce",
        "p2p": False,
        "buffer_bytes": 40,
        "buffer_source": "HCCL_BUFFSIZE",
    }
    assert (before["snapshot"]["non_torch_bytes"], after["snapshot"]["non_torch_bytes"]) == (10, 50)
    snapshot = after["snapshot"]
    used = snapshot["device_total_bytes"] - snapshot["device_free_bytes"]
    assert used == snapshot["reserved_bytes"] + snapshot["non_torch_bytes"]


def test_a_communicator_has_buffers_of_hccl_s_default(run_engine: Run) -> None:
    before, _ = run_engine(FULL).edges("communicator")
    assert before["detail"]["buffer_bytes"] == 2 * 200 * 2**20
    assert before["detail"]["buffer_source"] == "default"


def test_collective_hooks_are_gone_when_the_model_is_warm(run_engine: Run) -> None:
    code = FULL + "print(hasattr(torch.distributed.ProcessGroup.allreduce, '__memprof__'))"

    assert run_engine(code).out.strip() == "False"


def test_empty_cache_names_the_caller_behind_the_forwarders(run_engine: Run) -> None:
    edges = run_engine(FULL).edges("empty_cache")

    assert edges[0]["detail"]["site"].startswith("worker.py:")
    assert edges[0]["detail"]["function"].endswith("init_device")
    assert edges[0]["detail"]["thread"] == "MainThread"
    assert edges[1]["detail"]["seconds"] >= 0


def test_figures_are_the_engine_s_own(run_engine: Run) -> None:
    figures = run_engine(FULL).kind("figures")

    assert [event["source"] for event in figures] == [
        "init_device",
        "load_model",
        "determine_available_memory",
        "initialize_from_config",
        "compile_or_warm_up_model",
    ]
    assert set(figures[0]["values"]) == set(FIGURES)
    assert figures[0]["values"]["weights_bytes"] is None
    values = figures[-1]["values"]
    assert values["requested_bytes"] == 900.0
    assert values["weights_bytes"] == 100
    assert values["peak_activation_bytes"] == 200
    assert values["non_torch_increase_bytes"] == 40
    assert values["kv_cache_bytes"] == 900 - 100 - 200 - 40
    assert values["graph_bytes"] == 7
    assert values["kv_cache_memory_bytes_arg"] is None


def test_a_capture_says_how_many_graphs(run_engine: Run) -> None:
    [ended] = [
        event for event in run_engine(FULL).edges("graph_capture") if event["edge"] == "after"
    ]
    assert ended["detail"] == {"graph_bytes": 7, "graphs": 3}


def test_eager_mode_has_no_graph_capture_and_no_graph_bytes(run_engine: Run) -> None:
    eager = "from vllm_ascend.worker.worker import NPUWorker\nNPUWorker.enforce_eager = True\n"
    recorded = run_engine(START_UP + eager + "EngineCore(executor())")

    assert not recorded.edges("graph_capture")
    assert recorded.kind("figures")[-1]["values"]["graph_bytes"] is None
    [verdict] = [event for event in recorded.kind("hook") if event["hook"] == "r.graph_capture"]
    assert verdict["state"] == "bound"


def test_kv_plan(run_engine: Run) -> None:
    [plan] = run_engine(FULL).kind("kv_plan")

    assert {key: plan[key] for key in KV_PLAN if key != "fitting_blocks"} == {
        "blocks": 3,
        "block_size": 4,
        "tokens": 50,
        "max_model_len": 20,
        "max_concurrency": 2.5,
        "available_bytes": [560],
        "planned_bytes": [192],
        "bytes_per_token": 16,
        "groups": [
            {
                "type": "FullAttentionSpec",
                "layers": 2,
                "block_size": 4,
                "page_size_bytes": 32,
                "bytes_per_token": 16,
                "dtype": "bfloat16",
                "layout": {},
                "group": 0,
            }
        ],
        "worker_groups": None,
        "gpu_memory_utilization": 0.9,
        "num_gpu_blocks_override": None,
        "group_count": 1,
        "tokens_rule": "concurrency",
        "context_parallel": 1,
        "max_num_batched_tokens": None,
        "mamba_cache_mode": None,
        "kv_transfer": False,
        "shared_backing": False,
        "divisor_bytes": [None],
        "layer_bytes": None,
    }


def test_identity_and_roles(run_engine: Run) -> None:
    recorded = run_engine(FULL)
    [identity] = recorded.kind("identity")

    assert recorded.events[0]["kind"] == "process"
    assert recorded.events[0]["schema"] == EVENTS_SCHEMA
    assert recorded.events[0]["versions"] == {
        "vllm": "0.23.0",
        "torch": "2.10.0",
        "torch_npu": "2.10.0",
    }
    assert identity["label"] == "TP1"
    assert (identity["rank"], identity["tp_rank"], identity["ep_rank"]) == (1, 1, None)
    assert (identity["role"], identity["soc"], identity["device_index"]) == ("worker", "FakeNPU", 0)
    assert [event["what"] for event in recorded.kind("ready")] == ["model"]


def test_event_files_are_private(run_engine: Run, tmp_path: Path) -> None:
    run_engine(FULL)

    [path] = (tmp_path / "events").iterdir()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_stopping_after_the_plan(run_engine: Run) -> None:
    recorded = run_engine(START_UP + "EngineCore(executor())", MEMPROF_STOP_AFTER="kv_plan")

    assert recorded.code == 0, recorded.err
    assert [event["what"] for event in recorded.kind("ready")] == ["plan"]
    assert not recorded.edges("kv_cache_alloc")
    assert len(recorded.edges("shutdown")) == 2
    assert "Traceback" not in recorded.err


def test_the_engine_s_exception_passes_and_is_on_the_phase(run_engine: Run) -> None:
    failing = "from vllm_ascend.worker.worker import NPUWorker\nNPUWorker.fail_in = 'load_model'\n"
    recorded = run_engine(START_UP + failing + "EngineCore(executor())")

    assert recorded.code == 1
    assert "MemoryError: no room" in recorded.err
    assert recorded.edges("weight_load")[1]["error"] == "MemoryError: no room"
    assert not recorded.kind("error")


def test_out_of_memory_is_a_moment_with_counters_only(run_engine: Run) -> None:
    code = (
        FULL + "from torch_npu import _C\n[callback] = _C.observers\ncallback(0, 5000, 1000, 300)"
    )
    [oom] = run_engine(code).edges("oom")

    assert oom["edge"] == "after"
    assert oom["snapshot"]["reserved_bytes"] is not None
    assert oom["snapshot"]["device_free_bytes"] is None
    assert oom["detail"] == {
        "device": 0,
        "requested_bytes": 5000,
        "device_total_bytes": 1000,
        "device_free_bytes": 300,
        "moment": None,  # the run is not sampled: not known
    }


def test_nothing_but_counters_while_a_graph_is_captured(run_engine: Run) -> None:
    code = START_UP + (
        "from vllm_ascend.worker.model_runner_v1 import NPUModelRunner\n"
        "plain = NPUModelRunner.capture_model\n"
        "def capture(self):\n"
        "    torch_npu.npu.capturing = True\n"
        "    torch_npu.npu.empty_cache()\n"
        "    torch_npu.npu.capturing = False\n"
        "    return 7\n"
        "NPUModelRunner.capture_model = capture\n"
        "EngineCore(executor())"
    )
    recorded = run_engine(code)

    assert recorded.code == 0, recorded.err
    during = recorded.edges("empty_cache")[-1]
    assert during["snapshot"]["device_free_bytes"] is None
    assert during["snapshot"]["reserved_bytes"] is not None


def test_labels_have_the_dimensions_of_the_run() -> None:
    from vllm_memprof.capture.identity import label

    assert label(None, None, None, 0) == "TP0"
    assert label(None, 1, None, 0) == "PP1 TP0"
    assert label(0, None, None, 1) == "DP0 TP1"
    assert label(None, None, 1, 0) == "PCP1 TP0"
    assert label(2, 1, 0, 3) == "DP2 PP1 PCP0 TP3"
    assert label(None, None, None, None) == "TP0"
