"""The rows of SGLang: which callables of which releases mark which phase.

Data; no engine module is imported. Seen on NPU with 0.5.23. A function that other modules import by
name has a target in each of them: the attribute of the importing module is what counts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm_memprof.capture import actions as shared
from vllm_memprof.capture import steps
from vllm_memprof.capture.hook import Hook
from vllm_memprof.capture.hooks.rows import marker, phase
from vllm_memprof.engines.sglang import actions, items
from vllm_memprof.engines.sglang import steps as batches

#: Releases from which on plug-ins are called.
_VERSIONS = ">=0.5.12"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_KV = "sglang.srt.mem_cache.kv_cache_configurator"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
#: Before 0.5.23 (a mixin of the scheduler).
_WEIGHTS_MIXIN = "sglang.srt.managers.scheduler_update_weights_mixin:SchedulerUpdateWeightsMixin"
_GRAPHS = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
_MM = "sglang.srt.managers.mm_utils"
_HTTP = "sglang.srt.entrypoints.http_server"


_phase = partial(phase, engine="sglang", versions=_VERSIONS)
_marker = partial(marker, engine="sglang", versions=_VERSIONS)


def _online(hook_id: str, phase_id: str, *targets: str) -> Hook:
    """Return a row of what a request asks of a scheduler that serves."""
    return _phase(hook_id, phase_id, *targets, enter=actions.begin_online,
                  leave=actions.leave_online, need="optional", due="end")  # fmt: skip


def _step(hook_id: str, *targets: str, **fields: Any) -> Hook:
    return _marker(hook_id, *targets, need="optional", sampling=True, **fields)


# fmt: off
HOOKS: tuple[Hook, ...] = (
    # --- The role of the process.
    _marker("sgl.role.scheduler", f"{_SCHEDULER}.__init__",
            enter=actions.enter_scheduler, leave=actions.leave_scheduler,
            least_calls=1, due="engine_ready"),
    _marker("sgl.role.detokenizer",
            "sglang.srt.managers.detokenizer_manager:DetokenizerManager.__init__",
            enter=actions.become_detokenizer, need="optional", role="detokenizer", due="end"),
    _marker("sgl.role.launcher",
            "sglang.srt.entrypoints.engine:Engine._launch_subprocesses",
            enter=actions.enter_launch, need="optional", role="api", due="end"),

    # --- Start-up of a scheduler.
    _phase("sgl.device_init", "device_init",
           "sglang.srt.distributed.bootstrap:init_parallel_runtime",
           enter=actions.begin_device_init, leave=actions.leave_parallel_runtime, need="optional"),
    # Communicators are lazy: their bytes appear at the first collective.
    _phase("sgl.hccl_init", "hccl_init", "sglang.srt.distributed.bootstrap:_init_parallel_groups",
           need="optional"),
    _marker("sgl.distributed", f"{_RUNNER}.init_torch_distributed",
            leave=actions.leave_distributed, least_calls=1),
    _phase("sgl.weight_load", "weight_load", f"{_RUNNER}.load_model",
           enter=actions.begin_load, leave=actions.leave_load, least_calls=1),
    _phase("sgl.kv_sizing", "kv_cache_sizing",
           f"{_KV}:KVCacheConfigurator._profile_available_bytes",
           enter=actions.begin_sizing, leave=actions.leave_sizing, least_calls=1),
    # What the engine reads and does not keep.
    _marker("sgl.kv_free", f"{_KV}:get_available_gpu_memory", leave=actions.keep_available),
    _marker("sgl.kv_reservation", f"{_KV}:mm_runtime_reservation_gb",
            leave=actions.keep_reservation, need="optional"),
    _marker("sgl.mm_cache", "sglang.srt.mem_cache.kv_cache_builder:init_mm_embedding_cache",
            leave=actions.keep_embedding_limit, need="optional"),
    _marker("sgl.kv_cell",
            "sglang.srt.model_executor.pool_configurator:DefaultPoolConfigurator"
            ".calculate_pool_sizes",
            leave=actions.keep_cell, need="optional"),
    _marker("sgl.kv_configure", f"{_KV}:KVCacheConfigurator.configure",
            leave=actions.leave_configure, least_calls=1),
    _phase("sgl.kv_alloc", "kv_cache_alloc", f"{_KV}:KVCacheConfigurator._init_pools",
           least_calls=1),
    # Inside it: a table of the tokens of every request, which no figure of the engine holds.
    _phase("sgl.request_pool", "request_pool",
           "sglang.srt.mem_cache.memory_pool:ReqToTokenPool.__init__",
           enter=actions.begin_request_pool, need="optional"),
    _marker("sgl.pools", f"{_SCHEDULER}.init_memory_pools",
            leave=actions.leave_pools, need="optional"),
    # Called without graphs, too, where it captures nothing.
    _phase("sgl.graph_capture", "graph_capture", f"{_GRAPHS}:capture_decode_graph",
           "sglang.srt.model_executor.model_runner:capture_decode_graph",
           f"{_RUNNER}.init_device_graphs",
           enter=actions.begin_graph_capture, leave=actions.leave_graph_capture, need="optional"),
    _phase("sgl.shutdown", "shutdown", f"{_SCHEDULER}.release_host_resources",
           leave=actions.leave_shutdown, need="optional", due="end"),

    # --- After the start-up.
    *(_online(f"sgl.update.{way}", "weight_update", f"{_WEIGHTS}.update_weights_from_{way}",
              f"{_WEIGHTS_MIXIN}.update_weights_from_{way}")
      for way in ("disk", "tensor", "distributed", "ipc")),
    _online("sgl.release", "release_memory", f"{_WEIGHTS}.release_memory_occupation",
            f"{_WEIGHTS_MIXIN}.release_memory_occupation"),
    _online("sgl.resume", "resume_memory", f"{_WEIGHTS}.resume_memory_occupation",
            f"{_WEIGHTS_MIXIN}.resume_memory_occupation"),
    _online("sgl.flush_cache", "flush_cache", f"{_SCHEDULER}.flush_cache"),
    _online("sgl.pause", "pause", f"{_SCHEDULER}.pause_generation"),
    _online("sgl.continue", "continue", f"{_SCHEDULER}.continue_generation"),
    # What ends the loop is an error, which is read here: the scheduler prints it and asks its
    # parent to end.
    _marker("sgl.event_loop", f"{_SCHEDULER}.run_event_loop", f"{_SCHEDULER}.event_loop_normal",
            f"{_SCHEDULER}.event_loop_overlap",
            leave=actions.leave_event_loop, need="optional", due="end"),

    # --- Steps, in sampled runs alone.
    _step("sgl.s.batch", f"{_SCHEDULER}.run_batch",
          enter=batches.enter_batch, leave=batches.leave_batch),
    _step("sgl.s.result", f"{_SCHEDULER}.process_batch_result", leave=batches.leave_result),

    # Parts of a step that multimodal requests alone have. The merge is what embed_mm_inputs does
    # after the encoder.
    _step("sgl.s.mm_encoder", "<loaded>:model.get_image_feature",
          "<loaded>:model.get_video_feature", "<loaded>:model.get_audio_feature",
          enter=items.enter_encoder, leave=steps.leave_stage),
    _step("sgl.s.mm_embedding", f"{_MM}:get_embedding_and_mask",
          enter=items.enter_embedding, leave=items.leave_embedding),
    _step("sgl.s.mm_merge", f"{_MM}:embed_mm_inputs", leave=items.leave_embed),
    _step("sgl.s.mm_cache",
          "sglang.srt.mem_cache.multimodal_cache:MultiModalStaticCache.set",
          leave=items.leave_cache_set),

    # Without graphs communicators are first used in the first batches.
    _phase("sgl.first_steps", "request",
           "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
           enter=actions.enter_first_steps, leave=actions.leave_first_steps,
           need="optional", until="first_steps", due="end"),

    # --- The process of tokenizer manager and HTTP server.
    _marker("sgl.serving", f"{_HTTP}:_wait_and_warmup",
            leave=shared.announce_server, need="optional", role="api", due="end"),
    _marker("sgl.end", f"{_HTTP}:kill_process_tree",
            "sglang.srt.entrypoints.engine:kill_process_tree",
            "sglang.srt.managers.tokenizer_manager:kill_process_tree",
            "__main__:kill_process_tree",
            enter=actions.announce_end, need="optional", role="api", due="end"),
)
# fmt: on
