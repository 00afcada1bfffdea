"""Starts, instances and ranks in one log are kept apart."""

from __future__ import annotations

import pytest

from vllm_memprof.logs.to_record import sorted_lines, to_runs
from vllm_memprof.units import GIB


def workers(run):
    return {process.identity.label: process for process in run.processes if process.is_worker}


def kv(run):
    return {label: round(p.figures["kv_cache_bytes"] / GIB, 2) for label, p in workers(run).items()}


INIT = "(EngineCore_DP0 pid=20) INFO 11-21 03:07:12 [core.py:113] Initializing a V1 LLM engine (v0.13.0) with config: model='org/model', max_seq_len=8192, tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, enforce_eager=True, kv_cache_dtype=auto\n"


def test_ranks_by_their_prefixes(runs_of):
    (run,) = runs_of(
        "(APIServer pid=10) INFO 11-21 03:07:01 [api_server.py:1] vLLM API server version 0.13.0\n"
        "(APIServer pid=10) INFO 11-21 03:07:01 [utils.py:1] non-default args: {'model': 'org/model', 'tensor_parallel_size': 2, 'gpu_memory_utilization': 0.95, 'max_model_len': 8192}\n"
        + INIT
        + "(Worker_TP1 pid=31) INFO 11-21 03:08:00 [model_runner_v1.py:1] Loading model weights took 9.1948 GB\n"
        "(Worker_TP0 pid=30) INFO 11-21 03:08:01 [model_runner_v1.py:1] Loading model weights took 9.2948 GB\n"
        "(Worker_TP0 pid=30) INFO 11-21 03:08:02 [worker.py:308] Available memory: 46600395162, total memory: 65452113920\n"
        "(Worker_TP1 pid=31) INFO 11-21 03:08:02 [worker.py:308] Available memory: 46525233234, total memory: 65452113920\n"
        "(EngineCore_DP0 pid=20) INFO 11-21 03:08:03 [kv_cache_utils.py:1] GPU KV cache size: 632,064 tokens\n"
        "(EngineCore_DP0 pid=20) INFO 11-21 03:08:03 [kv_cache_utils.py:1] Maximum concurrency for 8,192 tokens per request: 77.16x\n"
        "(APIServer pid=10) INFO:     Application startup complete.\n"
    )
    assert run.info.model == "org/model"
    assert (run.info.engine, run.info.engine_version, run.info.status) == (
        "vllm-ascend",
        "0.13.0",
        "ok",
    )
    assert any("taken to be that of vLLM" in note for note in run.info.notes)
    assert run.forms == ["E2"]
    found = workers(run)
    assert list(found) == ["TP0", "TP1"]
    assert [(p.identity.rank, p.identity.tp_rank, p.identity.pid) for p in found.values()] == [
        (0, 0, 30),
        (1, 1, 31),
    ]
    assert found["TP0"].figures["kv_cache_bytes"] == 46600395162
    assert found["TP1"].figures["kv_cache_bytes"] == 46525233234
    assert {p.figures["gpu_memory_utilization"] for p in found.values()} == {0.95}
    assert run.processes[-1].kv_plan["tokens"] == 632064
    assert "--enforce-eager" in run.info.engine_command


def test_ranks_of_prefill_context_parallelism(runs_of):
    assigned = "rank {rank} in world size 4 is assigned as DP rank 0, PP rank 0, PCP rank {pcp}, TP rank {tp}, EP rank N/A"
    options = "{'tensor_parallel_size': 2, 'prefill_context_parallel_size': 2}"
    lines = [
        f"(APIServer pid=10) INFO 11-21 03:07:01 [utils.py:1] non-default args: {options}\n",
        INIT,
    ]
    for rank, pcp, tp in ((0, 0, 0), (3, 1, 1), (2, 1, 0)):
        said = assigned.format(rank=rank, pcp=pcp, tp=tp)
        lines.append(f"(Worker pid={30 + rank}) INFO 11-21 03:07:20 [parallel_state.py:1] {said}\n")
        name = f"Worker_PCP{pcp}_TP{tp}" if rank != 3 else "Worker"  # known by its number alone
        lines.append(
            f"({name} pid={30 + rank}) INFO [model_runner_v1.py:1] Loading model weights took {rank + 1}.0 GB\n"
        )
    (run,) = runs_of("".join(lines))
    found = workers(run)
    assert {label: process.identity.rank for label, process in found.items()} == {
        "PCP0_TP0": 0,
        "PCP1_TP1": 3,
        "PCP1_TP0": 2,
    }
    assert found["PCP1_TP0"].figures["weights_bytes"] == 3 * GIB


