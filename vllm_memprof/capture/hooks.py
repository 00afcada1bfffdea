"""The hook table: which callables of which engine versions mark which phase. Data; no engine module is imported here.

One row per hook. A target is ``module:Attribute`` or ``module:Class.method``. Every target of a row that exists is
bound (rows list the spellings of several versions and the classes that override each other; a call that passes
through two of them counts once). A row is in force when the running vLLM is inside ``versions`` and the device
backend is in ``backends``.

``need`` says what an unbound row means: ``required`` is a finding, ``optional`` is nothing, ``expected_absent`` says
that these versions have no such place, and flags the table as out of date when it turns up.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_memprof.capture.versions import in_range

REQUIRED, OPTIONAL, EXPECTED_ABSENT = "required", "optional", "expected_absent"

#: Moments at which rows are judged or removed, in their order in a worker's or an engine core's life.
DEVICE_READY, MODEL_READY, ENGINE_READY, PROFILED, END = (
    "device_ready",
    "model_ready",
    "engine_ready",
    "profiled",
    "end",
)

_W = "vllm_ascend.worker.worker:NPUWorker"
_W11 = "vllm_ascend.worker.worker_v1:NPUWorker"
_R = "vllm_ascend.worker.model_runner_v1:NPUModelRunner"
_GW = "vllm.v1.worker.gpu_worker:Worker"
_GR = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_CORE = "vllm.v1.engine.core"
_WRAPPER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
_PG = "torch.distributed:ProcessGroup"


@dataclass(frozen=True)
class Hook:
    """One row of the table."""

    id: str
    phase: str | None  # phase id it marks; None for markers that only feed others
    need: str  # required | optional | expected_absent
    role: str  # worker | engine_core | api: in which process it is expected to bind
    action: str  # key into actions.ACTIONS
    targets: tuple[str, ...]
    kind: str = (
        "around"  # around (function or method) | context (returns a context manager) | async
    )
    backends: tuple[str, ...] = ("npu", "cuda")
    versions: str = ">=0.11"  # of vLLM
    after: str | None = (
        None  # module whose import makes the target final, when that is not the target's own module
    )
    expect_calls: tuple[int, int | None] = (
        0,
        None,
    )  # by the moment named in due; (1, None) is "at least once"
    due: str = MODEL_READY
    until: str | None = None  # moment at which the wrapper is taken off again; None keeps it
    notes: str = ""


def _worker_phase(
    id_: str, phase: str, method: str, action: str = "phase", **fields: object
) -> tuple[Hook, Hook]:
    """The Ascend row and the CUDA row of a phase that is one worker method under the same name in both."""
    npu = Hook(
        id_, phase, REQUIRED, "worker", action, (f"{_W}.{method}",), backends=("npu",), **fields
    )  # type: ignore[arg-type]
    cuda = Hook(
        f"cuda.{id_}",
        phase,
        REQUIRED,
        "worker",
        action,
        (f"{_GW}.{method}",),
        backends=("cuda",),
        **fields,  # type: ignore[arg-type]
    )
    return npu, cuda


#: Collectives of a process group, below torch.distributed's functions: by-name imports, functional wrappers and
#: compiled regions all arrive here, and replacing these does not change what the compiler sees.
COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
)

HOOKS: tuple[Hook, ...] = (
    # Who this process is. Plugins run inside EngineCore.__init__ or init_worker, so these rows serve forked children.
    Hook(
        "role.engine_core",
        None,
        OPTIONAL,
        "engine_core",
        "role_engine_core",
        (f"{_CORE}:EngineCore.__init__",),
        due=ENGINE_READY,
        notes="its end is the engine's readiness when the engine core shares the caller's process",
    ),
    Hook("role.worker", None, OPTIONAL, "worker", "role_worker", (f"{_WRAPPER}.init_worker",)),
    Hook(
        "w.device_ready",
        None,
        REQUIRED,
        "worker",
        "device_ready",
        (f"{_WRAPPER}.init_device",),
        expect_calls=(1, None),
        notes="classes are final and ranks are known at its end: identity, second binding pass, first self-check",
    ),
    # Phases of a worker.
    *_worker_phase(
        "w.device_init", "device_init", "init_device", "device_init", expect_calls=(1, 1)
    ),
    Hook(
        "w.hccl_init",
        "hccl_init",
        REQUIRED,
        "worker",
        "phase",
        (
            f"{_W}._init_worker_distributed_environment",
            f"{_W11}._init_worker_distributed_environment",
        ),
        backends=("npu",),
        expect_calls=(1, 1),
        notes="communicators are lazy: their bytes appear at the first collective",
    ),
    Hook(
        "cuda.w.nccl_init",
        "hccl_init",
        REQUIRED,
        "worker",
        "phase",
        ("vllm.v1.worker.gpu_worker:init_worker_distributed_environment",),
        backends=("cuda",),
        expect_calls=(1, 1),
    ),
    *_worker_phase("w.weight_load", "weight_load", "load_model", "load_model", expect_calls=(1, 1)),
    Hook(
        "load.measured",
        None,
        OPTIONAL,
        "worker",
        "weights",
        (
            "vllm.utils.mem_utils:DeviceMemoryProfiler.__exit__",
            "vllm.utils:DeviceMemoryProfiler.__exit__",
        ),
        backends=("npu",),
        versions="<0.18",
        notes="vllm-ascend prints the weights' bytes and forgets them; they are this object's consumed_memory",
    ),
    *_worker_phase(
        "w.profile_run",
        "profile_run",
        "determine_available_memory",
        "profile_run",
        expect_calls=(0, 1),
    ),
    Hook(
        "w.memory_profiling",
        None,
        REQUIRED,
        "worker",
        "memory_profiling",
        ("vllm_ascend.worker.worker:memory_profiling",),
        kind="context",
        backends=("npu",),
        versions=">=0.18",
        notes="not entered when --kv-cache-memory-bytes is given",
    ),
    Hook(
        "cuda.w.memory_profiling",
        None,
        REQUIRED,
        "worker",
        "memory_profiling",
        ("vllm.v1.worker.gpu_worker:memory_profiling",),
        kind="context",
        backends=("cuda",),
    ),
    Hook(
        "r.mm_batch",
        "mm_profile",
        REQUIRED,
        "worker",
        "mm_profile_start",
        (f"{_GR}._get_mm_dummy_batch",),
        versions=">=0.12",
        until=PROFILED,
        notes="multimodal profiling is inline code: it starts here and ends at the full-size dummy run",
    ),
    Hook(
        "r.mm_batch.v0.11",
        "mm_profile",
        EXPECTED_ABSENT,
        "worker",
        "mm_profile_start",
        (f"{_R}._get_mm_dummy_batch",),
        backends=("npu",),
        versions="<0.12",
        notes="vllm-ascend 0.11 does not profile the encoder",
    ),
    Hook(
        "r.dummy_run",
        None,
        REQUIRED,
        "worker",
        "mm_profile_stop",
        (f"{_R}._dummy_run",),
        backends=("npu",),
        until=PROFILED,
        notes="also runs in capture and on idle data-parallel ranks: taken off after profiling",
    ),
    Hook(
        "cuda.r.dummy_run",
        None,
        REQUIRED,
        "worker",
        "mm_profile_stop",
        (f"{_GR}._dummy_run",),
        backends=("cuda",),
        until=PROFILED,
    ),
    *_worker_phase(
        "w.kv_cache_alloc", "kv_cache_alloc", "initialize_from_config", expect_calls=(0, 1)
    ),
    *_worker_phase(
        "w.warm_up", "warm_up", "compile_or_warm_up_model", "warm_up", expect_calls=(1, 1)
    ),
    Hook(
        "w.atb_warm_up",
        "atb_warm_up",
        OPTIONAL,
        "worker",
        "phase",
        (f"{_W}._warm_up_atb",),
        backends=("npu",),
        notes="one ATB operation, in warm_up: ATB's tiling buffers appear here unless an operation before it took them",
    ),
    Hook(
        "r.graph_capture",
        "graph_capture",
        REQUIRED,
        "worker",
        "graph_capture",
        (f"{_R}.capture_model",),
        backends=("npu",),
        notes="never called in eager mode",
    ),
    Hook(
        "r.graph_capture.inherited",
        None,
        OPTIONAL,
        "worker",
        "captured_bytes",
        (f"{_GR}.capture_model",),
        backends=("npu",),
        versions="<0.23",
        notes="vllm-ascend's own capture_model drops what this one measured and returned",
    ),
    Hook(
        "cuda.r.graph_capture",
        "graph_capture",
        REQUIRED,
        "worker",
        "graph_capture",
        (f"{_GR}.capture_model",),
        backends=("cuda",),
    ),
    Hook(
        "w.shutdown",
        "shutdown",
        REQUIRED,
        "worker",
        "shutdown",
        (f"{_W}.shutdown",),
        backends=("npu",),
        versions=">=0.23",
        due=END,
    ),
    Hook(
        "w.shutdown.base",
        "shutdown",
        OPTIONAL,
        "worker",
        "shutdown",
        ("vllm.v1.worker.worker_base:WorkerBase.shutdown", f"{_GW}.shutdown"),
        due=END,
    ),
    # After the start-up: sleep mode and weight updates.
    *_worker_phase("w.sleep", "sleep", "sleep", "sleep"),
    *_worker_phase("w.wake_up", "wake_up", "wake_up", "wake_up"),
    Hook(
        "pool.sleep",
        None,
        OPTIONAL,
        "worker",
        "pool_sleep",
        (
            "vllm_ascend.device_allocator.camem:CaMemAllocator.sleep",
            "vllm.device_allocator.cumem:CuMemAllocator.sleep",
        ),
        notes="reserved counts the pool, the device does not hold it: what was unmapped is read from the pool's list",
    ),
    Hook(
        "pool.wake_up",
        None,
        OPTIONAL,
        "worker",
        "pool_wake_up",
        (
            "vllm_ascend.device_allocator.camem:CaMemAllocator.wake_up",
            "vllm.device_allocator.cumem:CuMemAllocator.wake_up",
        ),
    ),
    *_worker_phase(
        "w.weight_update.start",
        "weight_update",
        "start_weight_update",
        "weight_update_start",
        versions=">=0.23",
    ),
    Hook(
        "w.weight_update.chunk",
        "weight_update",
        OPTIONAL,
        "worker",
        "weight_update",
        (f"{_W}.update_weights", f"{_GW}.update_weights"),
        versions=">=0.18",
        notes="before 0.23 an update is this call alone; since then it lies between start and finish",
    ),
    *_worker_phase(
        "w.weight_update.finish",
        "weight_update",
        "finish_weight_update",
        "weight_update_finish",
        versions=">=0.23",
    ),
    Hook(
        "w.reload_weights",
        "weight_update",
        OPTIONAL,
        "worker",
        "weight_update",
        (f"{_W}.reload_weights", f"{_GW}.reload_weights", f"{_GR}.reload_weights"),
        notes="vllm-ascend has it on the worker from 0.25.1 on; the model runner's is inherited in all versions",
    ),
    Hook(
        "live.load_weights",
        "weight_update",
        OPTIONAL,
        "worker",
        "weight_update",
        ("<loaded>:model.load_weights",),
        notes="trainers send weights straight to the model (collective_rpc); bound to its class once it is loaded",
    ),
    # Leaves of the allocator. vllm-ascend replaces torch.accelerator.* after plugins ran; these survive.
    Hook(
        "leaf.empty_cache",
        "empty_cache",
        REQUIRED,
        "worker",
        "empty_cache",
        ("torch_npu._C:_npu_emptyCache",),
        backends=("npu",),
        after="torch_npu",
        expect_calls=(1, None),
    ),
    Hook(
        "leaf.reset_peak",
        None,
        REQUIRED,
        "worker",
        "fold_peak",
        ("torch_npu._C:_npu_resetPeakMemoryStats",),
        backends=("npu",),
        after="torch_npu",
        expect_calls=(1, None),
    ),
    Hook(
        "cuda.leaf.empty_cache",
        "empty_cache",
        REQUIRED,
        "worker",
        "empty_cache",
        ("torch._C:_cuda_emptyCache", "torch._C:_accelerator_emptyCache"),
        backends=("cuda",),
        after="torch",
    ),
    Hook(
        "cuda.leaf.reset_peak",
        None,
        REQUIRED,
        "worker",
        "fold_peak",
        ("torch._C:_cuda_resetPeakMemoryStats", "torch._C:_accelerator_resetPeakStats"),
        backends=("cuda",),
        after="torch",
    ),
    # Communicators: the first collective of each device group, until the model is warm.
    Hook(
        "pg.collective",
        "communicator",
        OPTIONAL,
        "worker",
        "communicator",
        tuple(f"{_PG}.{name}" for name in COLLECTIVES),
        after="torch.distributed",
        until=MODEL_READY,
    ),
    Hook(
        "pg.batch_p2p",
        "communicator",
        OPTIONAL,
        "worker",
        "communicator",
        ("torch_npu._C._distributed_c10d:ProcessGroupHCCL.batch_isend_irecv",),
        backends=("npu",),
        after="torch_npu",
        until=MODEL_READY,
        notes="torch_npu sends batched point-to-point operations straight to the backend",
    ),
    # Engine core.
    Hook(
        "core.kv_caches",
        None,
        REQUIRED,
        "engine_core",
        "kv_caches",
        (f"{_CORE}:EngineCore._initialize_kv_caches",),
        expect_calls=(1, 1),
        due=ENGINE_READY,
    ),
    Hook(
        "core.kv_plan",
        None,
        REQUIRED,
        "engine_core",
        "kv_plan",
        (f"{_CORE}:get_kv_cache_configs",),
        expect_calls=(1, 1),
        due=ENGINE_READY,
        notes="imported by name: the attribute of the importing module is what counts",
    ),
    Hook(
        "core.busy_loop",
        None,
        OPTIONAL,
        "engine_core",
        "engine_ready",
        (f"{_CORE}:EngineCoreProc.run_busy_loop", f"{_CORE}:DPEngineCoreProc.run_busy_loop"),
        due=END,
    ),
    # API server.
    Hook(
        "api.serving",
        None,
        OPTIONAL,
        "api",
        "server_ready",
        ("uvicorn.server:Server.startup",),
        kind="async",
        due=END,
    ),
)


def rows_in_force(backend: str | None, version: str | None) -> tuple[Hook, ...]:
    """The rows for a backend (None: those of every backend) and a vLLM version (None: all)."""
    return tuple(
        hook
        for hook in HOOKS
        if (backend in hook.backends if backend else len(hook.backends) > 1)
        and in_range(version, hook.versions)
    )
