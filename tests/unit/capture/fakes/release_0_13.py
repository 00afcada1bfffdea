"""Imported first, it turns the miniature engine into vllm-ascend 0.13.0: no snapshots, no profiling
context, and terms that are read and forgotten. The worker prints those of its equation."""

from __future__ import annotations

import torch_npu
import vllm.version
from torch_npu import _C
from vllm.utils.mem_utils import DeviceMemoryProfiler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm_ascend.worker import model_runner_v1, worker

vllm.version.__version__ = "0.13.0"
del worker.memory_profiling, worker.NPUWorker.shutdown


def init_device(self: worker.NPUWorker) -> None:
    torch_npu.npu.initialized = True
    torch_npu.npu.empty_cache()
    self.init_npu_memory = _C.free()
    self._init_worker_distributed_environment()
    self.model_runner = model_runner_v1.NPUModelRunner()


def load_model(self: model_runner_v1.NPUModelRunner) -> None:
    _C.allocate(3)  # before the model: no weights
    with DeviceMemoryProfiler():
        _C.allocate(100)


def determine_available_memory(self: worker.NPUWorker) -> int:
    torch_npu.npu.empty_cache()
    torch_npu.npu.reset_peak_memory_stats()
    self.model_runner.profile_run()
    _C.workspace = 5
    peak = _C.allocated_peak
    torch_npu.npu.empty_cache()
    used = _C.TOTAL - _C.free() - _C.allocated
    print("TERMS", peak, used)
    return max(int(_C.TOTAL * self.cache_config.gpu_memory_utilization - peak - max(0, used)), 0)


def capture_here(self: GPUModelRunner) -> int:
    _C.allocate(7)
    return 7


def capture_model(self: model_runner_v1.NPUModelRunner) -> None:
    GPUModelRunner.capture_model(self)


worker.NPUWorker.init_device = init_device  # type: ignore[method-assign]
worker.NPUWorker.determine_available_memory = determine_available_memory  # type: ignore[method-assign]
model_runner_v1.NPUModelRunner.load_model = load_model  # type: ignore[method-assign]
GPUModelRunner.capture_model = capture_here  # type: ignore[attr-defined]
model_runner_v1.NPUModelRunner.capture_model = capture_model  # type: ignore[assignment]
