"""The rows of SGLang's diffusion runtime, ``sglang.multimodal_gen``.

Read in 0.5.23, and seen with it on NPU.

Data; no engine module is imported. The runtime is an engine of its own: other processes, other
plug-ins, no KV cache.
"""

from __future__ import annotations

from functools import partial

from vllm_memprof.capture import actions as shared
from vllm_memprof.capture.hook import Hook
from vllm_memprof.capture.hooks.rows import marker, phase
from vllm_memprof.engines.sglang_diffusion import actions

#: Releases that were read.
_VERSIONS = ">=0.5.23"
_GEN = "sglang.multimodal_gen.runtime"
_WORKER = f"{_GEN}.managers.gpu_worker"


_phase = partial(phase, engine="sglang-diffusion", versions=_VERSIONS)
_marker = partial(marker, engine="sglang-diffusion", versions=_VERSIONS)


# fmt: off
HOOKS: tuple[Hook, ...] = (
    # --- The role of the process.
    _marker("sgd.role.worker", f"{_WORKER}:GPUWorker.__init__",
            enter=actions.enter_worker, leave=actions.leave_worker,
            least_calls=1),
    _marker("sgd.role.launcher",
            f"{_GEN}.entrypoints.diffusion_generator:DiffGenerator.__init__",
            enter=actions.enter_launcher, need="optional", role="api", due="end"),

    # --- Start-up of a worker.
    _phase("sgd.device_init", "device_init",
           f"{_WORKER}:maybe_init_distributed_environment_and_model_parallel",
           enter=shared.begin_device_init, leave=actions.leave_device_init,
           least_calls=1),
    _phase("sgd.hccl_init", "hccl_init",
           f"{_GEN}.distributed.parallel_state:initialize_model_parallel", need="optional"),
    _phase("sgd.weight_load", "weight_load", f"{_WORKER}:build_pipeline", least_calls=1),
    # Inside it: the parts of the pipeline, each loaded by itself.
    _phase("sgd.component_load", "component_load",
           f"{_GEN}.loader.component_loaders.component_loader:ComponentLoader.load",
           enter=actions.begin_component, need="optional"),

    # --- The first requests: a phase each, and one per stage of the pipeline.
    _phase("sgd.request", "request", f"{_WORKER}:GPUWorker.execute_forward",
           enter=actions.begin_request, leave=actions.leave_request,
           need="optional", until="first_steps", due="end"),
    _phase("sgd.stage", "stage", f"{_GEN}.pipelines_core.stages.base:PipelineStage.__call__",
           enter=actions.begin_stage, need="optional", until="first_steps", due="end"),
    _marker("sgd.event_loop", f"{_GEN}.managers.scheduler:Scheduler.event_loop",
            leave=actions.leave_event_loop, need="optional", due="end"),
)
# fmt: on
