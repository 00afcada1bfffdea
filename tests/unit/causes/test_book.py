"""Each row of the book knows its own example, and what the reader makes of several lines."""

from __future__ import annotations

import re
from inspect import signature

import pytest

from vllm_memprof.causes.book import Row, read_book
from vllm_memprof.causes.reader import SIGNALS, CauseReader
from vllm_memprof.logs.to_record import WORDS, sorted_lines
from vllm_memprof.record.cause import KINDS, NamedFailure

ROWS = [row for rows in read_book().origins.values() for row in rows]


def named(text: str) -> list[tuple[int, NamedFailure]]:
    reader = CauseReader(WORDS)
    for number, line in enumerate(text.splitlines(), start=1):
        reader.add(number, line)
    return reader.finish()


def only(text: str) -> NamedFailure:
    ((_, failure),) = named(text)
    return failure


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}: {row.title[:40]}")
def test_a_row_knows_its_example(row: Row) -> None:
    failure = only(row.example)
    assert (failure.kind, failure.title) == (row.kind, row.title)
    assert failure.evidence
    assert failure.cures


def test_rows_are_of_known_kinds_and_every_kind_has_one() -> None:
    kinds = {row.kind for row in ROWS}
    assert kinds == KINDS.keys()


def test_figures_are_computed_by_functions_that_take_what_the_pattern_names() -> None:
    for row in ROWS:
        named = {name.removesuffix("2") for name in re.compile(row.pattern).groupindex}
        for function in [*row.values.values(), *([row.holds] if row.holds else [])]:
            taken = set(signature(function).parameters)
            assert taken <= named | {"reserved", "idle", "estimate"}, row.title


def test_what_is_no_matter_of_memory_gets_no_advice_about_memory() -> None:
    about_memory = re.compile(r"memory-util|mem-fraction|batched|model-len|ALLOC_CONF")
    for row in ROWS:
        if row.kind == "not-memory-at-all":
            said = " ".join(f"{cure.argument} {cure.environment}" for cure in row.cures)
            assert about_memory.search(said) is None, row.title


def test_nothing_is_called_enough_that_was_not_tried() -> None:
    assert {cure.enough for row in ROWS for cure in row.cures} == {"unknown"}


def test_the_first_cause_counts() -> None:
    failure = only(
        "ERROR EI0007: Failed to allocate resource[qp] with info [x]. Reason: Memory resources are "
        "exhausted.\n"
        "INFO Available memory: 0, total memory: 65464696832\n"
        "ERROR RuntimeError: Connection closed by peer\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert failure.kind == "communicator-resources"
    assert not failure.is_memory
    assert failure.evidence[0].line == 1


def test_a_cause_behind_the_words_that_wrap_it_counts() -> None:
    failure = only(
        "ERROR ACLgraph has insufficient available streams to capture the configured number.\n"
        "ERROR EI0006: [PID: 1] Getting socket times out. Reason: Remote Rank did not send.\n"
    )
    assert (failure.kind, failure.is_memory) == ("not-memory-at-all", False)


def test_a_message_below_the_name_of_its_error_belongs_to_it_in_its_process() -> None:
    head = "(Worker_TP{} pid={}) ERROR 09-01 00:00:00 [multiproc_executor.py:9]"
    mine, other = head.format(0, 5), head.format(1, 6)
    failure = only(
        f"{mine} RuntimeError: \n{other} WorkerProc hit an exception.\n{mine} \n"
        f"{mine} aclnnSwiGlu or aclnnSwiGluGetWorkspaceSize not in libopapi.so\n"
    )
    assert failure.title == "this chip or release has no such operator"
    assert failure.evidence[0].line == 1
    assert failure.evidence[0].text == (
        f"{mine} RuntimeError: aclnnSwiGlu or aclnnSwiGluGetWorkspaceSize not in libopapi.so"
    )
    unknown = only("[rank0]: foo.BarError:\n[rank0]: what is meant\n[rank1]: Traceback (most")
    assert unknown.title == "failed: foo.BarError: what is meant; not recognised"


@pytest.mark.parametrize("below", ["", "INFO 09-01 00:00:00 [x.py:1] up", "Traceback (most recent"])
def test_no_line_of_something_else_becomes_the_message(below: str) -> None:
    failure = only(f"foo.BarError:\n{below}\n")
    assert failure.title == "failed: foo.BarError:; not recognised"


def test_weights_that_are_no_pickle_are_files_and_what_a_process_received_is_not() -> None:
    error = "_pickle.UnpicklingError: invalid load key, 'v'.\n"
    load = '  File "/v/multiproc_executor.py", line 1, in worker_busy_loop\n'
    file = '  File "/torch/serialization.py", line 1258, in _legacy_load\n'
    assert only(load + file + error).title == "the engine does not read the files of this model"
    assert "received from another" in only(load + error).title


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Failed to apply for memory.\nERROR [SqCqManage]Alloc sq cq fail, stream_id=1", None),
        ("ERROR error code is 207005\n[Error]: Failed to apply for memory.", "graph-streams"),
        (
            "aclrtMallocHostWithCfg failed 207001\nRuntimeError: operation not permitted when a "
            "stream is capturing",
            "host-memory",
        ),
        (
            "RuntimeError: CUDA error: operation not permitted when stream is capturing",
            "not-memory-at-all",
        ),
        (
            "RuntimeError: call aclnnX failed, error code is 561000\nEZ9999: Nnopbase fails to invoke "
            "the HcclAllocComResourceByTiling function of the hccl module. ret = 4",
            "communicator-resources",
        ),
        ("RuntimeError: x\n[PID: 1] 2026-05-08-03:20:31.8 Some_Name(EE1006): A reason.", "other"),
        ("ATRACE(1,python3): get platform info failed, drvErr=87.", "not-memory-at-all"),
        ("rtGetDevMsg failed, reason=[driver error:internal error]\nERROR x", "not-memory-at-all"),
        (
            "[ERROR][MoeDistributeDispatchV2] Attr commAlg is invalid, current only support fullmesh_v1",
            "not-memory-at-all",
        ),
        ("ERROR EI0019: Failed to enable listening for the host", "not-memory-at-all"),
        ("    raise NotImplementedError\nNotImplementedError", "not-memory-at-all"),
        ("[1.0] python invoked oom-killer: gfp_mask=0x14, order=0", "host-memory"),
        ("RuntimeError: backend failed with error: 20 (UR_RESULT_ERROR_LOST)", "not-memory-at-all"),
    ],
)
def test_traps(text: str, kind: str | None) -> None:
    assert only(text).kind == (kind or "graph-streams")


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        (
            "The checkpoint has model type `foo` but Transformers does not recognize this architecture",
            "correct config.json",
        ),
        (
            "Model architectures ['BarForCausalLM'] are not supported for now.",
            "correct config.json",
        ),
        (
            "Total number of attention heads (28) must be divisible by tensor parallel size (8).",
            "choose a size that divides",
        ),
    ],
)
def test_what_a_validation_error_says_counts_and_not_its_first_line(said: str, cure: str) -> None:
    head = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
    cures = only(f"{head}\n  Value error, {said}").cures
    assert (cures[0].action or "").startswith(cure)


