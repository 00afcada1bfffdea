"""A worker of sglang 0.5.23's diffusion runtime in miniature."""

from torch_npu import npu

from sglang.multimodal_gen.runtime.distributed.parallel_state import (
    maybe_init_distributed_environment_and_model_parallel,
)
from sglang.multimodal_gen.runtime.pipelines_core.pipeline import build_pipeline


class GPUWorker:
    def __init__(self) -> None:
        self.init_device_and_model()

    def init_device_and_model(self) -> None:
        maybe_init_distributed_environment_and_model_parallel(tp_size=1)
        self.pipeline = build_pipeline(None)

    def execute_forward(self, batch: list[object], release: bool = False) -> object:
        npu.reset_peak_memory_stats()
        made = self.pipeline.forward(batch[0])
        if release:
            npu.empty_cache()
        return made
