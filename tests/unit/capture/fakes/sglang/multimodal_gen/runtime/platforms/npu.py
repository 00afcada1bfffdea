"""The platform of sglang 0.5.23's diffusion runtime in miniature."""

from torch_npu import _C, npu


class NPUPlatformBase:
    @classmethod
    def get_available_gpu_memory(cls, empty_cache: bool = True) -> int:
        if empty_cache:
            npu.empty_cache()
        return _C.free()