def test_a_value_is_computed_from_the_message() -> None:
    failure = only(
        "ValueError: To serve at least one request with the models's max seq len (131072), (4.54 "
        "GiB KV cache is needed, which is larger than the available KV cache memory (1.71 GiB). "
        "Based on the available memory, the estimated maximum model length is 45136. Try"
    )
    assert (failure.kind, failure.cures[0].value) == ("kv-too-small", "45136")
    assert failure.cures[0].enough == "computed"
    free = only("ValueError: Free memory on device cuda:0 (8.88/121.69 GiB) on startup is less")
    assert [cure.value for cure in free.cures] == [None, None, "0.07"]


def test_a_value_is_computed_from_a_message_of_several_lines() -> None:
    failure = only(
        "ValueError: To serve at least one request with the model's max seq len (196608),\n23.25 GiB "
        "KV cache is needed, which is larger than the available KV cache memory (22.5 GiB).\n"
        "Based on the available memory, the estimated maximum model length is 190272."
    )
    assert (failure.kind, failure.cures[0].value) == ("kv-too-small", "190272")


def test_engines_get_their_own_arguments() -> None:
    oom = "RuntimeError: NPU out of memory. Tried to allocate 2.00 MiB"
    cures = {cure.argument: cure.why for cure in only(oom).cures}
    assert cures["--gpu-memory-utilization"].startswith("with vLLM: ")
    assert cures["--mem-fraction-static"].startswith("with SGLang: ")
    frames = (
        '  File "/opt/vllm/v1/worker/gpu_worker.py", line 1, in execute_model\ncudagraph input\n'
    )
    cuda = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB."
    variables = {cure.environment for cure in only(f"EngineDeadError\n{frames}{cuda}").cures}
    assert "PYTORCH_NPU_ALLOC_CONF" not in variables
    arguments = {cure.argument for cure in only(f"sglang\n{oom}").cures}
    assert "--mem-fraction-static" in arguments
    assert "--gpu-memory-utilization" not in arguments
    vllm = only(f"(EngineCore pid=1) ERROR {oom}").cures
    assert "--mem-fraction-static" not in {cure.argument for cure in vllm}
    assert "PYTORCH_CUDA_ALLOC_CONF" not in {cure.environment for cure in vllm}


@pytest.mark.parametrize(
    ("free", "kind"),
    [
        ("60.61", "static-share"),
        ("3.00", "not-returned-after-kill"),
        ("30.00", "neighbour"),
        ("8.00", "not-returned-after-kill"),
    ],
)
def test_what_is_free_at_the_start_tells_who_has_the_rest(free: str, kind: str) -> None:
    """Nobody, one like this engine, or another."""
    said = (
        f"ValueError: Free memory on device ({free}/60.96 GiB) on startup is less than desired GPU"
    )
    failure = only(
        f"{said} memory utilization (0.{'995' if kind == 'static-share' else '85'}, "
        f"{60.65 if kind == 'static-share' else 51.82} GiB)."
    )
    assert failure.kind == kind


def test_a_table_without_a_process_tells_of_memory_that_was_not_given_back() -> None:
    said = "ValueError: Free memory on device (30.00/60.96 GiB) on startup is less than desired"
    assert (
        only(f"{said}\n| No running processes found in NPU 0 |").kind == "not-returned-after-kill"
    )


def test_an_error_before_the_server_is_up_is_never_passed_over() -> None:
    failure = only("[ERROR] 2026-01-01 (PID:1, Device:0) ERR12345 something that no row knows\n")
    assert failure.confidence == "unrecognised"


