"""Lines as engines print them, with the figures that they hold. Figures: "9.19 GiB", "22.00 MiB", or a bare number."""

from __future__ import annotations

CUDA_SUGGESTION = (
    "Free memory on device ({device}78.59/79.11 GiB) on startup. Desired GPU memory utilization is (0.92, 72.78 GiB). "
    "Actual usage is {usage}. Replace gpu_memory_utilization config with `--kv-cache-memory=49996390195` (46.56 GiB) to "
    "fit into requested memory, or `--kv-cache-memory=56234567890` (52.37 GiB) to fully utilize gpu memory. Current kv "
    "cache memory in use is 47.01 GiB."
)
ASCEND_SUGGESTION = (
    "Free memory on device (60.61/60.96 GiB) on startup. Desired GPU memory utilization is (0.95, 57.91 GiB). Actual usage: "
    "9.19 GiB for weights, 3.86 GiB for peak activation, 0.56 GiB for non-torch memory, 0.31 GiB for NPU graph memory. "
    "Replace gpu_memory_utilization with `--kv-cache-memory=47076679680` (43.84 GiB) to fit into requested memory, or "
    "`--kv-cache-memory=49976680448` (46.54 GiB) to fully utilize NPU free memory. Current KV cache memory: 44.3 GiB."
)
_SUGGESTED = {
    "initial_free_bytes": "78.59 GiB",
    "device_total_bytes": "79.11 GiB",
    "gpu_memory_utilization": 0.92,
    "requested_bytes": "72.78 GiB",
    "suggested_requested_bytes": 49996390195,
    "suggested_requested_printed_bytes": "46.56 GiB",
    "suggested_limit_bytes": 56234567890,
    "suggested_limit_printed_bytes": "52.37 GiB",
    "kv_cache_bytes": "47.01 GiB",
}
_ASCEND_SUGGESTED = {
    "initial_free_bytes": "60.61 GiB",
    "device_total_bytes": "60.96 GiB",
    "gpu_memory_utilization": 0.95,
    "requested_bytes": "57.91 GiB",
    "weights_bytes": "9.19 GiB",
    "peak_activation_bytes": "3.86 GiB",
    "non_torch_increase_bytes": "0.56 GiB",
    "graph_bytes": "0.31 GiB",
    "suggested_requested_bytes": 47076679680,
    "suggested_requested_printed_bytes": "43.84 GiB",
    "suggested_limit_bytes": 49976680448,
    "suggested_limit_printed_bytes": "46.54 GiB",
    "kv_cache_bytes": "44.3 GiB",
}

#: DeepSeek-V4 on four Ascend A2, of two ranks: sized with 8-bit keys and values, allocated larger.
DSV4 = """\
[2026-08-07 17:33:36 TP0] Load weight begin. avail mem=60.51 GB
[2026-08-07 17:33:36 TP1] Load weight begin. avail mem=60.57 GB
[2026-08-07 17:35:48 TP1] Load weight end. elapsed=131.05 s, type=DeepseekV4ForCausalLM, avail mem=19.22 GB, mem usage=41.35 GB.
[2026-08-07 17:35:48 TP0] Load weight end. elapsed=131.87 s, type=DeepseekV4ForCausalLM, avail mem=19.15 GB, mem usage=41.35 GB.
[2026-08-07 17:35:58 TP0] DSV4 memory calculation: bytes_per_full_token=7705.45, available_bytes=11.89 GB, c128_state_fixed=0.11 GB, full_token=1641472
[2026-08-07 17:35:58 TP0] DSV4 pool sizes: full=1641472, swa=164096, c4=410368, c128=12824, c4_state=10256, c128_state=0
[2026-08-07 17:35:58 TP1] DSV4 memory calculation: bytes_per_full_token=7705.45, available_bytes=11.89 GB, c128_state_fixed=0.11 GB, full_token=1641472
[2026-08-07 17:35:58 TP1] DSV4 pool sizes: full=1641472, swa=164096, c4=410368, c128=12824, c4_state=10256, c128_state=0
[2026-08-07 17:35:59 TP1] Memory pool end. avail mem=1.68 GB
[2026-08-07 17:35:59 TP0] Memory pool end. avail mem=1.62 GB
[2026-08-07 17:36:17 TP0] max_total_num_tokens=1641472, chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=8, context_len=1048576, available_gpu_mem=0.81 GB
"""

