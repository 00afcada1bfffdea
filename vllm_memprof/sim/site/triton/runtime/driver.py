"""The driver of the simulated device: facts about it for the wrappers that size their grids by
cores."""

from .._host import device_profile
from ..backends.compiler import GPUTarget

#: Cores of an Ascend 910B, used where no profile is configured.
_DEFAULT_CUBE_CORES, _DEFAULT_VECTOR_CORES = 20, 40


class NpuUtils:
    def get_device_properties(self, device=0):
        """Core counts and the on-chip memory (bytes) by the names that triton-ascend gives them."""
        profile = device_profile()
        cube = int(profile.get("ai_core_count") or _DEFAULT_CUBE_CORES)
        vector = int(profile.get("vector_core_count") or _DEFAULT_VECTOR_CORES)
        return {
            "num_aicore": cube,
            "num_vectorcore": vector,
            "max_shared_mem": 192 << 10,
            "multiprocessor_count": cube,
        }


class NpuDriver:
    """One active driver, as triton-ascend registers on hardware."""

    def __init__(self):
        self.utils = NpuUtils()

    @classmethod
    def is_active(cls):
        return not device_profile().get("soc_name", "").startswith("Ascend310")

    def get_current_target(self):
        return GPUTarget("npu", device_profile().get("soc_name", "Ascend910B"), 0)

    def get_current_device(self):
        import torch

        return torch.npu.current_device()

    def set_current_device(self, device):
        import torch

        torch.npu.set_device(device)

    def get_current_stream(self, device=None):
        import torch

        return torch.npu.current_stream(device).npu_stream

    def get_device_interface(self):
        import torch

        return torch.npu

    def get_active_torch_device(self):
        import torch

        return torch.device("npu", self.get_current_device())

    def get_benchmarker(self):
        from ..testing import do_bench

        return do_bench


class _DriverConfig:
    def __init__(self):
        self.default = self.active = NpuDriver()

    def set_active(self, driver):
        self.active = driver

    def reset_active(self):
        self.active = self.default


driver = _DriverConfig()