@pytest.mark.parametrize(
    "text",
    [
        "error: the moon is in the wrong house",
        'Traceback (most recent call last):\n  File "a.py", line 1, in main\n    main()',
    ],
)
def test_a_line_that_looks_like_a_failure_is_never_passed_over(text: str) -> None:
    assert only(text).confidence == "unrecognised"


@pytest.mark.parametrize(
    "text",
    [
        "(1) The process is killed by SIGKILL by OOM killer. There are some potential root causes. "
        "(3) The worker is crashed unexpectedly due to SIGSEGV",
        "ValueError: 12 tokens exceed the space of the pool",
    ],
)
def test_a_guess_is_not_made_of_words_that_tell_of_memory(text: str) -> None:
    failure = only(text)
    assert failure.kind in {"host-memory", "other"}
    assert failure.confidence != "certain"


def test_an_error_that_no_row_names_is_shown_as_it_is() -> None:
    failure = only("ERROR core.py] RuntimeError: the moon is in the wrong house\nEngineDeadError")
    assert failure.title == "failed: RuntimeError: the moon is in the wrong house; not recognised"
    assert (failure.kind, failure.confidence) == ("other", "unrecognised")
    assert failure.cures == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "INFO If out-of-memory error occurs during cudagraph capture, consider decreasing it\n",
        "WARNING Failed to import from vllm._C with ImportError('no')\n",
        "ValueError: odd\nINFO: Application startup complete.\n",
        "INFO: Application startup complete.\nERROR ValueError: top_k is not supported here\n",
        'INFO: 1.2.3.4:5 - "POST /v1/completions HTTP/1.1" 200 OK\n',
        "NVRM: Check failed: Out of memory [NV_ERR_NO_MEMORY] returned from _alloc(pDesc)",
    ],
)
def test_a_healthy_log_names_no_failure(text: str) -> None:
    assert named(text) == []


def test_each_start_has_its_own_failure() -> None:
    begin = "INFO Initializing a V1 LLM engine (v0.11.0)\n"
    text = (
        f"{begin}ERROR CUBLAS_STATUS_ALLOC_FAILED\nERROR EngineCore failed to start.\n"
        f"{begin}OSError: [Errno 98] address already in use\nEngineCore failed to start\n"
    )
    assert [(line, one.kind) for line, one in named(text)] == [
        (2, "profile-too-small"),
        (5, "not-memory-at-all"),
    ]


def test_far_down_a_log_the_reader_still_gets_every_example() -> None:
    missed = [row.title for row in ROWS if not any(each in row.example for each in SIGNALS)]
    assert len(missed) < 20, missed


_TOO_LITTLE = (
    "ValueError: Free memory on device (8.0/64.0 GiB) on startup is less than desired GPU memory "
    "utilization (0.9, 57.6 GiB)."
)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ("", "not-returned-after-kill"),
        ("Killed\n", "not-returned-after-kill"),
        ("INFO launcher.py] Shutting down FastAPI HTTP server.\n", "neighbour"),
    ],
)
def test_what_a_start_before_left_is_no_neighbour(end: str, kind: str) -> None:
    found = named(
        "INFO Starting vLLM API server on http://0.0.0.0:8000\n"
        + end
        + "INFO core.py] Initializing a V1 LLM engine (v0.23.0)\n"
        + _TOO_LITTLE
    )
    assert found[-1][1].kind == kind


def test_a_line_of_source_is_no_error() -> None:
    failure = only(
        '  File "utils.py", line 1, in wait_for_engine_startup\n    raise RuntimeError(\n'
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert failure.confidence == "unrecognised"
    assert "Engine core initialization failed" in failure.title


@pytest.mark.parametrize(("status", "kind"), [(-9, "host-memory"), (-11, "not-memory-at-all")])
def test_the_exit_status_of_an_engine_core_tells(status: int, kind: str) -> None:
    failure = only(
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core "
        f"proc(s): {{'EngineCore': {status}}}\n"
    )
    assert failure.kind == kind


_OF_TILING = "NEEDED_HCCL_BUFFSIZE(((maxBs * k) + (maxBs * h)) * 2) = 609MB, HCCL_BUFFSIZE=200MB.[F"


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (f"HCCL_BUFFSIZE is too SMALL, maxBs = 512, k = 8, {_OF_TILING}", "609"),
        (f"HCCL_BUFFSIZE_EP is too SMALL, maxBs = 64, h = 6144,{_OF_TILING}", "609"),
        (
            "HCCL_BUFFSIZE is too SMALL, maxBs = 512, h = 7168, epWorldSize = 2,ep_worldsize * "
            "maxBs * h * 2 * 2 * localMoeExpertNum = 1043MB, HCCL_BUFFSIZE=1024MB.",
            "1043",
        ),
        ("the HCCL_BUFFSIZE should be larger", None),
    ],
)
def test_a_buffer_that_is_too_small_is_made_larger(said: str, value: str | None) -> None:
    failure = only(f"ERROR EZ9999[PID: 7] (EZ9999):  {said}")
    cure = failure.cures[0]
    assert (failure.kind, cure.environment, cure.value) == (
        "communicator-resources",
        "HCCL_BUFFSIZE",
        value,
    )


