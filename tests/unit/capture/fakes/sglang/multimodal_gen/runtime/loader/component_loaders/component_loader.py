"""A loader of one part of a pipeline, in miniature."""

from torch_npu import _C

from sglang.multimodal_gen.runtime.platforms.npu import NPUPlatformBase


class ComponentLoader:
    def load(self, component_model_path: str, server_args: object, component_name: str) -> str:
        NPUPlatformBase.get_available_gpu_memory()
        _C.allocate(100, cached=20)
        NPUPlatformBase.get_available_gpu_memory()
        return component_name


class VAELoader(ComponentLoader):
    pass
