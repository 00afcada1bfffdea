"""The rows of vLLM and vLLM-Ascend: which callables of which releases mark which phase.

Data; no engine module is imported.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm_memprof.capture import actions, failure, figures, ray_nodes, residency, steps
from vllm_memprof.capture.hook import Hook
from vllm_memprof.capture.hooks import rows
from vllm_memprof.capture.hooks.rows import CUDA, NPU

phase = partial(rows.phase, engine="vllm", versions=">=0.11")
marker = partial(rows.marker, engine="vllm", versions=">=0.11")
_NPU_WORKER = "vllm_ascend.worker.worker:NPUWorker"
_NPU_WORKER_V1 = "vllm_ascend.worker.worker_v1:NPUWorker"
_NPU_RUNNER = "vllm_ascend.worker.model_runner_v1:NPUModelRunner"
#: VLLM_USE_V2_MODEL_RUNNER=1; runs from vllm-ascend 0.26 on.
_NPU_RUNNER_V2 = "vllm_ascend.worker.v2.model_runner:NPUModelRunner"
_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
#: Drafters of the V2 runner; a class that overrides the first one's method calls it.
_SPECULATORS_V2 = (
    f"{_SPECULATORS}.speculator:DraftModelSpeculator.load_model",
    f"{_SPECULATORS}.autoregressive.speculator:AutoRegressiveSpeculator.load_model",
    f"{_SPECULATORS}.multi_module_mtp.speculator:MultiModuleMTPSpeculator.load_model",
)
_NPU_POOL = "vllm_ascend.device_allocator.camem:CaMemAllocator"
_GPU_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_GPU_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_GPU_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_GPU_POOL = "vllm.device_allocator.cumem:CuMemAllocator"
_CORE = "vllm.v1.engine.core"
_WRAPPER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
_RAY = "vllm.v1.executor.ray_executor:RayDistributedExecutor"
_RAY_V2 = "vllm.v1.executor.ray_executor_v2:RayExecutorV2"


_DRAFT: dict[str, Any] = {
    "enter": actions.begin_draft_load,
    "leave": actions.leave_draft_load,
    "need": "optional",
}
_CAPTURE: dict[str, Any] = {
    "enter": actions.begin_graph_capture,
    "leave": actions.leave_graph_capture,
}


def _worker_phase(hook_id: str, phase_id: str, method: str, **fields: Any) -> tuple[Hook, Hook]:
    """Return the Ascend and the CUDA row of a phase that is a worker method of one name."""
    return (
        phase(hook_id, phase_id, f"{_NPU_WORKER}.{method}", backends=NPU, **fields),
        phase(f"cuda.{hook_id}", phase_id, f"{_GPU_WORKER}.{method}", backends=CUDA, **fields),
    )


def _step(hook_id: str, *targets: str, **fields: Any) -> Hook:
    """Return a row of sampled runs."""
    return marker(hook_id, *targets, need="optional", sampling=True, **fields)


# fmt: off
HOOKS: tuple[Hook, ...] = (
    # --- The role of the process. Plugins run inside EngineCore.__init__ or init_worker, so these
    # rows serve forked children. The end of EngineCore.__init__ is the engine's readiness where it
    # shares the caller's process.
    marker("role.engine_core", f"{_CORE}:EngineCore.__init__",
           leave=actions.announce_model,
           need="optional", role="engine_core", becomes=True, due="engine_ready"),
    marker("role.worker", f"{_WRAPPER}.init_worker",
           becomes=True, need="optional"),
    marker("w.device_ready", f"{_WRAPPER}.init_device",
           leave=actions.leave_device_ready, becomes=True, least_calls=1),

    # --- Workers on Ray nodes: what reaches them, and which of them are gone.
    marker("ray.executor", f"{_RAY}._init_executor", f"{_RAY_V2}._init_executor",
           enter=ray_nodes.enter_executor, leave=ray_nodes.leave_executor,
           need="optional", role="engine_core", due="engine_ready"),
    marker("ray.workers", f"{_RAY}._init_workers_ray", f"{_RAY_V2}._build_runtime_env",
           enter=ray_nodes.enter_workers, need="optional", role="engine_core", due="engine_ready"),
    marker("ray.shutdown", f"{_RAY}.shutdown", f"{_RAY_V2}.shutdown",
           enter=ray_nodes.enter_shutdown, need="optional", role="engine_core", due="end"),

    # --- Start-up of a worker.
    *_worker_phase("w.device_init", "device_init", "init_device",
                   enter=actions.begin_device_init, least_calls=1),
    # Communicators are lazy: their bytes appear at the first collective.
    phase("w.hccl_init", "hccl_init",
          f"{_NPU_WORKER}._init_worker_distributed_environment",
          f"{_NPU_WORKER_V1}._init_worker_distributed_environment",
          backends=NPU, least_calls=1),
    phase("cuda.w.nccl_init", "hccl_init",
          "vllm.v1.worker.gpu_worker:init_worker_distributed_environment",
          backends=CUDA, least_calls=1),
    *_worker_phase("w.weight_load", "weight_load", "load_model",
                   leave=actions.leave_load_model, least_calls=1),
    # Owners of their own inside it: the draft model of speculative decoding, and the slots of LoRA.
    phase("r.draft_load", "draft_load",
          "vllm_ascend.spec_decode.llm_base_proposer:AscendSpecDecodeBaseProposer.load_model",
          "vllm_ascend.spec_decode.eagle_proposer:SpecDecodeBaseProposer.load_model",
          "vllm_ascend.spec_decode.eagle_proposer:EagleProposer.load_model",
          *_SPECULATORS_V2,
          "vllm_ascend.worker.v2.spec_decode.autoregressive.speculator:"
          "AscendAutoRegressiveSpeculator.load_model",
          **_DRAFT, backends=NPU),
    phase("cuda.r.draft_load", "draft_load",
          "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model",
          "vllm.v1.spec_decode.eagle:EagleProposer.load_model",
          *_SPECULATORS_V2,
          **_DRAFT, backends=CUDA),
    phase("r.medusa_load", "draft_load", "vllm.v1.spec_decode.medusa:MedusaProposer.load_model",
          **_DRAFT),
    phase("r.lora_load", "lora_load",
          "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model",
          need="optional"),
    # The V2 runner measures the weights before it makes what else a model needs.
    phase("r.model_state", "model_state", "vllm.v1.worker.gpu.model_runner:init_model_state",
          need="optional", versions=">=0.26"),
    # vllm-ascend prints the weights' bytes and forgets them; they are this object's
    # consumed_memory.
    marker("load.measured",
           "vllm.utils.mem_utils:DeviceMemoryProfiler.__exit__",
           "vllm.utils:DeviceMemoryProfiler.__exit__",
           leave=actions.keep_weights, need="optional", backends=NPU, versions="<0.18"),
    *_worker_phase("w.profile_run", "profile_run", "determine_available_memory",
                   leave=actions.leave_profile_run),
    # What memory_profiling fills in; not made when --kv-cache-memory-bytes is given.
    marker("w.memory_profiling",
           "vllm.utils.mem_utils:MemoryProfilingResult.__init__",
           "vllm.utils:MemoryProfilingResult.__init__",
           leave=actions.keep_profile_result),
    # What newer releases make of the budget before they return it.
    marker("w.startup_plan", "vllm_ascend.worker.worker:maybe_apply_startup_plan",
           enter=figures.enter_startup_plan, leave=figures.leave_startup_plan,
           need="optional", backends=NPU, versions=">=0.27"),
    marker("w.kv_groups", "vllm_ascend.worker.worker:get_kv_cache_groups",
           leave=figures.keep_groups, need="optional", backends=NPU, versions=">=0.28",
           until="profiled"),
    marker("w.multi_group", f"{_NPU_WORKER}._scale_kv_cache_memory_for_multi_group",
           leave=figures.leave_multi_group, need="optional", backends=NPU, versions=">=0.28"),
    marker("w.kv_planner",
           f"{_NPU_WORKER}.update_available_memory_for_sparse_kv_offload",
           f"{_NPU_WORKER}._apply_kv_offload_decode_memory_constraints",
           f"{_NPU_WORKER}._apply_kvpp_memory_budget",
           leave=figures.leave_planner, need="optional", backends=NPU, versions=">=0.26"),
    # Multimodal profiling is inline code: it starts here and ends at the full-size dummy run.
    phase("r.mm_batch", "mm_profile", f"{_GPU_RUNNER}._get_mm_dummy_batch",
          "vllm.v1.worker.gpu.model_runner:get_dummy_encoder_profile_inputs",
          enter=actions.begin_mm_profile, leave=actions.leave_mm_batch,
          versions=">=0.12", until="profiled"),
    # vllm-ascend 0.11 does not profile the encoder.
    phase("r.mm_batch.v0.11", "mm_profile", f"{_NPU_RUNNER}._get_mm_dummy_batch",
          enter=actions.begin_mm_profile, leave=None,
          need="expected_absent", backends=NPU, versions="<0.12"),
    # _dummy_run also runs in graph capture and on idle data-parallel ranks: taken off after
    # profiling.
    marker("r.dummy_run", f"{_NPU_RUNNER}._dummy_run", f"{_NPU_RUNNER_V2}._dummy_run",
           enter=actions.stop_mm_profile, backends=NPU, until="profiled"),
    marker("cuda.r.dummy_run", f"{_GPU_RUNNER}._dummy_run",
           enter=actions.stop_mm_profile, backends=CUDA, until="profiled"),
    *_worker_phase("w.kv_cache_alloc", "kv_cache_alloc", "initialize_from_config"),
    # Called in every start; what --kv-transfer-config names is made here.
    phase("w.kv_connector", "kv_connector",
          "vllm_ascend.worker.worker:ensure_kv_transfer_initialized",
          enter=actions.begin_kv_connector, need="optional", backends=NPU),
    phase("cuda.w.kv_connector", "kv_connector",
          "vllm.v1.worker.gpu_worker:ensure_kv_transfer_initialized",
          enter=actions.begin_kv_connector, need="optional", backends=CUDA),
    *_worker_phase("w.warm_up", "warm_up", "compile_or_warm_up_model",
                   leave=actions.leave_warm_up, least_calls=1),
    # One ATB operation, in warm_up: ATB's tiling buffers appear here unless an operation before it
    # took them.
    phase("w.atb_warm_up", "atb_warm_up", f"{_NPU_WORKER}._warm_up_atb",
          need="optional", backends=NPU),
    # Triton kernels that are launched once before graphs are captured, inside warm_up.
    phase("w.kernel_warm_up", "kernel_warm_up",
          "vllm_ascend.model_executor.warmup.kernel_warmup:kernel_warmup",
          need="optional", backends=NPU),
    # Never called in eager mode. The V2 runner inherits it.
    phase("r.graph_capture", "graph_capture",
          f"{_NPU_RUNNER}.capture_model", f"{_GPU_RUNNER_V2}.capture_model",
          **_CAPTURE, backends=NPU),
    # vllm-ascend's own capture_model drops what this one measured and returned.
    marker("r.graph_capture.inherited", f"{_GPU_RUNNER}.capture_model",
           leave=actions.keep_captured_bytes, need="optional", backends=NPU, versions="<0.23"),
    phase("cuda.r.graph_capture", "graph_capture", f"{_GPU_RUNNER}.capture_model",
          **_CAPTURE, backends=CUDA),
    phase("w.shutdown", "shutdown", f"{_NPU_WORKER}.shutdown",
          leave=actions.leave_shutdown, backends=NPU, versions=">=0.23", due="end"),
    phase("w.shutdown.base", "shutdown",
          "vllm.v1.worker.worker_base:WorkerBase.shutdown", f"{_GPU_WORKER}.shutdown",
          leave=actions.leave_shutdown, need="optional", due="end"),

    # --- After the start-up: sleep mode and weight updates.
    *_worker_phase("w.sleep", "sleep", "sleep", enter=residency.enter_sleep),
    *_worker_phase("w.wake_up", "wake_up", "wake_up", enter=residency.enter_wake_up),
    # Reserved counts the pool, the device does not hold it: the pool's list says what was unmapped.
    marker("pool.sleep", f"{_NPU_POOL}.sleep", f"{_GPU_POOL}.sleep",
           enter=residency.note_unmapped, leave=residency.note_unmapped, need="optional"),
    marker("pool.wake_up", f"{_NPU_POOL}.wake_up", f"{_GPU_POOL}.wake_up",
           leave=residency.leave_pool_wake_up, need="optional"),
    *_worker_phase("w.weight_update.start", "weight_update", "start_weight_update",
                   enter=residency.enter_update_start, leave=residency.leave_update_start,
                   versions=">=0.23"),
    # Before 0.23 an update is this call alone; since then it lies between start and finish.
    phase("w.weight_update.chunk", "weight_update",
          f"{_NPU_WORKER}.update_weights", f"{_GPU_WORKER}.update_weights",
          enter=residency.enter_update, need="optional", versions=">=0.18"),
    *_worker_phase("w.weight_update.finish", "weight_update", "finish_weight_update",
                   enter=None, leave=residency.leave_update_finish, versions=">=0.23"),
    # vllm-ascend has it on the worker from 0.25.1 on; the model runner's is inherited in all
    # versions.
    phase("w.reload_weights", "weight_update",
          f"{_NPU_WORKER}.reload_weights", f"{_GPU_WORKER}.reload_weights",
          f"{_GPU_RUNNER}.reload_weights",
          enter=residency.enter_update, need="optional"),
    # Trainers send weights straight to the model (collective_rpc); bound to its class once it is
    # loaded.
    phase("live.load_weights", "weight_update", "<loaded>:model.load_weights",
          enter=residency.enter_update, need="optional"),

    # --- Steps, in sampled runs alone. The runner's method, not the worker's: Ray calls that one.
    _step("s.execute", f"{_NPU_RUNNER}.execute_model", f"{_NPU_RUNNER_V2}.execute_model",
          f"{_GPU_RUNNER}.execute_model", f"{_GPU_RUNNER_V2}.execute_model",
          enter=steps.enter_execute, leave=steps.leave_execute),
    _step("s.sample_tokens", f"{_NPU_RUNNER}.sample_tokens", f"{_NPU_RUNNER_V2}.sample_tokens",
          f"{_GPU_RUNNER}.sample_tokens", f"{_GPU_RUNNER_V2}.sample_tokens",
          leave=steps.leave_sample, versions=">=0.12"),
    _step("s.mm_encoder", "<loaded>:model.embed_multimodal",
          enter=steps.enter_encoder, leave=steps.leave_stage),
    # Text embeddings and the encoder's outputs into one tensor; it holds
    # _merge_multimodal_embeddings, which models import by name.
    _step("s.mm_merge", "<loaded>:model.embed_input_ids", "<loaded>:model.get_input_embeddings",
          enter=steps.enter_merge, leave=steps.leave_stage),
    _step("s.core_step", f"{_CORE}:EngineCore.step", f"{_CORE}:EngineCore.step_with_batch_queue",
          leave=steps.leave_core_step, role="engine_core"),
    _step("s.add_request", f"{_CORE}:EngineCore.add_request",
          enter=steps.enter_add_request, role="engine_core"),
    _step("s.free_request", "vllm.v1.core.sched.scheduler:Scheduler._free_request",
          enter=steps.enter_free_request, role="engine_core"),
    _step("s.api_ready", "vllm.v1.engine.llm_engine:LLMEngine.__init__",
          "vllm.v1.engine.async_llm:AsyncLLM.__init__", leave=steps.leave_ready, role="api"),

    # --- Engine core.
    marker("core.kv_caches", f"{_CORE}:EngineCore._initialize_kv_caches",
           leave=actions.leave_kv_caches,
           role="engine_core", becomes=True, least_calls=1, due="engine_ready"),
    # Imported by name: the attribute of the importing module is what counts. From 0.33 on they
    # come from kv_cache_planning or its builder; later sources say build_kv_cache_configs.
    marker("core.kv_plan", f"{_CORE}:get_kv_cache_configs", f"{_CORE}:build_kv_cache_configs",
           leave=actions.leave_kv_plan, role="engine_core", least_calls=1, due="engine_ready"),
    marker("core.busy_loop",
           f"{_CORE}:EngineCoreProc.run_busy_loop", f"{_CORE}:DPEngineCoreProc.run_busy_loop",
           enter=actions.announce_model, leave=actions.end_core,
           need="optional", role="engine_core", due="end"),

    # Called for a failed step only, with the exception still alive. Where the worker lives in the
    # engine core its allocator can be read here.
    marker("core.failed_step", f"{_CORE}:dump_engine_exception",
           enter=failure.enter_failed_step, need="optional", role="engine_core", due="end"),

    # --- API server.
    # What comes after its startup: the coroutine is made then.
    marker("api.serving", "uvicorn.server:Server.main_loop",
           enter=actions.announce_server, need="optional", role="api", due="end"),
)
# fmt: on