@pytest.mark.parametrize(
    ("text", "kind", "title"),
    [
        (
            "EL0004: [PID: 1] Failed to allocate memory.\n"
            "Failed to allocate resource[DeviceMemory] with info [size:2147483648].\n"
            "Nnopbase fails to invoke the HcclAllocComResourceByTiling function of the hccl module.",
            "communicator-resources",
            "an operator that exchanges",
        ),
        (
            "RuntimeError: Failed to infer device type\n"
            "ImportError: libhccl.so: cannot open shared object file: No such file or directory",
            "not-memory-at-all",
            "a library of CANN",
        ),
        (
            "E1 1 coro.hpp:9] E\nE1 481 master_client.cpp:192] Failed to mount segment due to rpc "
            "error",
            "connector",
            "the KV transfer",
        ),
        (
            '  File "/lmcache_ascend/v1/transfer_channel/hccl_channel.py", line 706, in __init__\n'
            "    mem_handle = hccl_agent.register_mem(buffer_ptr, buffer_size)\n"
            "RuntimeError: Failed to register memory | HCCL Error Code: 19",
            "connector",
            "the memory that a connector transfers",
        ),
        ("RuntimeError: Mooncake memory registration failed.", "connector", "the memory that a"),
        (
            "(raylet) node_manager.cc:3007: 2 Workers (tasks /\n actors) killed due to memory "
            "pressure (OOM), 0 Workers crashed",
            "host-memory",
            "Ray ended a worker",
        ),
        (
            "Exception: Capture cuda graph failed: [gloo/transport/tcp/pair.cc:534] Connection "
            "closed by peer",
            "not-memory-at-all",
            "a rank was lost",
        ),
        (
            "RuntimeError: status == aclmdlRICaptureStatus::ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE "
            'INTERNAL ASSERT FAILED at "NPUGraph.cpp":162',
            "not-memory-at-all",
            "graphs could not be captured",
        ),
        (
            "RuntimeError: Cannot run aclop operators during NPU graph capture. Current working "
            "aclop is Fill.",
            "not-memory-at-all",
            "an operation that a graph cannot record",
        ),
        (
            "RuntimeError: aclrtGetCurrentContext, error code is 107002\n"
            "[Init][Version]init soc version failed, ret = 507008",
            "not-memory-at-all",
            "the driver does not serve",
        ),
        (
            "dcmi model initialized failed, because the device is used. ret is -8020",
            "not-memory-at-all",
            "the driver shows no device",
        ),
        ("NPU function error: x, error code is 107020", "not-memory-at-all", "a kernel took too"),
        (
            "aclrtLaunchKernelWithHostArgs failed: 507018, error code is 507018\n"
            "Communication_Error_Timeout(EI0002): The Notify register times out.",
            "not-memory-at-all",
            "a rank waited in a collective operation",
        ),
        (
            "[Rank 4] HCCL watchdog thread terminated with exception: ERR02005 DIST internal error",
            "not-memory-at-all",
            "a collective operation of HCCL failed",
        ),
        (
            "ValueError: No available memory for the cache blocks.\n"
            '  File "kv_cache_utils.py", line 699, in check_enough_kv_cache_memory',
            "negative-kv",
            "no memory is left",
        ),
        (
            "Failed to allocate resource[DeviceMemory] with info [size:140737488355328].\n"
            "Nnopbase fails to invoke the HcclAllocComResourceByTiling function of the hccl module.",
            "engine-bug",
            "a size was computed wrongly",
        ),
        (
            "[ERROR] RUNTIME(7,all):2026-01-20-09:48:14.623.842 [device_error_core_proc.cc:333]7 "
            "ProcessStarsCoreErrorInfo:report error module_type=5, module_name=EZ9999\n"
            "The error from device(chipId:5, dieId:0), serial number is 59, there is an exception of "
            "fftsplus aivector error, core id is 8, error code = 0x10",
            "not-memory-at-all",
            "a kernel faulted on the device",
        ),
        (
            "EE1001: The argument is invalid.Reason: Set visible device failed, invalid device=1, "
            "input visible devices:1\nrtSetDevice execute failed, reason=[device id error]",
            "not-memory-at-all",
            "the devices that are asked for",
        ),
        (
            "RuntimeError: checkUceErrAndRepair:NPUException.cpp:200 NPU error, error code is "
            "507899\n"
            "EZ9999: Inner Error!\n"
            "EZ9999: there is an exception of fftsplus aicore error, core id is 2\n"
            "errorStr: The DDR address of the MTE instruction is out of range.\n"
            "rtStreamSynchronize execute failed, reason=[device mem error]",
            "not-memory-at-all",
            "a kernel faulted on the device",
        ),
        (
            "INFO:     Application startup complete.\n"
            "ERROR core.py:341] EngineCore hit an exception: Traceback (most recent call last):\n"
            "ERROR core.py:341] IndexError: list index out of range",
            "not-memory-at-all",
            "the engine's code met",
        ),
        (
            "INFO:     Application startup complete.\n"
            "[2025-01-17 01:52:11 TP0] TpModelWorkerClient hit an exception: Traceback (most recent "
            "call last):\nNameError: name 'x' is not defined",
            "not-memory-at-all",
            "the engine's code met",
        ),
        (
            "    done = await asyncio.wait_for(task, timeout)\nIndexError: tuple index out of range",
            "not-memory-at-all",
            "the engine's code met",
        ),
        (
            "CUDA Error: out of memory (2) /flashinfer/handler.cuh: line 100 at function "
            "cudaMallocAsync\nRuntimeError: BatchDecode failed with error out of memory",
            "other",
            "device memory ran out",
        ),
        (
            "[2025-04-09 17:19:56 TP5] Scheduler hit an exception: Traceback (most recent call last):\n"
            '  File "mm_utils.py", line 354, in general_mm_embed_routine\n'
            "    inputs_embeds = embed_tokens(input_ids)\n"
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.43 GiB.",
            "static-share",
            "weights and KV pool leave too little",
        ),
        (
            "RuntimeError: [15:36:55] /project/cpp/regex_converter.cc:73: Regex parsing error at "
            "position 106: Invalid repetition count.",
            "not-memory-at-all",
            "a grammar for structured output",
        ),
        (
            "ERROR core.py:205] KeyError: 'Cannot find `mm_limits` for model=m'\n"
            "CRITICAL core_client.py:146] Got fatal signal from worker processes, shutting down.\n"
            "deploy.sh: line 46:  7164 Killed                  vllm serve m",
            "not-memory-at-all",
            "the engine's code met",
        ),
        (
            "[2026-01-01 00:00:00] Scheduler or DataParallelController 42 terminated with -9\n"
            "Received sigquit from a child process. It usually means the child failed.",
            "host-memory",
            "a process was killed from outside",
        ),
        (
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -11). If exit code "
            "is -9 (SIGKILL), a common cause is the OS OOM killer.",
            "not-memory-at-all",
            "a process crashed in native code",
        ),
        (
            "*** SIGSEGV received at time=1746566409 on cpu 131 ***\n"
            "ActorDiedError: Worker unexpectedly exits with a connection error code 2. There are some "
            "potential root causes. (3) The worker is crashed unexpectedly due to SIGSEGV",
            "not-memory-at-all",
            "a process crashed in native code",
        ),
        (
            'https://huggingface.co:443 "HEAD /m/preprocessor_config.json HTTP/1.1" 200 0\n'
            '  File "worker.py", line 1, in load_model\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 114.00 MiB.",
            "weights-too-large",
            "the weights do not fit",
        ),
        (
            "Exception in ModelTpServer:\nValueError: not enough values to unpack (expected 2)",
            "not-memory-at-all",
            "the engine's code met",
        ),
        (
            "pydantic_core.ValidationError: 1 validation error for CapitalInfo\nEngineDeadError",
            "other",
            "failed: pydantic_core.ValidationError",
        ),
        (
            "RuntimeError: x NPU function error: call aclnnWeightQuantBatchMatmulV2 failed, error code "
            "is 161002\nEZ1001[PID: 1] (EZ1001):  when weight's dtype is [int4], weight's format is "
            "[FRACTAL_NZ], antiquantGroupSize should be 128 or 64",
            "not-memory-at-all",
            "the operator does not take quantised weights in groups of this size",
        ),
        (
            "call aclnnInplaceCopy failed, detail:EZ1001: [PID: 1] 8462 and 8192 cannot broadcast.",
            "not-memory-at-all",
            "an operator got input",
        ),
        (
            "call aclnnSwiGlu failed, detail:EZ1001: [PID: 1] Get path and read binary_info_config.json "
            "failed, please check if the opp_kernel package is installed!",
            "not-memory-at-all",
            "the package with the operators' kernels",
        ),
        (
            "ERROR EI0005: The arguments for collective communication are inconsistent between ranks\n"
            "        Transport init error. Reason: [Create] [DestLink]Create Dest error!",
            "not-memory-at-all",
            "ranks call a collective operation",
        ),
        (
            "AssertionError: Invalid kv_cache_dtype: float16. Valid values are: ('auto', 'fp8')",
            "not-memory-at-all",
            "the engine refuses a combination of arguments",
        ),
        (
            '  File "base_loader.py", line 50, in load_model\n    model = initialize_model(\n'
            "KeyError: 'embed_tokens.weight'",
            "not-memory-at-all",
            "the engine does not read the files",
        ),
        (
            "Triton/load_binary\nRuntimeError: Triton Error [CUDA]: operation not permitted",
            "not-memory-at-all",
            "CUDA or torch reports a fault",
        ),
        (
            "INFO Job entrypoint command failed with exit code 1, last available logs:\n95412 14.05 "
            "ray::Actor\nRefer to the documentation on how to address the out of memory issue: "
            "https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html.",
            "host-memory",
            "Ray ended a worker",
        ),
        (
            "RuntimeError: Failed to register buffer to Mooncake Store, error code: -1",
            "connector",
            "the memory that a connector transfers",
        ),
        (
            "error 1 [BM hybm_entry.cpp:284] HalGvaAlloc hybm meta memory failed: -1\n"
            "error 1 [SMEM smem_trans.cpp:44] hybm core init failed: -3\n"
            "RuntimeError: Ascend Transfer Engine initialization failed.",
            "connector",
            "the engine that transfers KV caches",
        ),
        (
            "terminate called after throwing an instance of 'std::logic_error'\n"
            "  what():  basic_string::_S_construct null not valid\n"
            "ERROR [core.py:1165] EngineCore failed to start.\n"
            'ERROR [core.py:1165]   File "core.py", line 1689, in __init__',
            "not-memory-at-all",
            "a process crashed in native code",
        ),
        (
            "[server] [ERROR] : [LLMInferModelInstance::Init] llmManager_ init fail!\n"
            "[server] [ERROR] : ModelInstance init failed",
            "other",
            "MindIE's engine did not start",
        ),
        (
            "DataLoader worker is killed by signal: Bus error. It is possible that dataloader's workers "
            "are out of shared memory.",
            "host-memory",
            "/dev/shm is too small",
        ),
        (
            "$ sglang serve --model-path x/FLUX.1-dev --dit-layerwise-offload\n"
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 72.00 MiB.",
            "weights-too-large",
            "the models of a diffusion pipeline",
        ),
        (
            "_fused_kernel launch failed: because value 70218 for parameter coreDim is invalid.\n"
            "RuntimeError: The Inner error is reported as above. The process exits for this inner "
            "error, and the current working operator name is _fused_kernel.",
            "not-memory-at-all",
            "a kernel is launched with a value",
        ),
        (
            "RuntimeError: Cannot prepare for replay during capturing stage",
            "not-memory-at-all",
            "an operation that a graph cannot record",
        ),
        (
            '  File "qwen3_vl.py", line 572, in forward\n'
            "ld.lld: for the --mcpu option: Cannot find option named 'Ascend310P3'!",
            "not-memory-at-all",
            "this installation was built for a different chip",
        ),
        (
            "RuntimeError: Can not support soc_version: 104.",
            "not-memory-at-all",
            "this installation was built for a different chip",
        ),
        (
            "gds_device_buffer.cufile_register: cuFileBufRegister returned an error = 5016\n"
            "ERROR [multiproc_executor.py:597] WorkerProc failed to start.",
            "not-memory-at-all",
            "weights cannot be read from the disk",
        ),
        (
            "TypeError: Error: --enable-auto-tool-choice and --enable-reasoning cannot be enabled at "
            "the same time",
            "not-memory-at-all",
            "the engine refuses a combination of arguments",
        ),
        (
            "RuntimeError: DeepGEMM backend is not available or outdated.\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "not-memory-at-all",
            "a library or Python package",
        ),
        (
            "Exception: Capture cuda graph failed: f(at::Tensor)::<lambda()> failed to dispatch head_dim "
            "96\nKilled",
            "not-memory-at-all",
            "the card or the library has no kernel",
        ),
        (
            "ValueError: The input size is not aligned with the quantized weight shape. This can be "
            "caused by too large tensor parallel size.\nWorker pid 18 died, exit code: -15",
            "not-memory-at-all",
            "a device's slice of quantised",
        ),
        (
            "RuntimeError: Loading lora /m/adapter failed\n"
            "ValueError: base_model.model.lm_head.weight is unsupported LoRA weight",
            "not-memory-at-all",
            "the LoRA adapter",
        ),
        (
            "INFO If you are running out of memory, consider decreasing it\nERROR] AssertionError",
            "not-memory-at-all",
            "a check of the engine's own code",
        ),
        (
            "AssertionError: Does not support prefix-enabled attention.",
            "not-memory-at-all",
            "the engine refuses a combination",
        ),
        (
            "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current "
            "PyTorch installation.\nRuntimeError: CUDA error: no kernel image is available",
            "not-memory-at-all",
            "this build has no kernels",
        ),
        (
            "zmq.error.ZMQError: Operation not supported\nRuntimeError: Engine process failed to start.\n"
            "sqlite3.OperationalError: disk I/O error",
            "not-memory-at-all",
            "a cache or file on the disk",
        ),
        (
            "AttributeError: 'PixtralVisionConfig' object has no attribute 'spatial_merge_size'",
            "not-memory-at-all",
            "the engine calls a package",
        ),
        (
            "AssertionError: res=<Response [502]>, res.text=''\nKilled",
            "not-memory-at-all",
            "the warm-up request",
        ),
        (
            "    raise RuntimeError(\nRuntimeError: Failed to infer device type",
            "not-memory-at-all",
            "vLLM sees no device",
        ),
        (
            "ValueError: Available memory on node 0 (3/64 GiB) on startup is less than desired CPU "
            "memory utilization (0.9, 57 GiB).",
            "host-memory",
            "the host has no room",
        ),
        (
            "  error: subprocess-exited-with-error\nninja: build stopped: subcommand failed.",
            "not-memory-at-all",
            "building the engine or its operat",
        ),
        (
            "RuntimeError: Insufficient space in /dev/shm: 160 MiB required, 64 MiB free.\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "host-memory",
            "/dev/shm is too small",
        ),
        (
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -3). If exit code "
            "is -9 (SIGKILL), a common cause is the OS OOM killer.",
            "other",
            "the engine's process died",
        ),
        (
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code "
            "is -9 (SIGKILL), a common cause is the OS OOM killer.",
            "host-memory",
            "a process was killed from outside",
        ),
        (
            "[2026-11-20 10:00:00] Received sigquit from a child process.\n"
            "Exception: Server process exited with code -9. Check server logs for errors.",
            "other",
            "the engine's process died",
        ),
        (
            '  File "/opt/sglang/srt/entrypoints/engine.py", line 1, in _wait_for_scheduler_ready\n'
            "    data = scheduler_pipe_readers[i].recv()\n"
            '  File "connection.py", line 383, in _recv\n    raise EOFError\nEOFError',
            "other",
            "the engine's process died",
        ),
        (
            "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any "
            "requests. Try: (1) reduce --max-running-requests, (2) increase --mem-fraction-static",
            "kv-too-small",
            "the KV cache has fewer blocks",
        ),
        (
            "AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use "
            "`--attention-backend flashinfer`.",
            "not-memory-at-all",
            "the engine refuses a combination",
        ),
        (
            '  File "/opt/sglang/srt/arg_groups/hicache_hook.py", line 117, in handle\n'
            "    raise ValueError(\n"
            "ValueError: --hicache-host-memory-fraction must be in (0, 1].",
            "not-memory-at-all",
            "the engine refuses a combination",
        ),
        (
            "Process group watchdog thread terminated with exception:\n"
            "HIP error: operation not permitted on an event last recorded in a capturing stream\n"
            "scheduler aborts (SIGABRT, exit code -6)",
            "not-memory-at-all",
            "an operation that a graph cannot",
        ),
        (
            "CUDA error (/w/hopper/flash_fwd_launch_template.h:188): invalid argument\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "not-memory-at-all",
            "CUDA or torch reports a fault",
        ),
    ],
)
def test_of_several_lines_the_one_nearest_to_the_root_counts(
    text: str, kind: str, title: str
) -> None:
    failure = only(text)
    assert (failure.kind, failure.title[: len(title)]) == (kind, title)


