"""Names that a run record may have, as ``vllm_memprof/record/schema.py`` describes them."""

from __future__ import annotations

from vllm_memprof.logs.formats import LOGS

ROLES = ("api", "engine_core", "worker", "detokenizer", "collector", "unknown")

#: Phase ids in the order of a start-up.
PHASES = (
    "device_init",
    "hccl_init",
    "communicator",
    "weight_load",
    "component_load",
    "draft_load",
    "lora_load",
    "model_state",
    "mm_profile",
    "profile_run",
    "empty_cache",
    "kv_cache_sizing",
    "kv_cache_alloc",
    "request_pool",
    "kv_connector",
    "kv_register",
    "kv_transfer",
    "kernel_warm_up",
    "graph_capture",
    "atb_warm_up",
    "warm_up",
    "request",
    "stage",
    "sleep",
    "wake_up",
    "weight_update",
    "flush_cache",
    "pause",
    "continue",
    "release_memory",
    "resume_memory",
    "oom",
    "shutdown",
)

#: Keys of a ``kv_plan`` event.
KV_PLAN = (
    "worker_groups",
    "blocks",
    "block_size",
    "tokens",
    "max_model_len",
    "max_concurrency",
    "available_bytes",
    "planned_bytes",
    "bytes_per_token",
    "groups",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "fitting_blocks",
    "group_count",
    "tokens_rule",
    "context_parallel",
    "max_num_batched_tokens",
    "mamba_cache_mode",
    "kv_transfer",
    "shared_backing",
    "divisor_bytes",
    "layer_bytes",
)

#: Figures that only a log gives.
LOG_FIGURES = {name for log in LOGS.values() for name in (*log.figures, *log.shared_figures)}
