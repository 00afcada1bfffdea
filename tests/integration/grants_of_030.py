"""Run in an engine's environment: the last steps of a budget, by the release's own functions.

No model is loaded: a worker without a device gets the KV cache specs of gpt-oss-20b (12 layers of
full attention, 12 with a window) and asks the engine's functions. Prints ``RESULT {json}``.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from vllm_memprof.capture import plugin

GIB = 1 << 30


def main(model: str) -> None:
    import torch
    import torch_npu  # noqa: F401  (tells the plugin what it observes)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    from vllm.v1.worker import startup_plan
    from vllm_ascend.worker import worker as module

    from vllm_memprof.capture import kv_plan

    config = EngineArgs(
        model=model, max_model_len=8192, load_format="dummy", enforce_eager=True
    ).create_engine_config()
    common: dict[str, Any] = {
        "block_size": 128,
        "num_kv_heads": 8,
        "head_size": 64,
        "dtype": torch.bfloat16,
    }
    specs = {
        f"model.layers.{index}.attn": FullAttentionSpec(**common)
        if index % 2
        else SlidingWindowSpec(**common, sliding_window=128)
        for index in range(24)
    }
    resolve_kv_cache_layout(config, [["LBNHC"]], specs.values())  # as the engine core does
    worker = object.__new__(module.NPUWorker)
    worker.vllm_config, worker.model_config = config, config.model_config
    worker.cache_config, worker.parallel_config = config.cache_config, config.parallel_config
    worker.get_kv_cache_spec = lambda: specs
    plugin.register()
    recorder = plugin.RECORDER
    assert recorder is not None
    scaled = worker._scale_kv_cache_memory_for_multi_group(41 * GIB + 1)
    configs = get_kv_cache_configs(config, [specs], [scaled])
    plan = kv_plan.describe(config, [scaled], configs)

    worker._kvpp_cache_allocation_plan = SimpleNamespace(
        get_num_blocks=lambda available: available // 1000,
        logical_cache_spec={"a": SimpleNamespace(page_size_bytes=3000)},
    )
    spread = worker._apply_kvpp_memory_budget(scaled)

    torch.npu.set_device(0)  # the plan is kept by the name and size of the device
    worker.rank, worker.init_snapshot = 0, SimpleNamespace(free_memory=60 * GIB)
    startup_plan.maybe_save_startup_plan(worker, 40 * GIB)
    module.maybe_apply_startup_plan(worker)
    result = {
        "given": 41 * GIB + 1,
        "scaled": scaled,
        "spread": spread,
        "fixed": config.cache_config.kv_cache_memory_bytes,
        "plan": plan,
        "figures": {name: value for name, value in recorder.figures.items() if value is not None},
    }
    print("RESULT " + json.dumps(result, default=str), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