def test_a_traceback_behind_a_bar_of_progress_is_an_error() -> None:
    bar = "Capturing ACL graphs:  14%|" + "█" * 200 + "| 1/7 [00:01<00:08,  1.41s/it]"
    assert only(f"{bar}Traceback (most recent call last):").confidence == "unrecognised"


def test_sglang_names_the_least_static_share() -> None:
    failure = only(
        "ValueError: Loaded weights leave no GPU memory for the KV cache under "
        "--mem-fraction-static=0.2. Raise --mem-fraction-static above 0.434 (minimum viable = 1 - "
        "available/pre = 0.4333). If using speculative decoding, draft weights are now counted.\n"
    )
    assert (failure.kind, failure.cures[0].argument) == ("negative-kv", "--mem-fraction-static")


def test_of_a_traceback_without_its_end_the_last_frame_is_shown() -> None:
    failure = only(
        "ERROR 01-01 10:00:00 [core.py:7] EngineCore failed to start.\n"
        'ERROR 01-01 10:00:00 [core.py:7]   File "/v/worker/worker.py", line 7, in load_model\n'
        "ERROR 01-01 10:00:00 [core.py:7]     self.model_runner.load_model()\n"
        'ERROR 01-01 10:00:00 [core.py:7]   File "/v/worker/runner.py", line 9, in initialize_cache\n'
        'ERROR 01-01 10:00:00 [core.py:7]   File "/p/torch/_ops.py", line 1, in __call__\n'
    )
    assert failure.confidence == "unrecognised"
    assert "in initialize_cache" in failure.title


