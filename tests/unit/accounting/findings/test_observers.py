"""Call chains of readings and of logs, and those that are neither."""

from __future__ import annotations

import pytest

from vllm_memprof.accounting.findings.observers import observer_of


@pytest.mark.parametrize(
    "chain",
    [
        [
            "vllm.platforms.cuda:CudaPlatformBase.get_current_memory_usage",
            "vllm.utils.mem_utils:X.current_memory_usage",
        ],
        [
            "sglang.srt.utils.common:empty_device_cache",
            "sglang.srt.utils.common:get_available_gpu_memory",
        ],
        ["my.monitor:log_gpu_memory"],
        ["my.module:helper", "logging:StreamHandler.emit"],
        ["my.module:Stage._print_npu_memory_left"],
    ],
)
def test_readings_and_logs_are_observers(chain: list[str]) -> None:
    assert observer_of(tuple(chain)) is not None


@pytest.mark.parametrize(
    "chain",
    [
        [
            "vllm_ascend.patch.platform.patch_torch_accelerator:patch_empty_cache",
            "vllm.utils.mem_utils:memory_profiling",
            "vllm_ascend.worker.worker:NPUWorker.determine_available_memory",
        ],
        [
            "vllm_ascend.device_allocator.camem:CaMemAllocator.sleep",
            "vllm_ascend.worker.worker:NPUWorker.sleep",
        ],
        ["vllm_ascend.worker.worker:NPUWorker._init_device"],
        ["vllm_ascend.platform:NPUPlatform.clear_npu_memory"],
        ["vllm.distributed.parallel_state:cleanup_dist_env_and_memory"],
        ["my.module:free_memory"],
        [],
    ],
)
def test_work_on_memory_is_no_observer(chain: list[str]) -> None:
    assert observer_of(tuple(chain)) is None
