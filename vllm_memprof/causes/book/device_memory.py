"""Device memory that was refused: torch, torch_npu, CUDA, CANN; the phase tells the kind."""

from __future__ import annotations

from functools import partial

from vllm_memprof.causes import cures as c
from vllm_memprof.causes import values as v
from vllm_memprof.causes.rows import SYMPTOM, Row
from vllm_memprof.text import text

_SIZE = r"(?P<{0}>[\d.]+) (?P<{0}_unit>[TGMK]iB)"


def _size(name: str) -> str:
    return _SIZE.format(name)


#: Words of torch, torch_npu, CUDA and the CANN runtime that device memory was refused.
REFUSED = (
    r"(?:(?:CUDA|NPU|HIP|XPU) out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation"
    r"|CUDA driver error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUDNN_STATUS_ALLOC_FAILED|Triton Error \[CUDA\]: out of memory|EL0004|EL0005"
    r"|alloc device memory failed|error code(?: is|:) ?2070(?:01|18)|NPUWorkspaceAllocator tried"
    r"|Call rtMalloc fail|resource\[DeviceMemory\]|resource DeviceMemory|EI0011"
    r"|hipErrorOutOfMemory|HSA_STATUS_ERROR_OUT_OF_RESOURCES|halMemAlloc failed"
    r"|[Mm]alloc device memory|(?:DevMemAlloc|MallocPhysical|aclrtMalloc\b)\w*.{0,80}"
    r"(?:fail|20700[1-9])|ret(?: is|=) ?207001|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"
)
#: Torch's message with its figures, of either form.
FIGURES = (
    r"[Tt]ried to allocate "
    + _size("asked")
    + r"(?: ?\([NG]PU \d+; "
    + _size("total")
    + r" total capacity; "
    + _size("allocated")
    + r" already allocated;(?: [\d.]+ [GMK]iB current active;)? "
    + _size("free")
    + r" free; "
    + _size("reserved")
    + r" reserved in total"
    + r"|\. GPU \d+ has a total capaci?ty of (?P<total2>[\d.]+) GiB of which (?P<free2>[\d.]+)"
    + r" (?P<free2_unit>[GMK]iB) is free\.(?: Process \d+ has (?P<other>[\d.]+)"
    + r" (?P<other_unit>[GMK]iB) memory in use\.)*(?: Including non-PyTorch memory, this process"
    + r" has (?P<own>[\d.]+) (?P<own_unit>[GMK]iB) memory in use\.)?(?: Of the allocated memory"
    + r" (?P<allocated2>[\d.]+) (?P<allocated2_unit>[GMK]iB) is allocated by PyTorch,(?: with"
    + r" [\d.]+ [GMK]iB allocated in private pools[^,]*,)? and (?P<idle>[\d.]+)"
    + r" (?P<idle_unit>[GMK]iB) is reserved)?)"
)
_SOURCE = "docs.vllm.ai: Conserving memory; pytorch.org: CUDA semantics"
_NPU_OOM = (
    "RuntimeError: NPU out of memory. Tried to allocate 210.00 MiB (NPU 0; 60.96 GiB total "
    "capacity; 57.00 GiB already allocated; 57.00 GiB current active; 30.00 MiB free; 58.10 GiB "
    "reserved in total by PyTorch)"
)
_CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total "
    "capacity of 79.15 GiB of which 300.00 MiB is free. Including non-PyTorch memory, this process "
    "has 78.80 GiB memory in use. Of the allocated memory 76.00 GiB is allocated by PyTorch, and "
    "600.00 MiB is reserved by PyTorch but unallocated."
)
_refused = partial(Row, pattern=REFUSED, rank=SYMPTOM, certain=False, source=_SOURCE)

