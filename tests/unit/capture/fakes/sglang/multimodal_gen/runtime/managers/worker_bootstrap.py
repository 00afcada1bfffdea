"""The start of a worker's process, in miniature: plug-ins first."""

from typing import Any


def bootstrap_scheduler_process() -> Any:
    from vllm_memprof.capture.plugin import register_sglang_diffusion

    register_sglang_diffusion()
    from sglang.multimodal_gen.runtime.managers.gpu_worker import GPUWorker

    return GPUWorker()