def test_a_log_that_lost_its_line_feeds_is_read_record_by_record() -> None:
    prefix = "(EngineCore_DP0 pid=7) ERROR 01-01 10:00:00 [core.py:7]"
    told = [f"{prefix} File {n}, in step_{n}, which says nothing of it" for n in range(40)]
    log = " ".join(
        [
            "INFO 01-01 10:00:00 [core.py:1] Initializing a V1 LLM engine",
            *told,
            f"{prefix} ValueError: No available memory for the cache blocks.",
        ]
    )
    ((_, failure),) = sorted_lines([log.encode()])[1]
    assert failure.kind == "negative-kv"
    assert [line.text.count("pid=7") for line in failure.evidence] == [1]


def test_two_sleeps_on_one_line_end_nothing() -> None:
    slept = "Sleep mode freed 40.00 GiB memory, {} GiB memory is still in use."
    log = f"INFO 01-01 10:00:00 [w.py:1] {slept.format('4.00')} {slept.format('11.00')}"
    starts, _ = sorted_lines([log.encode()])
    ((worker,),) = [list(start.workers.values()) for start in starts.starts]
    assert len(worker.sleeps) == 1


def test_the_reason_behind_a_validation_error_is_evidence() -> None:
    failure = only(
        "vllm serve: error: argument --compilation-config/-O: 1 validation error for CompilationConfig\n"
        "  Input should be an object [type=dataclass_type, input_value=3, input_type=int]\n"
    )
    assert [line.line for line in failure.evidence] == [1, 2]


