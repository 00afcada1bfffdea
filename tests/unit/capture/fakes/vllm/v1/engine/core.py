from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.sched.scheduler import AscendScheduler


class EngineCore:
    def __init__(self, executor: Any) -> None:
        self.model_executor = executor
        self.vllm_config = config()
        self._initialize_kv_caches(self.vllm_config)
        self.scheduler = AscendScheduler()
        self.step_fn = self.step

    def _initialize_kv_caches(self, vllm_config: Any) -> Any:
        available = self.model_executor.determine_available_memory()
        plan = get_kv_cache_configs(vllm_config, [{}], available)
        self.model_executor.initialize_from_config(plan)
        return plan[0]

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        self.scheduler.waiting.append(request)

    def step(self) -> None:
        self.model_executor.execute_model(self.scheduler.schedule())
        self.scheduler.update()


class EngineCoreProc(EngineCore):
    def run_busy_loop(self) -> None:
        return


class DPEngineCoreProc(EngineCoreProc):
    def run_busy_loop(self) -> None:
        return


def config() -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=20,
            hf_config=SimpleNamespace(vision_config=SimpleNamespace(patch_size=16)),
        ),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9),
    )