ROWS = (
    Row(
        kind="engine-bug",
        title=text("a size was computed wrongly: no device has so much memory"),
        pattern=r"ried to allocate (?:more than 1EB|\d{4,}(?:\.\d+)? GiB|[\d.]+ [TPE]iB)",
        example="NPU out of memory. Tried to allocate more than 1EB memory",
        cures=(c.ENGINE_FIX,),
    ),
    Row(
        kind="sampler-warm-up",
        title=text("the sampler's warm-up takes logits for every request that may run at a time"),
        pattern=r"occurred when warming up sampler with (?P<requests>\d+) dummy requests",
        example="RuntimeError: CUDA out of memory occurred when warming up sampler with 512 dummy "
        "requests. Please try lowering `max_num_seqs`",
        cures=(c.MAX_SEQS, c.SHARE_DOWN),
        values={"--max-num-seqs": lambda groups: str(min(256, int(groups["requests"] or 2) // 2))},
        source="vllm/v1/worker/gpu_model_runner.py::_dummy_sampler_run",
    ),
    Row(
        kind="other",
        title=text("the limit per process that torch_npu was given refuses the allocation"),
        pattern=r"preemptively rejected because it would exceed per_process_memory_fraction",
        example="NPU out of memory. Allocation was preemptively rejected because it would exceed "
        "per_process_memory_fraction limit",
        cures=(c.PROCESS_FRACTION,),
        source="torch_npu 2.14",
    ),
    Row(
        kind="profile-too-small",
        title=text("device memory ran out, and asking the driver about it failed, too"),
        pattern=r"NVML_SUCCESS == r INTERNAL ASSERT FAILED",
        example='RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator"',
        cures=(c.SHARE_DOWN, c.STATIC_DOWN, c.EAGER),
        source="pytorch: CUDACachingAllocator.cpp asks NVML only where an allocation failed",
        certain=False,
    ),
    Row(
        kind="graph-capture-oom",
        title=text("device memory ran out while graphs were captured"),
        pattern=r"[Cc]apture (?:cuda|npu|cpu) ?graph failed: .{0,60}out of memory",
        example="Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 2 MiB",
        cures=(c.STATIC_DOWN, c.GRAPH_BS, c.NO_GRAPH),
        source="docs.sglang.ai: Hyperparameter tuning",
    ),
    _refused(
        kind="sampler-warm-up",
        title=text("the sampler's warm-up takes logits for every request that may run at a time"),
        beside=r"in _dummy_sampler_run|warming up sampler",
        example='  File "gpu_model_runner.py", line 1, in _dummy_sampler_run\n' + _CUDA_OOM,
        cures=(c.MAX_SEQS, c.SHARE_DOWN),
    ),
    _refused(
        kind="format-conversion",
        title=text("a weight is converted to another layout, which needs a second copy of it"),
        beside=r"(?:process_weights_after_loading|in load_model\b)[\s\S]{1,4000}npu_format_cast",
        example="in process_weights_after_loading\n    torch_npu.npu_format_cast(weight, 29)\n"
        + _NPU_OOM,
        cures=(c.TENSOR, c.TENSOR_SGLANG, c.QUANTIZED),
        source="vllm_ascend/utils.py::maybe_trans_nz",
    ),
    _refused(
        kind="format-conversion",
        title=text("a tensor is converted to another layout, which needs a second copy of it"),
        beside=r"npu_format_cast|_convert_torch_format|FRACTAL_NZ.{0,40}fail",
        example="    tensor = torch_npu.npu_format_cast(tensor, 29)\n" + _NPU_OOM,
        cures=(c.SHARE_DOWN, c.QUANTIZED),
        source="vllm-ascend#3479",
    ),
    _refused(
        kind="prompt-logprobs",
        title=text("logits of every token of a prompt were kept for prompt_logprobs"),
        beside=r"_get_prompt_logprobs|prompt_logprobs=[1-9]|in compute_logprobs"
        r"|log_softmax\(logits, dim=-1",
        unless=r"_dummy_sampler_run|dummy requests",
        example="    prompt_logprobs_dict = self._get_prompt_logprobs_dict(\n" + _CUDA_OOM,
        cures=(c.NO_LOGPROBS, c.BATCHED, c.SHARE_DOWN),
        source="vllm#5907",
    ),
    _refused(
        kind="operator-workspace",
        title=text("an operator gets no workspace: memory outside torch's pool is short"),
        pattern=r"NPUWorkspaceAllocator tried to allocate|requested by GE module"
        r"|rtMalloc fail, purpose: page caching",
        example="NPU out of memory. NPUWorkspaceAllocator tried to allocate 64.00 MiB(NPU 0; "
        "60.96 GiB total capacity; 9.00 MiB free).",
        cures=(c.SHARE_DOWN, c.STATIC_DOWN, c.EXPANDABLE_NPU, c.MM_LIMIT),
        source="vllm-ascend#5855",
    ),
    _refused(
        kind="sleep-wake",
        title=text("what was given back for sleep could not be taken again at wake-up"),
        beside=r"wake_?up|resume_memory_occupation|cumem_allocator|camem|cumem\.py",
        example='  File "worker.py", line 9, in wake_up\n' + _NPU_OOM,
        cures=(c.SLEEP_DEVICE, c.SHARE_DOWN, c.STATIC_DOWN),
    ),
    _refused(
        kind="neighbour",
        title=text("another process uses a large part of the device"),
        pattern=FIGURES,
        holds=v.has_neighbour,
        example="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
        "a total capacity of 79.15 GiB of which 1.10 GiB is free. Process 99 has 40.00 GiB memory "
        "in use. Including non-PyTorch memory, this process has 38.00 GiB memory in use.",
        cures=(c.FREE_DEVICE, c.KILL_LEFT, c.SHARE_DOWN, c.STATIC_DOWN),
    ),
    _refused(
        kind="communicator-resources",
        title=text("the buffers of a communicator find no room on the device"),
        beside=r"ncclUnhandledCudaError|NCCL.{0,80}out of memory|Failed to CUDA calloc"
        r"|[Hh]ccl[A-Z]\w+[\s\S]{0,400}(?:EL0004|207001)|resource\[?.?DeviceMemory|EI0011"
        r"|hcclCommInitRootInfo|HcclCommInit|deep_ep|DeepEP",
        unless=r"[Cc]apture cuda graph failed",
        example="RuntimeError: hcclCommInitRootInfoConfig failed\nEL0004: Failed to allocate",
        cures=(c.HCCL_BUFFER, c.SHARE_DOWN, c.STATIC_DOWN),
        source="hiascend.com: HCCL error codes",
    ),
    _refused(
        kind="graph-capture-oom",
        title=text("device memory ran out while graphs were captured"),
        beside=r"in capture_model|in _capture_cudagraphs|[Cc]apturing (?:cuda|CUDA|ACL|NPU) ?graphs"
        r"|Capture (?:cuda|npu) graph begin|in init_cuda_graphs|cuda_graph_runner\.py|NPUGraph"
        r"|Starting to capture ACL graphs|npu_graph_runner|in capture_begin|cudagraph_dispatcher",
        unless=r"Graph capturing finished|Capture (?:cuda|npu) graph end|startup complete"
        r"|fired up and ready|in determine_available_memory",
        example="INFO model_runner.py] Capturing cudagraphs for decoding.\n" + _CUDA_OOM,
        cures=(
            *(c.SHARE_DOWN, c.STATIC_DOWN, c.MAX_SEQS, c.CAPTURE_SIZES, c.GRAPH_BS),
            *(c.EAGER, c.NO_GRAPH),
        ),
    ),
    _refused(
        kind="multimodal",
        title=text("the encoder of images or videos needs more than was left"),
        beside=r"_execute_mm_encoder|embed_multimodal|get_multimodal_embeddings|get_image_feature"
        r"|_process_(?:image|video)_input|in _gather_mm|multi-modal embeddings in the worst case"
        r"|in split_qkv|self\.visual|siglip|intern_?vit|vision\w*\.py|pixel_values"
        r"|_merge_multimodal|general_mm_embed|VisionTransformer|vision_tower|profile_multimodal",
        example='  File "gpu_model_runner.py", line 1, in _execute_mm_encoder\n' + _CUDA_OOM,
        cures=(c.MM_LIMIT, c.MM_PIXELS, c.SHARE_DOWN, c.STATIC_DOWN),
    ),
    _refused(
        kind="fragmentation",
        title=text("enough is reserved and not allocated, in pieces that are too small"),
        pattern=FIGURES,
        holds=v.gap_suffices,
        example="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
        "a total capacity of 79.15 GiB of which 300.00 MiB is free. Including non-PyTorch memory, "
        "this process has 78.80 GiB memory in use. Of the allocated memory 66.00 GiB is allocated "
        "by PyTorch, and 9.60 GiB is reserved by PyTorch but unallocated.",
        cures=(c.EXPANDABLE_NPU, c.EXPANDABLE, c.SHARE_DOWN, c.STATIC_DOWN),
        certain=True,
    ),
    _refused(
        kind="connector",
        title=text("a KV connector finds no device memory for its buffers"),
        beside=r"in register_kv_caches|mooncake\w*\.py|lmcache/|nixl\w*\.py|ascend_store",
        unless=r"in load_model|in profile_run",
        example='  File "mooncake_connector.py", line 5, in register_kv_caches\n' + _NPU_OOM,
        cures=(c.SHARE_DOWN, c.STATIC_DOWN),
        memory=True,
    ),
    _refused(
        kind="profile-too-small",
        title=text("a second model was loaded that the profiled budget does not hold"),
        beside=r"Starting to load model[\s\S]{1,4000}Starting to load model[\s\S]{1,4000}KV Cache"
        r" is|in load_draft_model|draft_worker|eagle_worker|in _init_drafter",
        unless="sglang",
        example="INFO Starting to load model a...\nINFO Starting to load model b...\nINFO the rest "
        "of the memory reserved for KV Cache is 40.00GiB.\n" + _CUDA_OOM,
        cures=(c.SHARE_DOWN,),
        source="vllm#22624",
    ),
    _refused(
        kind="profile-too-small",
        title=text("the KV cache has a size that was given, and the device has less"),
        beside=r"kv[-_]cache[-_]memory[-_]bytes'?(?:=|: | )\d[\s\S]{0,20000}"
        r"(?:_allocate_kv_cache|in initialize_from_config|in initialize_kv_cache)",
        unless="sglang",
        example="non-default args: {'kv_cache_memory_bytes': 107374182400}\n"
        '  File "gpu_model_runner.py", line 1, in _allocate_kv_cache_tensors\n' + _NPU_OOM,
        cures=(c.KV_BYTES, c.FREE_DEVICE),
        source="vllm/config/cache.py::CacheConfig.kv_cache_memory_bytes",
    ),
    _refused(
        kind="profile-too-small",
        title=text("the KV cache that was granted could not be allocated"),
        beside=r"_allocate_kv_cache_tensors|in initialize_kv_cache|in _allocate_kv_cache"
        r"|in initialize_from_config|in allocate_kv_cache",
        unless="sglang",
        example='  File "gpu_model_runner.py", line 1, in _allocate_kv_cache_tensors\n' + _CUDA_OOM,
        cures=(c.SHARE_DOWN, c.FREE_DEVICE),
    ),
    _refused(
        kind="weights-too-large",
        title=text("the weights do not fit the device"),
        beside=r"in load_model\b|in load_weights|process_weights_after_loading|in create_weights"
        r"|in initialize_model|default_loader\.py|Load weight begin|in get_model",
        unless=r"Model loading took|oading model weights took|Load weight end|in profile_run"
        r"|in determine_|in execute_model|KV cache size|Memory pool end",
        example='  File "worker.py", line 1, in load_model\n' + _CUDA_OOM,
        cures=(c.TENSOR, c.TENSOR_SGLANG, c.QUANTIZED),
    ),
    _refused(
        kind="weights-too-large",
        title=text("weights and one step of the profiled size do not fit the device"),
        beside=r"in profile_run|in determine_available_memory|in determine_num_available_blocks"
        r"|in _dummy_run",
        unless="sglang|KV cache size",
        example='  File "gpu_model_runner.py", line 1, in profile_run\n' + _CUDA_OOM,
        cures=(c.BATCHED, c.TENSOR, c.MAX_SEQS, c.QUANTIZED),
    ),
    _refused(
        kind="static-share",
        title=text("weights and KV pool leave too little for a step: the static share is too high"),
        beside=r"sglang|Scheduler hit an exception|KV Cache is allocated|mem-fraction-static",
        example='  File "sglang/srt/managers/scheduler.py", line 1, in event_loop\n' + _NPU_OOM,
        cures=(c.STATIC_DOWN, c.CHUNKED, c.MAX_RUNNING),
        source="docs.sglang.ai: Hyperparameter tuning",
    ),
    _refused(
        kind="growth-while-serving",
        title=text("while serving, memory outside the KV cache grew until nothing was left"),
        beside=r"\[\[serving\]\]|in execute_model|EngineDeadError|AsyncLLM output_handler"
        r"|HTTP/1.1\" 5"
        r"|EngineCore encountered a fatal error|in get_response|EngineCore encountered an issue",
        unless=r"CUDA|in determine_|Failed core proc|failed to start",
        example="EngineCore encountered a fatal error.\n" + _NPU_OOM,
        cures=(c.EXPANDABLE_NPU, c.SHARE_DOWN, c.STATIC_DOWN, c.BATCHED),
        source="vllm-ascend#5339",
    ),
    _refused(
        kind="profile-too-small",
        title=text("a step of serving needs more than the profiled one did"),
        beside=r"\[\[serving\]\]|in execute_model|EngineDeadError|output_handler|HTTP/1.1\" 5"
        r"|engine_step|run_engine_loop|MQLLMEngine|EngineCore encountered a|in step\b",
        unless=r"failed to start|Failed core proc",
        example="EngineCore encountered a fatal error.\n" + _CUDA_OOM,
        cures=(c.SHARE_DOWN, c.BATCHED, c.MAX_SEQS),
    ),
    _refused(
        kind="weights-too-large",
        title=text("torch's tensors alone fill the device before a KV cache is sized"),
        pattern=FIGURES,
        holds=v.full_of_small,
        unless=r"KV cache size|KV Cache is|Available KV|Available memory|sglang",
        example="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 "
        "has "
        "a total capacity of 79.15 GiB of which 20.00 MiB is free. Process 7 has 79.10 GiB memory "
        "in use. Of the allocated memory 78.60 GiB is allocated by PyTorch, and 12.00 MiB is "
        "reserved by PyTorch but unallocated.",
        cures=(c.TENSOR, c.QUANTIZED),
    ),
    _refused(
        kind="profile-too-small",
        title=text("a library outside torch's pool finds no room on the device"),
        pattern=r"CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED"
        r"|CUDNN_STATUS_ALLOC_FAILED",
        example="RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
        cures=(c.SHARE_DOWN, c.STATIC_DOWN),
    ),
    _refused(
        kind="graph-capture-oom",
        title=text("after the KV cache, device memory ran out in warm-up or graph capture"),
        beside=r"Available KV cache memory|KV cache size|# (?:cuda|GPU|NPU) blocks",
        unless=r"Graph capturing finished|startup complete",
        example="INFO GPU KV cache size: 40,000 tokens\n" + _CUDA_OOM,
        cures=(c.SHARE_DOWN, c.MAX_SEQS, c.CAPTURE_SIZES, c.EAGER),
    ),
    _refused(
        kind="other",
        title=text("device memory ran out; the log does not tell in which phase"),
        example=_NPU_OOM,
        cures=(
            *(c.SHARE_DOWN, c.STATIC_DOWN, c.BATCHED, c.CHUNKED, c.TENSOR, c.TENSOR_SGLANG),
            *(c.EXPANDABLE_NPU, c.EXPANDABLE),
        ),
    ),
)
