"""A model runner, in miniature."""

from torch_npu import _C

from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup


class ModelRunner:
    is_draft_worker = False

    def __init__(self) -> None:
        self.init_torch_distributed()
        self.load_model()

    def alloc_memory_pool(self, draft: bool = False) -> None:
        configurator = kv_cache_configurator.KVCacheConfigurator()
        configurator.is_draft_worker = draft
        configurator.configure(pre_model_load_memory=self.pre_model_load_memory)

    def init_cuda_graphs(self) -> None:
        cuda_graph_setup.capture_decode_graph(model_runner=self)

    def init_torch_distributed(self) -> None:
        self.pre_model_load_memory = kv_cache_configurator.get_available_gpu_memory()

    def load_model(self) -> None:
        _C.allocate(100)