#: As ``SAMPLES``, of SGLang. Its "GB" and "MB" are GiB and MiB.
SGLANG: list[tuple[str, str, dict[str, object]]] = [
    (
        "sglang 0.5.23",
        "[2026-11-28 00:10:12] Allocating MHATokenToKVPoolHost hierarchical KV host pool: 4096 tokens, 2.00 GB host memory.",
        {"hicache_host_bytes": 2_000_000_000},
    ),
    (
        "sglang 0.5.10",
        "[2026-05-01 00:10:12 TP0] Allocating 90.09 GB host memory for hierarchical KV cache.",
        {"hicache_host_bytes": 90_090_000_000},
    ),
    (
        "sglang to 0.5.18",
        "[2026-11-21 23:45:24] Init torch distributed ends. elapsed=0.06 s, mem usage=0.35 GB",
        {"init_growth_bytes": "0.35 GiB"},
    ),
    (
        "sglang 0.4",
        "[2025-10-16 09:06:09 TP7] Init torch distributed ends. mem usage=1.77 GB",
        {"init_growth_bytes": "1.77 GiB"},
    ),
    (
        "sglang 0.5.23",
        "[2026-09-11 23:46:11 TP0 EP0] Reserving 0.10 GB of the KV budget for post-sizing multimodal allocations "
        "(feature-transport pools + embedding cache).",
        {"mm_reserved_bytes": "0.10 GiB"},
    ),
    (
        "sglang 0.5.14",
        DSV4.splitlines()[4],
        {
            "pools_budget_bytes": "11.89 GiB",
        },
    ),
    (
        "sglang 0.5.12",
        "[2026-05-07 03:05:43 TP0] DSv4 memory calculation: bytes_per_full_token=15955.85, available_bytes=19.30 GB, "
        "full_token=1298688",
        {
            "pools_budget_bytes": "19.30 GiB",
        },
    ),
    (
        "sglang main",
        "[2026-09-20 10:00:00 TP0] DSV4 memory calculation: unified=False, unified_fp8=False, dspark_draft_bf16=False, "
        "bytes_per_full_token=1670.75, available_bytes=8.84 GB, c128_state_fixed=0.00 GB, c2_state_fixed=0.00 GB, "
        "swa_fixed=0.30 GB, swa_ring_fixed=0.00 GB, c4_state_fixed=0.00 GB, full_token=5491200",
        {
            "pools_budget_bytes": "8.84 GiB",
        },
    ),
    ("sglang 0.5.14", DSV4.splitlines()[5], {"pools_tokens": 1641472}),
    (
        "sglang 0.5.23",
        "[2026-11-21 23:56:58] Memory baseline taken. mem usage=0.02 GB",
        {"init_growth_bytes": "0.02 GiB"},
    ),
    (
        "sglang",
        "[2026-11-21 23:59:02 TP1] Load weight begin. avail mem=60.59 GB",
        {"free_before_load_bytes": "60.59 GiB"},
    ),
    (
        "sglang",
        "[2026-11-21 23:59:02 TP1] Load weight end. elapsed=0.15 s, type=Qwen3MoeForCausalLM, avail mem=31.83 GB, "
        "mem usage=28.75 GB.",
        {"free_after_load_bytes": "31.83 GiB", "weights_bytes": "28.75 GiB"},
    ),
    (
        "sglang 0.4",
        "[2025-03-25 16:37:06 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.48 GB, "
        "mem usage=15.11 GB.",
        {"free_after_load_bytes": "63.48 GiB", "weights_bytes": "15.11 GiB"},
    ),
    (
        "sglang, in another order",
        "Load weight end. elapsed=2.1 s, mem usage=56.98 GB, avail mem=230.20 GB.",
        {"free_after_load_bytes": "230.20 GiB", "weights_bytes": "56.98 GiB"},
    ),
    (
        "sglang",
        "[2026-11-21 23:45:25] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 234240, K size: 16.09 GB, "
        "V size: 16.08 GB",
        {"pool_tokens": 234240, "k_pool_bytes": "16.09 GiB", "v_pool_bytes": "16.08 GiB"},
    ),
    (
        "sglang 0.4",
        "KV Cache is allocated. #tokens: 442750, K size: 27.02 GB, V size: 27.02 GB",
        {"pool_tokens": 442750, "k_pool_bytes": "27.02 GiB", "v_pool_bytes": "27.02 GiB"},
    ),
    (
        "sglang, MLA",
        "KV Cache is allocated. #tokens: 90112, KV size: 5.91 GB",
        {"pool_tokens": 90112, "kv_pool_bytes": "5.91 GiB"},
    ),
    (
        "sglang 0.5.23",
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.25. Raise "
        "--mem-fraction-static above 0.259 (minimum viable = 1 - available/pre = 0.2583).",
        {"static_refused": 1, "mem_fraction_static": 0.25, "least_static_fraction": 0.259},
    ),
    (
        "sglang",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        {"static_refused": 1},
    ),
    (
        "sglang",
        "[2026-11-21 23:45:25] Memory pool end. avail mem=12.07 GB",
        {"free_after_pools_bytes": "12.07 GiB"},
    ),
    (
        "sglang 0.5.18, NPU",
        "[2026-11-21 23:45:25] Capture target decode NPU graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 4], "
        "avail mem=12.05 GB",
        {"free_before_capture_bytes": "12.05 GiB"},
    ),
    (
        "sglang 0.5.23, NPU",
        "[2026-11-21 23:57:04] Capture target decode NPU graph end. bs=[1, 2, 4, 8], elapsed=3.81 s, mem usage=0.20 GB, "
        "avail mem=11.92 GB.",
        {"graph_bytes": "0.20 GiB", "free_after_capture_bytes": "11.92 GiB"},
    ),
    (
        "sglang 0.5, CUDA",
        "[2026-05-24 00:53:00] Capture cuda graph end. Time elapsed: 5.38 s. mem usage=0.60 GB. avail mem=23.56 GB.",
        {"graph_bytes": "0.60 GiB", "free_after_capture_bytes": "23.56 GiB"},
    ),
    (
        "sglang 0.5, CUDA",
        "Capture piecewise CUDA graph end. Time elapsed: 18.01 s. mem usage=2.32 GB. avail mem=21.24 GB.",
        {"graph_prefill_bytes": "2.32 GiB"},
    ),
    (
        "sglang",
        "[2026-11-21 23:57:04] max_total_num_tokens=233728, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=2921, context_len=40960, available_gpu_mem=11.92 GB",
        {
            "tokens": 233728,
            "chunked_prefill_tokens": 8192,
            "max_prefill_tokens": 16384,
            "max_running_requests": 2921,
            "max_model_len": 40960,
            "free_ready_bytes": "11.92 GiB",
        },
    ),
    (
        "sglang",
        "[2026-11-21 23:47:46] Update engine weights online from disk begin. avail mem=59.93 GB",
        {"free_at_update_bytes": "59.93 GiB"},
    ),
    (
        "sglang",
        "[continue_generation] torch.cuda.empty_cache() called: reserved 74.0 MB -> 50.0 MB (freed 24.0 MB)",
        {
            "emptied_before_bytes": "74 MiB",
            "emptied_after_bytes": "50 MiB",
            "emptied_bytes": "24 MiB",
        },
    ),
]