def test_two_starts_one_after_the_other(runs_of):
    start = "INFO Loading model weights took 9.1948 GB\nINFO Available KV cache memory: {} GiB\n"
    runs = runs_of(start.format("43.40") + start.format("44.30"))
    assert [kv(run) for run in runs] == [{"the worker": 43.4}, {"the worker": 44.3}]
    assert [run.info.id for run in runs] == ["log#1", "log#2"]


def test_the_same_start_pasted_twice_is_two_starts_with_the_same_figures(runs_of):
    start = "INFO Loading model weights took 9.1948 GB\nINFO Available KV cache memory: 43.40 GiB\n"
    assert [kv(run) for run in runs_of(start * 2)] == [{"the worker": 43.4}] * 2


def test_a_process_that_says_it_again_is_one_start(runs_of):
    (run,) = runs_of(
        "Available KV cache memory: 44.30 GiB\n\nIn short: Available KV cache memory: 44.3 GiB\n"
    )
    assert kv(run) == {"the worker": 44.3}


def test_the_finer_figure_counts(runs_of):
    (run,) = runs_of(
        "Loading model weights took 9.1948 GB\ntorch peak memory increase: 3.86GiB; weights memory: 9.19GiB.\n"
    )
    assert run.processes[0].figures["weights_bytes"] == round(9.1948 * GIB)


def test_interleaved_instances(runs_of):
    """Two servers that start at the same time: process ids tell them apart."""
    text = ""
    for pid in (100, 200):
        text += f"(APIServer pid={pid}) INFO 11-21 03:07:01 [api_server.py:1] vLLM API server version 0.23.0\n"
        text += f"(EngineCore pid={pid + 10}) INFO 11-21 03:07:12 [core.py:113] Initializing a V1 LLM engine (v0.23.0) with config: model='m{pid}', tensor_parallel_size=2, pipeline_parallel_size=1,\n"
        text += f"(Worker_TP0 pid={pid + 20}) INFO [model_runner_v1.py:1] Loading model weights took {pid / 100}000 GB\n"
    for pid in (200, 100):
        text += f"(Worker_TP1 pid={pid + 21}) INFO [model_runner_v1.py:1] Loading model weights took {pid / 100}000 GB\n"
        for rank in (0, 1):
            text += f"(Worker_TP{rank} pid={pid + 20 + rank}) INFO [worker.py:1] Available KV cache memory: {pid / 10 + rank:.2f} GiB\n"
        text += f"(EngineCore pid={pid + 10}) INFO [kv_cache_utils.py:1] GPU KV cache size: {pid},000 tokens\n"
    runs = runs_of(text)
    assert [run.info.model for run in runs] == ["m100", "m200"]
    assert [kv(run) for run in runs] == [{"TP0": 10.0, "TP1": 11.0}, {"TP0": 20.0, "TP1": 21.0}]
    assert [run.processes[-1].kv_plan["tokens"] for run in runs] == [100_000, 200_000]
    for run, size in zip(runs, (1, 2), strict=True):
        assert {p.figures["weights_bytes"] for p in workers(run).values()} == {size * GIB}


