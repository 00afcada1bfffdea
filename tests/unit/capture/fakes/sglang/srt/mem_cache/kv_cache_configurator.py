"""The KV cache of sglang 0.5.23 in miniature: GiB as the engine has them, of few bytes."""

from types import SimpleNamespace
from typing import Any

from torch_npu import _C, npu

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.srt.runtime_context import get_schedule

GIB = 1 << 30


def get_available_gpu_memory() -> float:
    npu.empty_cache()
    return _C.free() / GIB


def mm_runtime_reservation_gb() -> float:
    return 8 / GIB


class KVCacheConfigurator:
    is_draft_worker = False
    model_config = SimpleNamespace(context_len=16)

    def configure(self, *, pre_model_load_memory: float) -> Any:
        schedule = get_schedule()
        rest = self._profile_available_bytes(pre_model_load_memory)
        config = DefaultPoolConfigurator().calculate_pool_sizes(rest, schedule.page_size)
        tokens = config.max_total_num_tokens
        if schedule.max_total_tokens is not None:
            tokens = min(tokens, schedule.max_total_tokens)
        pool = self._init_pools(tokens)
        return SimpleNamespace(max_total_num_tokens=tokens, token_to_kv_pool=pool)

    def _profile_available_bytes(self, pre_model_load_memory: float) -> int:
        free = get_available_gpu_memory()
        slack = pre_model_load_memory * (1 - get_schedule().mem_fraction_static)
        return int((free - slack - mm_runtime_reservation_gb()) * GIB)

    def _init_pools(self, tokens: int) -> MHATokenToKVPool:
        ReqToTokenPool(6)
        return MHATokenToKVPool(tokens, get_schedule().page_size)