def test_what_is_raised_is_evidence_and_not_the_line_of_source_that_raises_it() -> None:
    failure = only(
        'ERROR     raise ValueError("No available memory for the cache blocks. "\n'
        "ERROR ValueError: No available memory for the cache blocks. Try increasing `gpu_memory`\n"
    )
    assert [line.line for line in failure.evidence] == [2]
    assert only("    raise HFValidationError(\n").evidence[0].line == 1


def test_a_model_whose_class_cannot_be_imported_is_not_unknown() -> None:
    inspected = (
        "ERROR registry.py] Error in inspecting model architecture 'NewForCausalLM'\n{reason}"
        "pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, Model architectures ['NewForCausalLM'] failed to be inspected.\n"
    )
    assert "could not import it" in only(inspected.format(reason="")).title
    missing = "ModuleNotFoundError: No module named 'triton'\n"
    assert only(inspected.format(reason=missing)).evidence[0].line == 2


def test_a_large_piece_in_one_step_of_serving_is_no_growth() -> None:
    failure = only(
        "(Worker_TP0 pid=1) ERROR [x.py:1] RuntimeError: NPU out of memory. Tried to allocate 11.50 GiB "
        "(NPU 0; 60.97 GiB total capacity; 54.10 GiB already allocated; 54.10 GiB current active; 4.64 "
        "GiB free; 54.27 GiB reserved in total by PyTorch)\n"
        '(Worker_TP0 pid=1) ERROR [x.py:1]   File "worker_v1.py", line 254, in execute_model\n'
    )
    assert failure.kind == "profile-too-small"