def test_instances_that_say_their_set_up_before_any_figure(runs_of):
    """Each has its own model, arguments, figures and end, also on one device each."""
    api = "(APIServer pid={0}) INFO 11-22 10:00:00 [api_server.py:1] vLLM API server version 0.11.0\n(APIServer pid={0}) INFO 11-22 10:00:00 [utils.py:233] non-default args: {{'model': 'm{0}', 'gpu_memory_utilization': 0.{1}}}\n"
    core = "(EngineCore_DP0 pid={0}) INFO [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='m{1}', speculative_config=None, tensor_parallel_size=1,\n"
    weights = (
        "(EngineCore_DP0 pid={}) INFO [model_runner.py:1] Model loading took {}.27 GiB and 3 s\n"
    )
    granted = "(EngineCore_DP0 pid={}) INFO [worker.py:1] Available KV cache memory: {}.40 GiB\n"
    for order in ((100, 200), (200, 100)):
        text = "".join(api.format(pid, pid // 50) for pid in (100, 200))
        text += "".join(core.format(pid + 10, pid) for pid in (100, 200))
        text += "".join(weights.format(pid + 10, pid // 100) for pid in order)
        text += "".join(granted.format(pid + 10, pid // 10) for pid in order)
        text += f"(APIServer pid={order[0]}) INFO:     Application startup complete.\n"
        text += f"(APIServer pid={order[1]}) RuntimeError: Engine core initialization failed.\n"
        runs = runs_of(text)
        assert [run.info.model for run in runs] == [f"m{pid}" for pid in order]
        assert [run.info.status for run in runs] == ["ok", "failed"]
        for run, pid in zip(runs, order, strict=True):
            (worker,) = workers(run).values()
            assert worker.figures["weights_bytes"] == round((pid // 100 + 0.27) * GIB)
            assert worker.figures["gpu_memory_utilization"] == pid / 500
            assert round(worker.figures["kv_cache_bytes"] / GIB, 1) == pid // 10 + 0.4


@pytest.mark.parametrize("together", [False, True], ids=["line by line", "entry by entry"])
def test_an_export_that_shows_the_newest_line_first(together):
    entries = [
        "INFO 11-21 03:07:01 [core.py:113] Initializing a V1 LLM engine (v0.13.0) with config: model='org/model', max_seq_len=8192,\n",
        "INFO 11-21 03:07:09 [model_runner_v1.py:1] Loading model weights took 9.1948 GB\n",
        "INFO 11-21 03:07:09 [worker.py:1] Available KV cache memory: 43.40 GiB\n",
        'ERROR 11-21 03:07:10 [core.py:1] Traceback (most recent call last):\n  File "worker.py", line 1, in capture_model\nRuntimeError: the moon is in the wrong house\n',
        "ERROR 11-21 03:07:11 [core.py:1] EngineCore failed to start.\n",
    ]
    text = "".join(entries)
    pieces = entries if together else text.splitlines(keepends=True)
    sorter, failures = sorted_lines(["".join(reversed(pieces)).encode()])
    (run,) = to_runs(sorter, "log", failures)
    assert (run.info.model, kv(run)) == ("org/model", {"the worker": 43.4})
    assert run.failure.evidence[0].line == 6
    assert any("newest first" in note for note in run.info.notes)
    sorter, failures = sorted_lines([text.encode()])
    (other,) = to_runs(sorter, "log", failures)
    assert run.processes == other.processes
    assert run.failure == other.failure


def test_data_parallel_replicas_are_one_run(runs_of):
    text = ""
    for dp in (0, 1):
        text += f"(EngineCore_DP{dp} pid={dp + 20}) INFO [core.py:1] Initializing a V1 LLM engine (v0.23.0) with config: model='m', tensor_parallel_size=1, data_parallel_size=2,\n"
    for dp in (0, 1):
        text += f"(EngineCore_DP{dp} pid={dp + 20}) INFO [model_runner_v1.py:1] Loading model weights took 5.0000 GB\n"
        text += f"(EngineCore_DP{dp} pid={dp + 20}) INFO [worker.py:1] Available KV cache memory: {40 + dp}.00 GiB\n"
        text += f"(EngineCore_DP{dp} pid={dp + 20}) INFO [kv_cache_utils.py:1] GPU KV cache size: {400 + dp},000 tokens\n"
    (run,) = runs_of(text)
    assert kv(run) == {"DP0": 40.0, "DP1": 41.0}
    plans = {p.identity.dp_rank: p.kv_plan["tokens"] for p in run.processes if p.kv_plan}
    assert plans == {0: 400_000, 1: 401_000}


def test_workers_of_ray_are_named_by_their_assignment(runs_of):
    text = INIT
    for rank, pid in ((0, 45464), (1, 44419)):
        text += f"(NPURayWorkerWrapper pid={pid}, ip=10.0.0.{rank}) INFO [parallel_state.py:1] rank {rank} in world size 2 is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank {rank}, EP rank N/A\n"
    for rank, pid in ((0, 45464), (1, 44419)):
        text += f"(EngineCore_DP0 pid=20) (NPURayWorkerWrapper pid={pid}, ip=10.0.0.{rank}) INFO [worker.py:1] Available KV cache memory: {rank + 1}.00 GiB\n"
    (run,) = runs_of(text)
    assert kv(run) == {"TP0": 1.0, "TP1": 2.0}


def test_workers_that_nothing_names_are_told_apart_by_process_id(runs_of):
    (run,) = runs_of(
        "INFO model weights take 2.00GiB; the rest of the memory reserved for KV Cache is 3.00GiB.\n"
        "(VllmWorkerProcess pid=521) INFO model weights take 2.00GiB; the rest of the memory reserved for KV Cache is 4.00GiB.\n"
        "(VllmWorkerProcess pid=507) INFO model weights take 2.00GiB; the rest of the memory reserved for KV Cache is 5.00GiB.\n"
    )
    assert kv(run) == {"lines without a rank": 3.0, "pid 521": 4.0, "pid 507": 5.0}


def test_ranks_of_old_releases(runs_of):
    (run,) = runs_of(
        "".join(
            f"(VllmWorker rank={r} pid={r + 5}) INFO Available KV cache memory: {r}.50 GiB\n"
            for r in (0, 1)
        )
    )
    assert kv(run) == {"rank 0": 0.5, "rank 1": 1.5}
    assert [p.identity.rank for p in workers(run).values()] == [0, 1]


def test_the_least_plan_of_several_workers_serves(runs_of):
    """vLLM 0.11 prints the size once per worker, before it takes the minimum."""
    (run,) = runs_of(
        INIT
        + "(EngineCore_DP0 pid=20) INFO GPU KV cache size: 171,904 tokens\n(EngineCore_DP0 pid=20) INFO GPU KV cache size: 170,000 tokens\n"
    )
    assert run.processes[-1].kv_plan["tokens"] == 170_000


def test_an_error_that_executors_print_again_is_one_oom(runs_of):
    oom = "NPU out of memory. Tried to allocate 4.50 GiB (NPU 1; 60.96 GiB total capacity; 52.87 GiB already allocated; 52.87 GiB current active; 2.77 GiB free; 56.89 GiB reserved in total by PyTorch)\n"
    (run,) = runs_of(
        f"(Worker_TP1 pid=31) ERROR [x.py:1] RuntimeError: {oom}(EngineCore_DP0 pid=20) ERROR Worker failed with error '{oom}{oom}"
    )
    assert run.info.status == "oom"
    (worker,) = workers(run).values()
    span = worker.phases[-1]
    assert (span.phase, span.detail["device"], span.detail["failures"]) == ("oom", "1", 1)
    assert span.detail["reserved_bytes"] == round(56.89 * GIB)


def test_lines_in_an_unknown_order_are_not_mixed(runs_of):
    """A weights line after a grant is of another start: its KV cache is unknown."""
    runs = runs_of(
        "INFO Available KV cache memory: 5.00 GiB\nINFO Loading model weights took 9.0000 GB\n"
    )
    assert [sorted(run.processes[0].figures) for run in runs] == [
        ["kv_cache_bytes"],
        ["weights_bytes"],
    ]


def test_many_starts_are_bounded(runs_of):
    runs = runs_of("".join(f"Available KV cache memory: {n}.00 GiB\n" for n in range(700)))
    assert len(runs) == 500
    assert "left out" in runs[-1].notes[-1]


def test_the_rank_of_torch_is_the_worker_of_vllm(runs_of):
    (run,) = runs_of(
        "(Worker_TP0 pid=30) INFO [worker.py:1] Available KV cache memory: 1.00 GiB\n"
        "(Worker_TP1 pid=31) INFO [worker.py:1] Available KV cache memory: 2.00 GiB\n"
        "[rank1]:[E107 02:38:42 compiler_depend.ts:444] NPU out of memory. NPUWorkspaceAllocator tried to allocate 180.00 MiB(NPU 1; 60.96 GiB total capacity; 89.51 MiB free).\n"
    )
    found = workers(run)
    assert list(found) == ["TP0", "TP1"]
    assert not found["TP0"].phases
    assert found["TP1"].phases[-1].detail["npu_workspace"]


def test_lines_behind_the_prefix_of_a_container(runs_of):
    """An unlabelled line is nobody's in particular, also where something stands before its level."""
    (run,) = runs_of(
        "vllm-1  | (Worker_TP0 pid=30) INFO 01-01 [worker.py:1] Available KV cache memory: 1.00 GiB\n"
        "vllm-1  | (Worker_TP1 pid=31) INFO 01-01 [worker.py:1] Available KV cache memory: 2.00 GiB\n"
        "vllm-1  | INFO 01-01 [gpu_model_runner.py:1] Graph capturing finished in 1 secs, took 0.30 GiB\n"
    )
    assert {label: p.figures.get("graph_bytes") for label, p in workers(run).items()} == {
        "TP0": None,
        "TP1": None,
        "lines without a rank": round(0.3 * GIB),
    }


def test_a_wrapped_record_stays_with_its_worker(runs_of):
    line = "(Worker_TP1 pid=31) INFO 11-21 03:07:41 [worker.py:771] Free memory on device (60.61/60.96 GiB) on startup. Desired GPU memory utilization is (0.95, 57.91 GiB). Actual usage: 9.19 GiB for weights, 3.86 GiB for peak activation, 0.56 GiB for non-torch memory, 0.31 GiB for NPU graph memory."
    for width in range(60, 130):
        (run,) = runs_of(
            "\n".join(line[at : at + width] for at in range(0, len(line), width)) + "\n"
        )
        (worker,) = workers(run).values()
        assert worker.identity.label == "TP1"
        assert len(worker.figures) == 8, width


def test_lines_of_another_engine_are_of_another_start(runs_of):
    runs = runs_of(
        "INFO model weights take 7.51GiB; non_torch_memory takes 0.39GiB;\n"
        "INFO Available memory: 46600395162, total memory: 65452113920\n"
        "(EngineCore pid=1) INFO Available KV cache memory: 2.97 GiB\n"
        "(Worker_TP0 pid=2) INFO Graph capturing finished in 1 secs, took 0.46 GiB\n"
    )
    assert [run.forms for run in runs] == [["E0"], ["E2"], [], []]
    assert [sorted(run.processes[0].figures)[0] for run in runs] == [
        "non_torch_increase_bytes",
        "device_total_bytes",
        "kv_cache_bytes",
        "graph_bytes",
    ]


def test_a_draft_model_is_of_the_start_of_its_target(runs_of):
    """V0 prints the weights of both, the target's first. (vllm-project/vllm#13144)"""
    init = "INFO 02-18 07:08:30 llm_engine.py:234] Initializing a V0 LLM engine (v0.7.2) with config: model='org/target', "
    lines = (
        "INFO 02-18 07:08:39 model_runner.py:1116] Loading model weights took 6.0160 GB\n"
        "INFO 02-18 07:08:42 model_runner.py:1116] Loading model weights took 1.8879 GB\n"
        "INFO 02-18 07:08:45 worker.py:267] the current vLLM instance can use total_gpu_memory (44.35GiB) x "
        "gpu_memory_utilization (0.90) = 39.91GiB\n"
        "INFO 02-18 07:08:45 worker.py:267] model weights take 6.02GiB; non_torch_memory takes 0.06GiB; PyTorch activation "
        "peak memory takes 1.28GiB; the rest of the memory reserved for KV Cache is 32.56GiB.\n"
    )
    named = "speculative_config=SpeculativeConfig(draft_model='org/draft', num_spec_tokens=7), tensor_parallel_size=1, \n"
    worker = "INFO spec_decode_worker.py:141] Configuring SpecDecodeWorker with proposer=<class 'vllm.MedusaWorker'>\n"
    for text in (init + named + lines, worker + lines):
        (run,) = runs_of(text)
        (worker_process,) = workers(run).values()
        figures = worker_process.figures
        assert round(figures["weights_bytes"] / GIB, 3) == 6.016
        assert round(figures["draft_weights_bytes"] / GIB, 4) == 1.8879
        assert round(figures["kv_cache_bytes"] / GIB, 2) == 32.56
    none = named.replace("org/draft", "[ngram]")
    assert len(runs_of(init + none + lines)) > 1  # n-grams of the prompt are no model


def test_a_draft_model_is_told_by_what_its_worker_loads(runs_of):
    """A process loads one model after the other only for a draft. (vllm-project/vllm#22624)"""
    target = (
        "INFO 08-11 15:37:58 [model_runner.py:1108] Starting to load model /root/before...\n"
        "INFO 08-11 15:37:58 [model_runner.py:1140] Model loading took 3.2137 GiB and 1.435951 seconds\n"
    )
    draft = (
        "INFO 08-11 15:37:58 [model_runner.py:1108] Starting to load model /root/fusion_qw3_0_6b...\n"
        "INFO 08-11 15:37:59 [model_runner.py:1140] Model loading took 1.1201 GiB and 0.535951 seconds\n"
    )
    sized = (
        "INFO 08-11 15:38:10 [worker.py:287] the current vLLM instance can use total_gpu_memory (79.33GiB) x "
        "gpu_memory_utilization (0.90) = 71.39GiB\n"
        "INFO 08-11 15:38:10 [worker.py:287] model weights take 3.21GiB; non_torch_memory takes 0.09GiB; PyTorch activation "
        "peak memory takes 1.40GiB; the rest of the memory reserved for KV Cache is 66.69GiB.\n"
    )
    (run,) = runs_of(target + draft + sized)
    (worker,) = workers(run).values()
    assert round(worker.figures["weights_bytes"] / GIB, 2) == 3.21
    assert round(worker.figures["draft_weights_bytes"] / GIB, 2) == 1.12
    assert kv(run) == {"the worker": 66.69}
    # a larger one, and one that the next start loads, is no draft
    assert len(runs_of(draft + target)) == 2
    assert len(runs_of(target + sized + draft)) == 2


def test_another_start_of_a_target_with_a_draft_is_another(runs_of):
    text = (
        "INFO Loading drafter model...\n"
        "INFO Loading model weights took 6.0160 GB\n"
        "INFO Available KV cache memory: 20.00 GiB\n"
        "INFO Loading model weights took 5.0000 GB\n"
        "INFO Available KV cache memory: 21.00 GiB\n"
    )
    assert [kv(run) for run in runs_of(text)] == [{"the worker": 20.0}, {"the worker": 21.0}]


def test_a_kv_cache_may_be_sized_after_the_graphs(runs_of):
    """vllm-project/vllm#21489"""
    (run,) = runs_of(
        "INFO 07-24 10:00:10 [gpu_model_runner.py:1746] Model loading took 14.9889 GiB and 5.2 seconds\n"
        "INFO 07-24 10:00:40 [gpu_model_runner.py:2363] Graph capturing finished in 20 secs, took 0.54 GiB\n"
        "INFO 07-24 10:00:41 [gpu_worker.py:262] Available KV cache memory: 68.11 GiB\n"
        "INFO 07-24 10:00:41 [kv_cache_utils.py:833] GPU KV cache size: 557,920 tokens\n"
    )
    assert run.info.status == "ok"
    assert kv(run) == {"the worker": 68.11}
    # a second size behind it is of another start
    again = "INFO Available KV cache memory: 68.11 GiB\nINFO Graph capturing finished in 2 secs, took 0.5 GiB\n"
    assert len(runs_of(again + "INFO Available KV cache memory: 60.00 GiB\n")) == 2


def test_nothing_follows_a_refused_start(runs_of):
    runs = runs_of(
        "ValueError: Free memory on device (0.49/79.32 GiB) on startup is less than desired GPU memory utilization (0.6, 47.59 GiB).\n"
        "INFO Available KV cache memory: 2.97 GiB\n"
    )
    assert [run.info.status for run in runs] == ["failed", "ok"]
    assert "requested_bytes" not in runs[1].processes[0].figures


@pytest.mark.parametrize("filled", ["", "   "])
def test_a_number_torn_by_a_terminal_is_whole_or_unknown(runs_of, filled):
    """Rows filled up with spaces hide that 0.31 goes over two lines: 31 GiB is no figure of this log."""
    first = "(Worker_TP1 pid=31) INFO [worker.py:771] Actual usage: 9.19 GiB for weights, 3.86 GiB for peak activation, 0."
    (run,) = runs_of(
        f"{first}{filled}\n31 GiB for NPU graph memory. Replace gpu_memory_utilization with more of it\n"
    )
    (worker,) = workers(run).values()
    assert worker.figures["weights_bytes"] == round(9.19 * GIB)
    if "graph_bytes" in worker.figures:
        assert worker.figures["graph_bytes"] == round(0.31 * GIB)
    (run,) = runs_of(
        f"{first[:-4]}\nnon-torch, 0.{filled}\n31 GiB for NPU graph memory\n"
    )  # rows too short to be joined
    (worker,) = workers(run).values()
    assert "graph_bytes" not in worker.figures


def test_a_start_under_the_process_ids_of_the_one_before(runs_of):
    """As in a container that was started again: the same names and ids, and a line that begins an engine between."""
    start = (
        "(EngineCore pid=1) INFO [core.py:94] Initializing a V1 LLM engine (v0.23.0) with config: model='m', x=1\n"
        "(Worker_TP0 pid=31) INFO [worker.py:1] Available KV cache memory: {kv} GiB\n"
        "(Worker_TP1 pid=32) INFO [worker.py:1] Available KV cache memory: {kv} GiB\n"
    )
    runs = runs_of(start.format(kv="40.00") + start.format(kv="40.00") + start.format(kv="41.00"))
    assert [sorted(workers(run)) for run in runs] == [["TP0", "TP1"]] * 3