#: (releases, line, figures)
SAMPLES: list[tuple[str, str, dict[str, object]]] = [
    (
        "ascend 0.23",
        "(EngineCore pid=7) INFO 11-28 00:10:12 [worker.py:122] SimpleCPUOffloadNPUWorker: 4 unique NPU KV tensors, "
        "allocating 381 CPU blocks (0.09 GB)",
        {"offload_host_bytes": "0.09 GiB"},
    ),
    (
        "ascend 0.23",
        "INFO 11-28 00:10:12 [worker.py:117] RecomputeCPUOffloadWorker scaffold registered 4 unique KV tensors, "
        "allocating 381 CPU blocks (0.09 GB).",
        {"offload_host_bytes": "0.09 GiB"},
    ),
    (
        "mooncake 0.3.13",
        "I1215 11:45:12.091323   299 aligned_client_buffer.cpp:61] AlignedClientBufferAllocator: allocated 1342177280 bytes",
        {"ssd_buffer_bytes": 1342177280},
    ),
    (
        "mooncake",
        "I1215 11:45:12.091395   299 pybind_client.cpp:218] Mounting segment: 42949672960 bytes, 42949672960 of "
        "42949672960",
        {"global_segment_bytes": 42949672960},
    ),
    (
        "vllm 0.6.4 to 0.9, V0",
        "(VllmWorkerProcess pid=521) INFO 04-12 08:21:19 [worker.py:267] the current vLLM instance can use "
        "total_gpu_memory (23.58GiB) x gpu_memory_utilization (0.99) = 23.35GiB",
        {
            "device_total_bytes": "23.58 GiB",
            "gpu_memory_utilization": 0.99,
            "requested_bytes": "23.35 GiB",
        },
    ),
    (
        "vllm 0.6.4 to 0.9, V0",
        "INFO 04-12 08:21:19 worker.py:267] model weights take 21.21GiB; non_torch_memory takes 0.20GiB; PyTorch activation "
        "peak memory takes 0.37GiB; the rest of the memory reserved for KV Cache is 1.57GiB.",
        {
            "weights_bytes": "21.21 GiB",
            "non_torch_increase_bytes": "0.20 GiB",
            "peak_activation_bytes": "0.37 GiB",
            "kv_cache_bytes": "1.57 GiB",
        },
    ),
    (
        "vllm V0, a value a line",
        "INFO 12-13 19:54:18 worker.py:243] model weights take   14.96GiB",
        {"weights_bytes": "14.96 GiB"},
    ),
    (
        "vllm V0, a value a line",
        "INFO 12-13 19:54:18 worker.py:243] total_gpu_memory     79.22GiB",
        {"device_total_bytes": "79.22 GiB"},
    ),
    (
        "vllm V0, a value a line",
        "INFO 12-13 19:54:18 worker.py:243] non_torch_memory     1.79GiB",
        {"non_torch_increase_bytes": "1.79 GiB"},
    ),
    (
        "vllm V0, a value a line",
        "INFO 12-13 worker.py:243] PyTorch activation peak memory       1.26GiB",
        {"peak_activation_bytes": "1.26 GiB"},
    ),
    (
        "vllm V0, a value a line",
        "INFO 12-13 19:54:18 worker.py:243] available_kv_cache_memory    53.29GiB",
        {"kv_cache_bytes": "53.29 GiB"},
    ),
    (
        "vllm V0",
        "INFO 01-16 09:40:00 executor_base.py:95] # CUDA blocks: 6001, # CPU blocks: 1638",
        {"blocks": 6001},
    ),
    (
        "vllm V0",
        "INFO 01-01 executor_base.py:116] Maximum concurrency for 40000 tokens per request: 1.54x",
        {"max_model_len": 40000, "max_concurrency": 1.54},
    ),
    (
        "vllm 0.23",
        "INFO [weight_utils.py:922] Filesystem type for checkpoints: EXT4. Checkpoint size: 15.27 GiB. Available RAM: 1980.12 GiB.",
        {"checkpoint_bytes": "15.27 GiB"},
    ),
    (
        "vllm 0.6 and V1 to 0.7",
        "INFO model_runner.py:1099] Loading model weights took 13.9476 GB",
        {"weights_bytes": "13.9476 GiB"},
    ),
    (
        "vllm 0.8",
        "(VllmWorker rank=0 pid=1823) INFO [gpu_model_runner.py:1140] Model loading took 3.9972 GB and 2.416524 seconds",
        {"weights_bytes": "3.9972 GiB"},
    ),
    (
        "vllm 0.11",
        "(Worker_TP0 pid=18) INFO [gpu_model_runner.py:2653] Model loading took 14.9889 GiB and 3.652170 seconds",
        {"weights_bytes": "14.9889 GiB"},
    ),
    (
        "vllm 0.18 to 0.33",
        "(EngineCore pid=1) INFO [x.py:1] Model loading took 14.99 GiB memory and 3.652170 seconds",
        {"weights_bytes": "14.99 GiB"},
    ),
    (
        "vllm 0.9 to 0.33",
        "INFO [gpu_model_runner.py:3344] Encoder cache will be initialized with a budget of 16384 tokens, and profiled with 1 image items of the maximum feature size.",
        {"encoder_budget_tokens": 16384, "encoder_profile_items": 1},
    ),
    (
        "vllm 0.11 to 0.32, DEBUG",
        "DEBUG [gpu_worker.py:284] Initial free memory: 78.59 GiB; Requested memory: 0.92 (util), 72.78 GiB",
        {
            "initial_free_bytes": "78.59 GiB",
            "gpu_memory_utilization": 0.92,
            "requested_bytes": "72.78 GiB",
        },
    ),
    (
        "vllm 0.11 to 0.32, DEBUG",
        "DEBUG [gpu_worker.py:291] Free memory after profiling: 61.09 GiB (total), 55.28 GiB (within requested)",
        {
            "profile_after_free_bytes": "61.09 GiB",
            "profile_after_free_within_requested_bytes": "55.28 GiB",
        },
    ),
    (
        "vllm 0.18 to 0.32, DEBUG",
        "DEBUG [gpu_worker.py:284] worker init memory snapshot: torch_peak=0.0GiB, free_memory=78.59GiB, total_memory=79.11GiB, "
        "cuda_memory=0.52GiB, torch_memory=0.0GiB, non_torch_memory=0.52GiB, timestamp=1763.1, auto_measure=True",
        {
            "initial_free_bytes": "78.59 GiB",
            "device_total_bytes": "79.11 GiB",
            "initial_non_torch_bytes": "0.52 GiB",
        },
    ),
    (
        "vllm 0.18 to 0.32, DEBUG",
        "DEBUG [gpu_worker.py:285] worker requested memory: 72.78GiB",
        {"requested_bytes": "72.78 GiB"},
    ),
    (
        "vllm to 0.26 and vllm-ascend from 0.15, DEBUG",
        "DEBUG [worker.py:592] Memory profiling takes 9.13 seconds. Total non KV cache memory: 13.61GiB; torch peak memory increase: "
        "3.86GiB; non-torch forward increase memory: 0.56GiB; weights memory: 9.19GiB.",
        {
            "non_kv_cache_bytes": "13.61 GiB",
            "peak_activation_bytes": "3.86 GiB",
            "non_torch_increase_bytes": "0.56 GiB",
            "weights_bytes": "9.19 GiB",
        },
    ),
    (
        "vllm from 0.27, DEBUG",
        "DEBUG [gpu_worker.py:562] Memory profiling takes 9.13 seconds. Total non KV cache memory: 13.61GiB; torch peak memory increase: "
        "3.86GiB; total consumed (from mem_get_info): 10.02GiB; weights memory: 9.19GiB.",
        {
            "non_kv_cache_bytes": "13.61 GiB",
            "peak_activation_bytes": "3.86 GiB",
            "consumed_bytes": "10.02 GiB",
            "weights_bytes": "9.19 GiB",
        },
    ),
    (
        "vllm 0.18 to 0.33",
        "INFO [gpu_model_runner.py:5686] Estimated CUDA graph memory: 0.58 GiB total",
        {"graph_estimate_bytes": "0.58 GiB"},
    ),
    (
        "vllm-ascend 0.9 to 0.14",
        "(Worker_TP0 pid=9) INFO 11-21 03:07:41 [worker_v1.py:256] Available memory: 46600395162, total memory: 65452113920",
        {"kv_cache_bytes": 46600395162, "device_total_bytes": 65452113920},
    ),
    (
        "vllm-ascend 0.9 to 0.14, clamped",
        "INFO [worker.py:308] Available memory: 0, total memory: 65452113920",
        {"kv_cache_bytes": 0, "device_total_bytes": 65452113920},
    ),
    (
        "vllm-ascend, changed by hand",
        "Available memory: 43.40 GiB, total memory: 60.96 GiB",
        {"kv_cache_bytes": "43.40 GiB", "device_total_bytes": "60.96 GiB"},
    ),
    (
        "vllm-ascend, changed by hand",
        "Available memory: 40.35 GiB, requested memory: 54.86 GiB",
        {"kv_cache_bytes": "40.35 GiB", "requested_bytes": "54.86 GiB"},
    ),
    (
        "vllm from 0.9, vllm-ascend from 0.15",
        "INFO [worker.py:357] Available KV cache memory: 44.30 GiB",
        {"kv_cache_bytes": "44.30 GiB"},
    ),
    (
        "vllm from 0.18",
        "INFO [gpu_worker.py:456] Available KV cache memory: 44.3 GiB",
        {"kv_cache_bytes": "44.3 GiB"},
    ),
    (
        "negative",
        "INFO [worker.py:357] Available KV cache memory: -1.33 GiB",
        {"kv_cache_bytes": "-1.33 GiB"},
    ),
    (
        "vllm-ascend 310P from 0.23",
        "INFO [worker_310p.py:118] Available KV cache memory: 9.95 GiB (halved for workspace)",
        {"kv_cache_bytes": "9.95 GiB", "halved": 1},
    ),
    (
        "vllm-ascend from 0.23, fixed size",
        "INFO [worker.py:542] Initial free memory 60.61 GiB, reserved 40.00 GiB for KV Cache as specified by kv_cache_memory_bytes, skipping memory profiling.",
        {"initial_free_bytes": "60.61 GiB", "kv_cache_memory_bytes_arg": "40.00 GiB"},
    ),
    (
        "vllm from 0.27 and vllm-ascend from 0.27, start-up plan",
        "INFO [startup_plan.py:157] Applying persisted startup plan (fingerprint 0123456789abcdef): kv_cache_memory_bytes=41803055104 (38.93 GiB), recorded free-memory baseline 60.61 GiB, current 60.61 GiB. Memory profiling will be skipped.",
        {"startup_plan_bytes": 41803055104},
    ),
    (
        "vllm-ascend from 0.28, several KV cache groups",
        "INFO [worker.py:733] Ascend per-layer KV layout scales the multi-group budget by 0.5000 (3145728 bytes/block over 6291456 total page bytes) so per-layer buffers fit within device memory.",
        {"kv_largest_group_page_bytes": 3145728, "kv_all_page_bytes": 6291456},
    ),
    (
        "vllm-ascend from 0.26, layerwise KV pooling",
        "INFO [worker.py:634] Layerwise KV cache reuse maps 61 layers onto 4 buffer assignments; scale logical KV budget by 15.250.",
        {"kv_layer_reuse": 15.25},
    ),
    (
        "vllm-ascend 0.26, sparse KV offload",
        "INFO [worker.py:634] Sparse KV offload is enabled, enlarge total available memory to 93.41 GiB",
        {"kv_planner_bytes": "93.41 GiB"},
    ),
    (
        "vllm-ascend from 0.27, sparse KV offload",
        "INFO [worker.py:534] Sparse KV offload memory plan: npu_limit=5120 blocks, dram_limit=4096 blocks, workload_limit=9000 blocks, final=4096 blocks (dram limited), planner=74.25 GiB, host=60.75 GiB, device=13.50 GiB, alignment_reserve=0.24 GiB.",
        {"kv_planner_bytes": "74.25 GiB"},
    ),
    (
        "vllm 0.11 to 0.33, fixed size",
        "INFO [gpu_worker.py:328] Initial free memory 78.59 GiB, reserved 40.00 GiB memory for KV Cache as specified by kv_cache_memory_bytes config and skipped memory profiling.",
        {"initial_free_bytes": "78.59 GiB", "kv_cache_memory_bytes_arg": "40.00 GiB"},
    ),
    (
        "vllm on a CPU, 0.23 to 0.32",
        "INFO [cpu_worker.py:224] Auto set (12.5/62.81) GiB for KV cache on node 0, with 57.78 GiB requested memory for the worker. 45.28 GiB memory was consumed by non-kv usages.",
        {
            "kv_cache_bytes": "12.5 GiB",
            "device_total_bytes": "62.81 GiB",
            "requested_bytes": "57.78 GiB",
            "consumed_bytes": "45.28 GiB",
        },
    ),
    (
        "vllm to 0.32",
        "(EngineCore pid=1) INFO 11-21 03:07:41 [kv_cache_utils.py:828] Overriding num_gpu_blocks=5040 with "
        "num_gpu_blocks_override=4096",
        {"fitting_blocks": 5040},
    ),
    (
        "vllm 0.20 to 0.33, the estimate switched off",
        "(EngineCore pid=1) WARNING 11-21 03:07:41 [gpu_worker.py:505] CUDA graph memory profiling is disabled "
        "(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0). Without it, CUDA graph memory is not accounted for during KV cache "
        "allocation, which may require lowering --gpu-memory-utilization to avoid OOM. Consider re-enabling it (the default "
        "as of v0.21.0) and increasing --gpu-memory-utilization from 0.9200 to 0.9271.",
        {
            "gpu_memory_utilization": 0.92,
            "graph_estimate_charged": 0,
            "suggested_utilization": 0.9271,
        },
    ),
    (
        "vllm 0.18 and 0.19, the estimate not asked for",
        "(EngineCore pid=1) INFO 11-21 03:07:41 [gpu_worker.py:490] In v0.19, CUDA graph memory profiling will be enabled "
        "by default (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1), which more accurately accounts for CUDA graph memory during "
        "KV cache allocation. To try it now, set VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1 and increase "
        "--gpu-memory-utilization from 0.9200 to 0.9271 to maintain the same effective KV cache size.",
        {
            "gpu_memory_utilization": 0.92,
            "graph_estimate_charged": 0,
            "suggested_utilization": 0.9271,
        },
    ),
    (
        "vllm 0.18 to 0.33",
        "INFO CUDA graph memory profiling is enabled (default since v0.21.0). The current --gpu-memory-utilization=0.9200 is equivalent to "
        "--gpu-memory-utilization=0.9129 without CUDA graph memory profiling. To maintain the same effective KV cache size as before, "
        "increase --gpu-memory-utilization to 0.9271. To disable, set VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0.",
        {
            "gpu_memory_utilization": 0.92,
            "equivalent_utilization": 0.9129,
            "graph_estimate_charged": 1,
            "suggested_utilization": 0.9271,
        },
    ),
    (
        "vllm 0.25 to 0.33",
        "INFO Reserving 2.5 GiB of GPU memory for frontend multimodal decoding (2.0 GiB raw-frame semaphore budget, 0.5 GiB "
        "decoder+CUDA-context across 1 API server(s) @ 0.5 GiB/server); KV cache memory reduced to 41.8 GiB.",
        {"mm_ipc_bytes": "2.5 GiB", "kv_cache_reduced_bytes": "41.8 GiB"},
    ),
    (
        "vllm, too small",
        "ValueError: To serve at least one request with the models's max seq len (131072), (1.34 GiB KV cache is needed, which is larger than "
        "the available KV cache memory (0.3 GiB). Based on the available memory, the estimated maximum model length is 720. Try increasing",
        {
            "kv_cache_minimum_bytes": "1.34 GiB",
            "kv_cache_bytes": "0.3 GiB",
            "estimated_max_model_len": 720,
        },
    ),
    (
        "vllm, none",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        {"no_cache_blocks": 1},
    ),
    (
        "vllm 0.8 to 0.27",
        "INFO [kv_cache_utils.py:1744] GPU KV cache size: 645,120 tokens",
        {"tokens": 645120},
    ),
    (
        "vllm from 0.28",
        "INFO [kv_cache_utils.py:2327] GPU KV cache size: 645,120 tokens, Maximum concurrency for 65,536 tokens per request: 9.84x",
        {"tokens": 645120, "max_model_len": 65536, "max_concurrency": 9.84},
    ),
    (
        "all",
        "INFO [gpu_model_runner.py:3480] Graph capturing finished in 12 secs, took 0.46 GiB",
        {"graph_bytes": "0.46 GiB"},
    ),
    (
        "negative",
        "INFO [gpu_model_runner.py:3480] Graph capturing finished in 12 secs, took -0.19 GiB",
        {"graph_bytes": "-0.19 GiB"},
    ),
    (
        "vllm 0.18 to 0.33",
        "INFO [gpu_worker.py:617] CUDA graph pool memory: 0.1 GiB (actual), 0.58 GiB (estimated), difference: 0.47 GiB (457.5%).",
        {
            "graph_bytes": "0.1 GiB",
            "graph_estimate_bytes": "0.58 GiB",
            "graph_difference_bytes": "0.47 GiB",
        },
    ),
    (
        "vllm 0.6.4",
        "INFO 12-06 11:39:36 worker.py:232] Memory profiling results: total_gpu_memory=7.92GiB initial_memory_usage=3.09GiB "
        "peak_torch_memory=3.12GiB memory_usage_post_profile=3.12Gib non_torch_memory=0.47GiB kv_cache_size=3.54GiB "
        "gpu_memory_utilization=0.90",
        {
            "device_total_bytes": "7.92 GiB",
            "profile_after_allocated_peak_bytes": "3.12 GiB",
            "used_less_allocated_bytes": "0.47 GiB",
            "kv_cache_bytes": "3.54 GiB",
            "gpu_memory_utilization": 0.9,
        },
    ),
    (
        "between vllm 0.6.4 and 0.6.5",
        "INFO 12-25 14:00:28 worker.py:265] Memory profiling results: duration=18.41 seconds, total_gpu_memory=191.98GiB, "
        "initial_memory_usage=71.40GiB, peak_torch_memory=86.79GiB, memory_usage_post_profile=73.77GiB, "
        "non_torch_memory=6.07GiB, kv_cache_size=95.28GiB, gpu_memory_utilization=0.98.",
        {
            "device_total_bytes": "191.98 GiB",
            "profile_after_allocated_peak_bytes": "86.79 GiB",
            "used_less_allocated_bytes": "6.07 GiB",
            "kv_cache_bytes": "95.28 GiB",
            "gpu_memory_utilization": 0.98,
        },
    ),
    (
        "vllm-ascend 0.21 and 0.22",
        "(Worker_TP0 pid=1115) INFO 06-24 10:02:13 [worker.py:589] [vllm-ascend] - ACL graph pool memory: 0.44 GiB (actual), "
        "0.59 GiB (estimated), difference: 0.15 GiB (33.0%).",
        {
            "graph_bytes": "0.44 GiB",
            "graph_estimate_bytes": "0.59 GiB",
            "graph_difference_bytes": "0.15 GiB",
        },
    ),
    (
        "vllm-ascend 0.21 and 0.22",
        "INFO 06-24 10:01:36 [worker.py:437] [vllm-ascend] - ACL graph memory profiling is enabled (default since v0.21.0). The "
        "current --gpu-memory-utilization=0.9200 is equivalent to --gpu-memory-utilization=0.9103 without ACL graph memory "
        "profiling. To maintain the same effective KV cache size as before, increase --gpu-memory-utilization to 0.9297. To "
        "disable, set VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0.",
        {
            "gpu_memory_utilization": 0.92,
            "equivalent_utilization": 0.9103,
            "graph_estimate_charged": 1,
            "suggested_utilization": 0.9297,
        },
    ),
    (
        "vllm 0.11 to 0.25",
        CUDA_SUGGESTION.format(
            device="",
            usage="15.0 GiB for weight, 8.1 GiB for peak activation, 2.67 GiB for non-torch memory, and 0.3 GiB for CUDAGraph memory",
        ),
        {
            **_SUGGESTED,
            "weights_bytes": "15.0 GiB",
            "peak_activation_bytes": "8.1 GiB",
            "non_torch_increase_bytes": "2.67 GiB",
            "graph_bytes": "0.3 GiB",
        },
    ),
    (
        "vllm from 0.27",
        CUDA_SUGGESTION.format(
            device="",
            usage="19.47 GiB for consumed memory (weights + non-torch), 0.6 GiB for peak activation, and 0.1 GiB for CUDAGraph memory",
        ),
        {
            **_SUGGESTED,
            "consumed_bytes": "19.47 GiB",
            "printed_peak_activation_bytes": "0.6 GiB",
            "graph_bytes": "0.1 GiB",
        },
    ),
    (
        "vllm-ascend 0.23",
        f"(Worker_TP1 pid=3) INFO 11-21 03:07:41 [worker.py:771] {ASCEND_SUGGESTION}",
        _ASCEND_SUGGESTED,
    ),
    (
        "vllm-ascend 0.25",
        f"INFO [worker.py:751] {ASCEND_SUGGESTION} After warmup: torch reserved memory 54.4 GiB, torch allocated memory 53.75 GiB.",
        {
            **_ASCEND_SUGGESTED,
            "warm_up_reserved_bytes": "54.4 GiB",
            "warm_up_allocated_bytes": "53.75 GiB",
        },
    ),
    (
        "vllm-ascend 0.23, DEBUG",
        "DEBUG [worker.py:605] torch reserved memory: 59.38 GiB, torch allocated memory: 54.77 GiB",
        {"serving_reserved_bytes": "59.38 GiB", "serving_allocated_bytes": "54.77 GiB"},
    ),
    (
        "to 0.22",
        "INFO [gpu_worker.py:98] Sleep mode freed 0.00 GiB memory, 63.15 GiB memory is still in use.",
        {"sleep_freed_bytes": "0.00 GiB", "sleep_in_use_bytes": "63.15 GiB"},
    ),
    (
        "vllm-ascend from 0.23",
        "INFO [worker.py:234] Sleep mode (level=2) freed 51.25 GiB memory, 1.26 GiB memory is still in use.",
        {"sleep_freed_bytes": "51.25 GiB", "sleep_in_use_bytes": "1.26 GiB"},
    ),
    (
        "vllm-ascend from 0.23",
        "INFO Sleep mode released HCCL and attention workspace memory: 0.724 GiB.",
        {"sleep_communicator_bytes": "0.724 GiB"},
    ),
    (
        "vllm",
        "ValueError: Free memory on device cuda:1 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization (0.9, 19.84 GiB). Decrease",
        {
            "initial_free_bytes": "19.77 GiB",
            "device_total_bytes": "22.05 GiB",
            "startup_refused": 1,
            "gpu_memory_utilization": 0.9,
            "requested_bytes": "19.84 GiB",
        },
    ),
    (
        "torch_npu",
        "RuntimeError: NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 61.27 GiB total capacity; 0 bytes already allocated; 0 bytes "
        "current active; 48.36 MiB free; 0 bytes reserved in total by PyTorch) If reserved memory is >> allocated memory",
        {
            "oom_requested_bytes": "20.00 MiB",
            "oom_device_total_bytes": "61.27 GiB",
            "oom_allocated_bytes": 0,
            "oom_active_bytes": 0,
            "oom_free_bytes": "48.36 MiB",
            "oom_reserved_bytes": 0,
        },
    ),
    (
        "torch_npu 2.14",
        "NPU out of memory. Tried to allocate 8.00 GiB (NPU 0; 60.96 GiB total capacity; 256.10 MiB already allocated; 256.10 MiB current "
        "active; 60.33 GiB free; 624.20 MiB allowed; 284.00 MiB reserved in total by PyTorch).If reserved memory is >> allocated memory",
        {
            "oom_requested_bytes": "8.00 GiB",
            "oom_device_total_bytes": "60.96 GiB",
            "oom_allocated_bytes": "256.10 MiB",
            "oom_active_bytes": "256.10 MiB",
            "oom_free_bytes": "60.33 GiB",
            "oom_reserved_bytes": "284.00 MiB",
        },
    ),
    (
        "torch_npu 2.14",
        "torch.OutOfMemoryError: NPU out of memory. Allocation was preemptively rejected because it would exceed "
        "per_process_memory_fraction limit. Requested size: 1024.00 GiB",
        {"oom_requested_bytes": "1024.00 GiB"},
    ),
    (
        "torch_npu 2.14",
        "[W1128 11:38:01.688547495 NPUCachingAllocator.cpp:2964] Warning: Preemptively rejecting allocation of 1024.00 GiB on NPU 0: "
        "total_allocated_memory (284.00 MiB) + requested size would exceed memory limit (60.96 GiB = 100% of 60.96 GiB). Set "
        "throw_on_npumalloc_oom:False to disable this behavior. (function operator())",
        {
            "oom_requested_bytes": "1024.00 GiB",
            "oom_reserved_bytes": "284.00 MiB",
            "oom_device_total_bytes": "60.96 GiB",
        },
    ),
    (
        "torch_npu",
        "NPU out of memory. NPUWorkspaceAllocator tried to allocate 180.00 MiB(NPU 1; 60.96 GiB total capacity; 86.81 MiB free). If you "
        "want to reduce memory usage, take a try to set the environment variable TASK_QUEUE_ENABLE=1.",
        {
            "oom_requested_bytes": "180.00 MiB",
            "oom_device_total_bytes": "60.96 GiB",
            "oom_free_bytes": "86.81 MiB",
            "oom_npu_workspace": 1,
        },
    ),
    (
        "torch to 2.0",
        "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already allocated; 3.03 GiB free; 1.24 GiB "
        "reserved in total by PyTorch)",
        {
            "oom_requested_bytes": "2.26 GiB",
            "oom_device_total_bytes": "6.00 GiB",
            "oom_allocated_bytes": "781.59 MiB",
            "oom_free_bytes": "3.03 GiB",
            "oom_reserved_bytes": "1.24 GiB",
        },
    ),
    (
        "torch from 2.1",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.47 GiB of which 12.73 GiB is "
        "free. Including non-PyTorch memory, this process has 18.73 GiB memory in use. Of the allocated memory 9.08 GiB is allocated by PyTorch, "
        "and 9.35 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large",
        {
            "oom_requested_bytes": "22.78 GiB",
            "oom_device_total_bytes": "31.47 GiB",
            "oom_free_bytes": "12.73 GiB",
            "oom_process_bytes": "18.73 GiB",
            "oom_allocated_bytes": "9.08 GiB",
            "oom_unallocated_bytes": "9.35 GiB",
        },
    ),
    (
        "torch 2.1, misspelt",
        "CUDA out of memory. Tried to allocate 55.57 GiB. GPU 0 has a total capacty of 12.00 GiB of which 9.02 GiB is free. Of the allocated "
        "memory 984.52 MiB is allocated by PyTorch, and 463.48 MiB is reserved by PyTorch but unallocated.",
        {
            "oom_requested_bytes": "55.57 GiB",
            "oom_device_total_bytes": "12.00 GiB",
            "oom_free_bytes": "9.02 GiB",
            "oom_allocated_bytes": "984.52 MiB",
            "oom_unallocated_bytes": "463.48 MiB",
        },
    ),
    (
        "by hand",
        "torch_memory after profiling, before empty_cache() is 19.13 G",
        {"profile_end_reserved_bytes": "19.13 GiB"},
    ),
    (
        "by hand",
        "torch_peak after profiling, after empty_cache() is 13.30 G",
        {"profile_after_allocated_peak_bytes": "13.30 GiB"},
    ),
    (
        "by hand",
        "non_torch_memory after init HCCL is 0.35 G",
        {"distributed_after_non_torch_bytes": "0.35 GiB"},
    ),
    (
        "by hand",
        "non_torch_memory before init HCCL is 0.35 G",
        {"initial_non_torch_bytes": "0.35 GiB"},
    ),
    (
        "by hand",
        "\u670d\u52a1\u542f\u52a8\u540e\uff1a59614 / 65536 (\u8fdb\u7a0b\u5360\u7528\uff1a56257)",
        {
            "npu_smi_after_bytes": "59614 MiB",
            "npu_smi_total_bytes": "65536 MiB",
            "npu_smi_process_bytes": "56257 MiB",
        },
    ),
    *SGLANG,
]