def test_workers_that_do_not_answer_hang_unless_the_engine_is_ready_after_all() -> None:
    silent = "(EngineCore pid=1) INFO [shm_broadcast.py:801] No available shared memory broadcast block\n"
    assert "hang" in only(silent * 3).title
    assert named(silent * 2) == []
    assert (
        named(silent * 3 + "INFO init engine (profile, create kv cache) took 400 s: KV cache") == []
    )


def test_a_device_of_a_different_container_is_not_there() -> None:
    failure = only(
        "ERROR [engine.py:4]   halGetDeviceInfo get device type version failed , ret:87[FUNC:Init]\n"
        "ERROR [engine.py:4]   [Init][Version]init soc version failed, ret = 507008[FUNC:Report]\n"
    )
    assert "another container has it" in failure.title


def test_nccl_says_in_a_line_of_its_own_that_memory_ran_out() -> None:
    failure = only(
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:133, unhandled cuda error\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 'out of memory'\n"
    )
    assert (failure.kind, failure.is_memory) == ("communicator-resources", True)


def test_a_rank_that_waits_in_a_collective_operation_is_linked() -> None:
    failure = only(
        "ERROR hccl fftsplus task timeout occurred during task execution, stuck notify num:3, "
        "timeout:1836.[FUNC:ProcessStarsHcclFftsPlusTimeoutErrorInfo]\n"
    )
    assert "HCCL_CONNECT_TIMEOUT" not in {cure.environment for cure in failure.cures}


def test_a_bus_error_is_certain_only_where_the_message_says_so() -> None:
    bare = only("INFO GPU KV cache size: 300,000 tokens\nBus error (core dumped)\n")
    assert (bare.kind, bare.confidence) == ("host-memory", "likely")
    loading = only(
        "Loading safetensors checkpoint shards:  50% Completed | 7/14 [00:04<00:04,  1.53it/s]\n"
        "Fatal Python error: Bus error\n"
    )
    assert (loading.kind, loading.confidence, loading.is_memory) == ("other", "likely", False)


def test_a_dead_engine_whose_error_stands_elsewhere_is_told_so() -> None:
    dead = (
        "ERROR [async_llm.py:704] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered "
        "an issue. See stack trace (above) for the root cause.\n"
    )
    assert "not in this log" in only(f'{dead}INFO: "POST /v1" 500 Internal Server Error\n').title
    assert "KeyError" in only(f"ERROR KeyError: 'x'\n{dead}").evidence[0].text


_UP = "INFO:     Application startup complete.\n"
_DIED = (
    "ERROR [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly, shutting down\n"
)


@pytest.mark.parametrize(
    "told",
    [
        "INFO [launcher.py:110] Shutting down FastAPI HTTP server.\n",
        "WARNING Received SIGTERM\n",
        "^CTraceback: KeyboardInterrupt\n",
    ],
)
def test_processes_that_end_after_they_were_told_to_are_no_failure(told: str) -> None:
    dead = (
        "ERROR [async_llm.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered\n"
    )
    assert named(f"{_UP}{told}{_DIED}{dead}") == []
    assert "without a word" in only(f"{_UP}{_DIED}{told}").title


def test_a_diffusion_worker_gets_no_argument_of_an_engine_with_a_kv_cache() -> None:
    failure = only(
        '  File "/opt/vllm_omni/diffusion/worker/diffusion_worker.py", line 76, in execute_model\n'
        "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.96 GiB total "
        "capacity; 59.36 GiB already allocated; 59.36 GiB current active; 0.10 GiB free; 59.60 GiB "
        "reserved in total by PyTorch)\n"
    )
    assert {cure.argument for cure in failure.cures} == {None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "RuntimeError: npu_op: the dim of x should be 2\n[ERROR] 2026-01-01-00:00:00 (PID:1, "
            "Device:0, RankID:-1) ERR01001 OPS invalid parameter",
            "input that it does not take",
        ),
        ("EZ9999: [PID: 1] x Parse dynamic kernel config fail.", "operators' kernels is missing"),
        (
            "Execution_Error(EZ1009): SoC version ascend310p verification failed.",
            "no such operator",
        ),
        (
            "RuntimeError: NPU function error: x, error code is 507011\n[Error]: Model execution "
            "failed.\nE39999: Inner Error! msg:aicpu execute failed",
            "AI CPU",
        ),
        ("gmake[3]: *** [lib/libvllm_ascend_kernels.so] Error 1", "building the engine"),
        ("ValueError: World size (16) is larger than the number of available GPUs (8)", "ask for"),
        (
            '  File "/opt/vllm/config/cache.py", line 1, in check\n    raise ValueError(\n'
            "ValueError: block_size 7 is odd for this cache",
            "combination of arguments",
        ),
    ],
)
def test_classes_of_errors_are_known_by_code_and_by_where_they_were_raised(
    text: str, said: str
) -> None:
    assert said in only(text).title
