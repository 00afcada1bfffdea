"""A worker with the phases of vllm-ascend 0.23.0 in miniature. Bytes are small integers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch_npu
from torch_npu import _C
from vllm.distributed.parallel_state import _TP
from vllm.utils.mem_utils import MemoryProfilingResult
from vllm.v1.worker.worker_base import WorkerBase

from .model_runner_v1 import NPUModelRunner


def snapshot() -> Any:
    return SimpleNamespace(
        total_memory=_C.TOTAL, free_memory=_C.free(), torch_peak=_C.allocated_peak,
        non_torch_memory=_C.TOTAL - _C.free() - _C.reserved,
    )  # fmt: skip


@contextlib.contextmanager
def memory_profiling(baseline: Any, weights_memory: int = 0) -> Iterator[Any]:
    torch_npu.npu.empty_cache()
    torch_npu.npu.reset_peak_memory_stats()
    result = MemoryProfilingResult(before_profile=snapshot())
    yield result
    torch_npu.npu.empty_cache()
    result.after_profile = snapshot()
    result.torch_peak_increase = result.after_profile.torch_peak - result.before_profile.torch_peak
    result.non_torch_increase = result.after_profile.non_torch_memory - baseline.non_torch_memory


def ensure_kv_transfer_initialized(vllm_config: Any, kv_cache_config: Any = None) -> None:
    if vllm_config.kv_transfer_config is not None:
        _C.allocate(8)


def pool() -> Any:
    from vllm_ascend.device_allocator.camem import CaMemAllocator

    return CaMemAllocator.get_instance()


class NPUWorker(WorkerBase):
    rank = local_rank = 1
    fail_in: str | None = None
    enforce_eager = False
    kv_transfer_config: object = None

    def __init__(self) -> None:
        self.device = SimpleNamespace(index=0)
        self.cache_config = SimpleNamespace(gpu_memory_utilization=0.9, kv_cache_memory_bytes=None)
        self.parallel_config = SimpleNamespace(
            world_size=2, data_parallel_rank=0, data_parallel_size=1, pipeline_parallel_size=1
        )

    def init_device(self) -> None:
        torch_npu.npu.initialized = True
        torch_npu.npu.empty_cache()
        self.init_snapshot = snapshot()
        self.requested_memory = 0.9 * self.init_snapshot.total_memory
        self._init_worker_distributed_environment()
        self.model_runner = NPUModelRunner()

    def _init_worker_distributed_environment(self) -> None:
        _TP.device_group = torch.distributed.ProcessGroup("custom", self._grow)

    def _grow(self) -> None:
        _C.other += 40

    def load_model(self) -> None:
        self.model_runner.load_model()
        torch_npu.npu.reset_peak_memory_stats()
        if self.fail_in == "load_model":
            raise MemoryError("no room")

    def determine_available_memory(self) -> int:
        with memory_profiling(self.init_snapshot, 100) as result:
            self.model_runner.profile_run()
            _C.workspace = 5
        self.peak_activation_memory = result.torch_peak_increase
        self.non_torch_memory = result.non_torch_increase
        return int(
            self.requested_memory - 100 - self.peak_activation_memory - self.non_torch_memory
        )

    def initialize_from_config(self, config: Any) -> None:
        ensure_kv_transfer_initialized(
            SimpleNamespace(kv_transfer_config=self.kv_transfer_config), config
        )
        _C.allocate(192)

    def compile_or_warm_up_model(self) -> float:
        if not self.enforce_eager:
            self.model_runner.capture_model()
        return 1.5

    def sleep(self, level: int = 1) -> None:
        pool().sleep(("weights",) if level == 1 else ())

    def wake_up(self, tags: list[str] | None = None) -> None:
        pool().wake_up(tags)

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        if self.fail_in == "start_weight_update":
            raise RuntimeError("no transfer engine")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        _C.allocate(10)
        _C.release(10)

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        torch_npu.npu.empty_cache()