#: Lines that look like figures of device memory and are none.
OTHERS = [
    "INFO [loggers.py:127] Engine 000: Avg prompt throughput: 12.2 tokens/s, GPU KV cache usage: 3.1%, Prefix cache hit rate: 12.0%",
    "INFO [metadata.py:97] cpu swap space: 4294967296 bytes",
    "INFO [x.py:1] Encoder graph capturing finished in 3 secs, took 0.10 GiB (4 graphs)",
    "INFO [loader.py:429] Loading weights took 4.29 seconds",
    "INFO [x.py:1] Model runner load_model total time: 3.00 seconds",
    "DEBUG [cache.py:132] Calculated size of image to be 0.38 GiB (4 leaves)",
    "Load weight end. elapsed=2.1 s",
    "Capturing batches (bs=16 avail_mem=12.03 GB):  17%|#   | 1/6 [00:00<00:00,  7.02it/s]",
    "[2026-11-21 23:47:46] Cache flushed successfully!",
    "max_total_num_tokens=234240",
    "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 2342",
    "INFO [x.py:1] RecomputeCPUOffloadScheduler: allocating 4 CPU blocks (0.50 GB) for recompute offload",
    "Available memory: 43,40 GiB, requested memory: 54,86 GiB",
    "Available KV cache memory: 43.4",
    "Available KV cache memory: 43.4 G",
    "GPU KV cache size: 645,120",
    "GPU KV cache size: 64,51,20 tokens",
    "NPU out of memory. Tried to allocate more than 1EB memory",
    "Maximum concurrency for 65,536 tokens per request: 9.8",
]
