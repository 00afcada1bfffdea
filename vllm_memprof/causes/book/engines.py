"""What vLLM, vllm-ascend and SGLang say themselves when they refuse to start or go on."""

from __future__ import annotations

from vllm_memprof.causes import cures as c
from vllm_memprof.causes import values as v
from vllm_memprof.causes.rows import SYMPTOM, WRAPPER, Row
from vllm_memprof.text import text

_LENGTHS = {
    "--max-model-len": v.longest,
    "--context-length": v.longest,
}

_FREE_AT_START = (
    r"Free memory on device.{0,16}\((?P<free>[\d.]+) ?/ ?(?P<total>[\d.]+) GiB\) on startup is less"
)

ROWS = (
    Row(
        kind="not-returned-after-kill",
        title=text("a start before this one did not end: its processes still use the device"),
        pattern=_FREE_AT_START + r"|Error in memory profiling\.",
        beside=r"\[\[after a start that did not end\]\]",
        unless="wake_up",
        example="INFO Starting vLLM API server on http://0.0.0.0:8000\nINFO Initializing a V1 LLM "
        "engine\nValueError: Free memory on device (8.0/64.0 GiB) on startup is less than desired "
        "GPU memory utilization (0.9, 57.6 GiB).",
        cures=(c.KILL_LEFT, c.FREE_DEVICE, c.SHARE_DOWN),
        values={"--gpu-memory-utilization": v.share_of_free},
        certain=False,
        source="vllm/v1/worker/utils.py::request_memory",
    ),
    Row(
        kind="static-share",
        title=text("the share asks for more than an empty device has free"),
        pattern=_FREE_AT_START,
        holds=v.is_empty,
        example="ValueError: Free memory on device (60.61/60.96 GiB) on startup is less than "
        "desired GPU memory utilization (0.995, 60.65 GiB).",
        cures=(c.SHARE_DOWN,),
        values={"--gpu-memory-utilization": v.share_of_free},
        source="vllm/v1/worker/utils.py::request_memory",
    ),
    Row(
        kind="not-returned-after-kill",
        title=text("no process is shown that holds what is in use: one was killed, or is not seen"),
        pattern=_FREE_AT_START,
        beside=r"No running processes found|defunct|<zombie>|no such process",
        example="ValueError: Free memory on device (8.0/64.0 GiB) on startup is less than desired "
        "GPU memory utilization (0.9, 57.6 GiB).\n| No running processes found in NPU 0 |",
        cures=(c.KILL_LEFT, c.NOT_RETURNED),
        certain=False,
        source="vllm#42017",
    ),
    Row(
        kind="not-returned-after-kill",
        title=text("as much is in use as this engine asks for: most often the server before it"),
        pattern=_FREE_AT_START + r"\s+than desired GPU memory utilization \([\d.]+,"
        r" (?P<asked>[\d.]+) GiB",
        holds=v.another_engine,
        unless="wake_up",
        example="ValueError: Free memory on device (3.0/64.0 GiB) on startup is less than desired "
        "GPU memory utilization (0.9, 57.6 GiB).",
        cures=(c.KILL_LEFT, c.FREE_DEVICE, c.NOT_RETURNED),
        certain=False,
        source="vllm#42017",
    ),
    Row(
        kind="neighbour",
        title=text("less of the device is free at the start than the engine's share asks for"),
        pattern=_FREE_AT_START,
        unless=r"wake_up|\b(?:orphan|zombie|defunct|left over|leftover)\b",
        example="ValueError: Free memory on device (8.0/64.0 GiB) on startup is less than desired "
        "GPU memory utilization (0.9, 57.6 GiB).",
        cures=(c.FREE_DEVICE, c.KILL_LEFT, c.SHARE_DOWN),
        values={"--gpu-memory-utilization": v.share_of_free},
        source="vllm/v1/worker/utils.py::request_memory",
    ),
    Row(
        kind="neighbour",
        title=text("free memory grew during profiling: another process gave memory back"),
        pattern=r"Error in memory profiling\.",
        example="AssertionError: Error in memory profiling. Initial free memory 100, current free "
        "memory 200. This happens when the NPU memory was not properly cleaned up",
        cures=(c.OWN_DEVICE, c.KILL_LEFT),
        source="vllm-ascend#109",
    ),
    Row(
        kind="kv-too-small",
        title=text("the KV cache does not hold one request of the longest allowed length"),
        pattern=r"max(?:imum)? seq(?:uence)? len(?:gth)? \((?P<length>[\d,]+)\), \(?(?P<needed>"
        r"[\d.]+) GiB KV\s+cache is needed, which is larger than the available KV cache memory \("
        r"(?P<there>[\d.]+) GiB\)(?:.{0,90}estimated maximum model length is"
        r" (?P<estimate>[\d,]+))?",
        example="ValueError: To serve at least one request with the models's max seq len (32768), "
        "(4.00 GiB KV cache is needed, which is larger than the available KV cache memory (1.00 "
        "GiB). Try increasing `gpu_memory_utilization`",
        cures=(c.MODEL_LEN, c.SHARE_UP, c.TENSOR),
        values=_LENGTHS,
        source="vllm/v1/core/kv_cache_utils.py::check_enough_kv_cache_memory",
    ),
    Row(
        kind="kv-too-small",
        title=text("the KV cache does not hold one request of the longest allowed length"),
        pattern=r"is larger than the maximum number of tokens that can be stored in KV cache"
        r" \((?P<stored>[\d,]+)\)|KV cache is needed, which is larger than"
        r"|larger than the available KV cache",
        example="ValueError: The model's max seq len (131072) is larger than the maximum number of "
        "tokens that can be stored in KV cache (30000).",
        cures=(c.MODEL_LEN, c.SHARE_UP),
        values={"--max-model-len": v.stored},
        source="vllm/worker/worker.py::raise_if_cache_size_invalid",
    ),
    Row(
        kind="negative-kv",
        title=text("weights and activations use the whole share: nothing is left for a KV cache"),
        pattern=r"No available memory for the cache blocks",
        example="ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine.",
        cures=(c.SHARE_UP, c.BATCHED, c.TENSOR, c.FREE_DEVICE),
        rank=SYMPTOM,
        source="vllm/v1/core/kv_cache_utils.py::check_enough_kv_cache_memory",
    ),
    Row(
        kind="negative-kv",
        title=text("weights and activations use the whole share: nothing is left for a KV cache"),
        pattern=r"KV Cache is -\d|vailable KV cache memory: -\d|vailable memory: (?:-\d|0, total)"
        r"|# (?:cuda|gpu|npu|CUDA|GPU|NPU) blocks: 0\b|KV cache size: 0 tokens",
        example="INFO worker.py] Available KV cache memory: -2.10 GiB",
        cures=(c.SHARE_UP, c.BATCHED, c.TENSOR, c.FREE_DEVICE),
        rank=SYMPTOM,
        quiet=True,
    ),
    Row(
        kind="negative-kv",
        title=text("the static share holds the weights and no KV pool"),
        pattern=r"profiled value -\d",
        example="[2026-01-01 00:00:00 TP0] max_total_tokens=1000 is larger than the profiled value "
        "-561981. Use the profiled value instead.",
        cures=(c.STATIC_UP, c.TENSOR_SGLANG, c.QUANTIZED),
        rank=SYMPTOM,
        quiet=True,
        source="sglang/srt/model_executor/model_runner.py::init_memory_pool",
    ),
    Row(
        kind="negative-kv",
        title=text("the KV pool's size came out negative: the weights take the whole share"),
        pattern=r"Trying to create tensor with negative dimension",
        beside=r"memory_pool|mem_pool|init_memory|profiled value|sglang|kv_cache|KV [Cc]ache"
        r"|negative dimension -\d{4,}",
        example="RuntimeError: Trying to create tensor with negative dimension -561980: [-561980]",
        cures=(c.STATIC_UP, c.SHARE_UP, c.TENSOR_SGLANG, c.QUANTIZED),
        rank=SYMPTOM,
        certain=False,
    ),
    Row(
        kind="negative-kv",
        title=text("the static share holds the weights and no KV pool"),
        pattern=r"Not enough memory[.;].{0,40}(?:increase|mem-fraction-static)"
        r"|Loaded weights leave no GPU memory|Raise --mem-fraction-static above"
        r"|increase --mem-fraction-static|max_total_num_tokens=(?:-\d|0\b)",
        example="RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        cures=(c.STATIC_UP, c.TENSOR_SGLANG, c.QUANTIZED),
        rank=SYMPTOM,
        source="sglang/srt/model_executor/model_runner.py::init_memory_pool",
    ),
    Row(
        kind="static-share",
        title=text("the KV pool ran full while decoding and nothing could be moved out"),
        pattern=r"(?:Decode|Prefill) out of memory\. Try to lower|alloc_\w+ runs out of"
        r" memory|KV cache pool is full\. Retract"
        r"|token_to_kv_pool.{0,40}out of memory",
        example="RuntimeError: Decode out of memory. Try to lower your batch size.",
        cures=(c.MAX_RUNNING, c.STATIC_UP, c.CONTEXT_LEN),
    ),
    Row(
        kind="static-share",
        title=text("devices differ in what is free: the emptiest and the fullest do not match"),
        pattern=r"memory capacity is unbalanced",
        example="RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by "
        "other processes.",
        cures=(c.FREE_DEVICE, c.KILL_LEFT),
        source="sglang/srt/model_executor/model_runner.py::init_torch_distributed",
    ),
    Row(
        kind="graph-streams",
        title=text("graph capture needs more events than the device has"),
        pattern=r"Insufficient_Event_Resources|EL0008|Create capture event failed|runtime result = "
        r"207007|error code(?: is|:) ?207007|no event resource",
        example="Insufficient_Event_Resources(EL0008): The event resources are insufficient.\n"
        "        Create capture event failed, error=117571609.",
        cures=(c.CAPTURE_SIZES, c.EAGER, c.GRAPH_BS, c.NO_GRAPH, c.DRIVER),
        source="vllm-ascend#12989; hiascend.com: aclrtCreateEvent",
    ),
    Row(
        kind="graph-streams",
        title=text("graph capture needs more streams or events than the device has"),
        pattern=r"Alloc sq cq fail|SqCqManage|New capture stream failed"
        r"|Create capture stream failed"
        r"|CaptureBegin.{0,80}20700[578]|Insufficient_(?:Stream|Notify)_Resources"
        r"|runtime result = 20700[589]|error code(?: is|:) ?20700[589]|no stream resource"
        r"|driver error:resource alloc fail|stream resources? (?:is|are) not eno",
        unless=r"EI0006|EI0015|resource\[qp\]|MallocHost",
        example="[Error]: Failed to apply for memory.\n        [SqCqManage]Alloc sq cq fail, "
        "stream_id=1984",
        cures=(c.FULL_GRAPH, c.CAPTURE_SIZES, c.EAGER, c.GRAPH_BS, c.NO_GRAPH, c.DRIVER),
        source="vllm-ascend#9564; hiascend.com: aclrtCreateStream",
    ),
    Row(
        kind="graph-streams",
        title=text("graph capture needs more streams or events than the device has"),
        pattern=r"insufficient available streams to capture",
        unless=r"EI0006|EI0002|EI0015|EL0004|out of memory",
        example="ACLgraph has insufficient available streams to capture the configured number of "
        "sizes.",
        cures=(c.FULL_GRAPH, c.CAPTURE_SIZES, c.EAGER, c.DRIVER),
        rank=SYMPTOM,
        source="vllm_ascend/worker/model_runner_v1.py::capture_model",
    ),
    Row(
        kind="graph-streams",
        title=text("an event of the device failed or could not be had"),
        pattern=r"current working event is 0x",
        unless=r"EI00|507[0-8]\d\d|out of memory|EL0004",
        example="RuntimeError: The Inner error is reported as above. The process exits for this "
        "inner error, and the current working event is 0xfffe941edf00.",
        cures=(c.EAGER, c.CAPTURE_SIZES, c.GRAPH_BS, c.DRIVER),
        rank=SYMPTOM,
        certain=False,
        source="vllm-ascend#12989",
    ),
    Row(
        kind="sleep-wake",
        title=text("memory could not be mapped again at wake-up"),
        pattern=r"(?:CUDA [Ee]rror|HTTP \d{3}).{0,60}cumem_allocator\.cpp:\d+"
        r"|camem_allocator.{0,40}"
        r"(?:fail|rror)|create_and_map.{0,60}(?:fail|rror)|python_unmap_and_release.{0,60}rror",
        example="CUDA Error: invalid argument at cumem_allocator.cpp:145",
        cures=(c.SLEEP_DEVICE, c.SLEEP_OFF, c.SHARE_DOWN),
    ),
    Row(
        kind="sleep-wake",
        title=text("more memory stays in use after each sleep"),
        pattern=r"Sleep mode (?:\(level=\S+\) )?freed [\d.]+ GiB memory, (?P<first>[\d.]+) GiB"
        r" memory is still in use[\s\S]{1,4000}Sleep mode (?:\(level=\S+\) )?freed [\d.]+ GiB"
        r" memory, (?P<last>[\d.]+) GiB memory is still in use",
        holds=lambda groups: float(groups["last"] or 0) > 1.2 * float(groups["first"] or 0) + 1,
        example="INFO Sleep mode freed 40.00 GiB memory, 4.00 GiB memory is still in use.\n"
        "INFO Sleep mode freed 40.00 GiB memory, 11.00 GiB memory is still in use.",
        cures=(c.SLEEP_OFF, c.ENGINE_FIX),
        quiet=True,
        certain=False,
        rank=SYMPTOM,
        source="NVIDIA-NeMo/RL#2619",
    ),
    Row(
        kind="sleep-wake",
        title=text("more memory is in use after a sleep than before it"),
        pattern=r"Memory usage increased after sleeping",
        example="AssertionError: Memory usage increased after sleeping.",
        cures=(c.SLEEP_DEVICE, c.SLEEP_OFF),
        source="vllm/v1/worker/gpu_worker.py::Worker.sleep",
    ),
    Row(
        kind="sleep-wake",
        title=text("sleep mode and growing segments exclude each other"),
        pattern=r"[Ee]xpandable segments are not compatible with memory pool|sleep mode.{0,80}"
        r"expandable_segments",
        example="AssertionError: Expandable segments are not compatible with memory pool.",
        cures=(c.NOT_EXPANDABLE, c.SLEEP_OFF),
        memory=False,
        source="pytorch#147851",
    ),
    Row(
        kind="multimodal",
        title=text("profiling takes the largest images of a prompt, more than a step's tokens"),
        pattern=r"too short to hold the multi-modal embeddings in the worst case",
        beside=r"ERROR|rror",
        example="WARNING profiling.py] The sequence length used for profiling is too short to hold "
        "the multi-modal embeddings in the worst case (180224 tokens in total)\nERROR Exception in "
        "worker while processing method determine_num_available_blocks.",
        cures=(c.MM_LIMIT, c.MM_PIXELS, c.BATCHED),
        quiet=True,
        certain=False,
        rank=SYMPTOM,
    ),
    Row(
        kind="multimodal",
        title=text("an item of a prompt has more tokens than a step or the encoder's cache holds"),
        pattern=r"(?:exceeds|larger than|more than) (?:the )?(?:pre-allocated )?encoder cache"
        r"|max_tokens_per_mm_item.{0,80}larger|Chunked MM input disabled but max_tokens",
        example="ValueError: Chunked MM input disabled but max_tokens_per_mm_item (9) is "
        "larger than max_num_batched_tokens (8192).",
        cures=(c.BATCHED, c.MM_PIXELS, c.MM_LIMIT),
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a kernel reads or writes where it may not: a fault, not a lack of memory"),
        pattern=r"illegal memory access|cudaErrorIllegalAddress|misaligned address"
        r"|Memory access fault by GPU|CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_SUPP)"
        r"|CUDNN_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)"
        r"|device-side assert triggered|unspecified launch failure|an illegal instruction was",
        unless=r"out of memory\. Tried",
        example="Exception: Capture cuda graph failed: Triton Error [CUDA]: an illegal memory "
        "access was encountered",
        cures=(c.ENGINE_FIX, c.NO_GRAPH_TEST),
    ),
    Row(
        kind="not-memory-at-all",
        title=text("the engine refuses a combination of arguments"),
        pattern=r"error: (?:unrecognized arguments|argument --|the following arguments)"
        r"|ValidationError.{0,40} for (?:Vllm|Model|Cache|Parallel|Scheduler|Speculative)\w*Config"
        r"|(?:ValueError|AssertionError|NotImplementedError): .{0,100}(?:is not supported|not yet"
        r" supported|must be divisible|not divisible|does not support|is incompatible|unsupported"
        r"|is only"
        r" supported on|only supported (?:on|for|with)|is smaller than max_model_len|only supports)"
        r"|dtype not implemented for|Ray does not allocate any"
        r"|RuntimeError: \w+ only supports "
        r"|User-specified max_model_len",
        example="ValueError: Total number of attention heads (28) must be divisible by tensor "
        "parallel size (8).",
        cures=(c.ARGUMENTS,),
    ),
    Row(
        kind="not-memory-at-all",
        title=text("the engine does not know the architecture or the files of this model"),
        pattern=r"Model architectures? \[.{0,80}(?:not supported|failed to be inspected)"
        r"|does not recognize this architecture|has no vLLM implementation|Unrecognized model in"
        r"|no module or parameter named|KeyError: '(?:model|layers|visual|lm_head)[.\w]*'"
        r"|size mismatch for|checkpoint .{0,40}(?:corrupt|missing)|HeaderTooLarge|InvalidHeader"
        r"|MetadataIncompleteBuffer|SafetensorError|No safetensors|Cannot find any model weights"
        r"|is not a (?:local folder|valid model identifier)|Repository Not Found|gated repo"
        r"|RepositoryNotFound|LocalEntryNotFound|couldn't connect to 'https://huggingface"
        r"|does not appear to have a file named|HFValidationError|Repo id must|HTTPSConnectionPool"
        r"\(host='[\w.-]*(?:huggingface|hf-mirror|modelscope)|No tokenizer file"
        r"|Error in inspecting model arch|enforce fail at inline_container|Can't load (?:the )?"
        r"(?:config|tokenizer|image processor)|Incorrect path_or_model_id|invalid load key"
        r"|weight_scale|weight_offset|Error while deserializing",
        example="ValueError: Model architectures ['NewForCausalLM'] are not supported for now.",
        cures=(c.MODEL_FILES, c.VERSIONS),
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a check of the engine's own code failed; nothing was allocated there"),
        pattern=r"^(?:.{0,120}[ \]:])?AssertionError(?::(?! Error in memory)|\s*$)",
        example="    assert active_topk_width >= 4\nAssertionError",
        unless=r"out of memory|EL0004|Error in memory profiling|NVML_SUCCESS",
        cures=(c.ENGINE_FIX, c.NO_GRAPH_TEST),
        rank=SYMPTOM,
        certain=False,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("the engine's code met what it does not handle; it is no lack of memory"),
        pattern=r"Attempted to assign \d+ multimodal tokens|prompt updates? corresponding to"
        r"|(?:AttributeError|TypeError|KeyError"
        r"|IndexError|NameError|UnboundLocalError"
        r"|NotImplementedError|ZeroDivisionError|RecursionError): ",
        unless=r"out of memory|EL0004|EI00|2070\d\d|5070\d\d|5610\d\d",
        example="AttributeError: 'NPUModelRunner' object has no attribute 'drafter'",
        cures=(c.ENGINE_FIX, c.VERSIONS),
        rank=WRAPPER,
    ),
    Row(
        kind="engine-bug",
        title=text("the engine's own count of its KV pool does not add up"),
        pattern=r"(?:pool|allocator)\w* memory leak detected|pool memory leak",
        example="ValueError: token_to_kv_pool_allocator memory leak detected! available_size=100",
        cures=(c.ENGINE_FIX,),
        source="sglang/srt/managers/scheduler.py::check_memory",
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a step took longer than the engine's watchdog waits"),
        pattern=r"[Ww]atchdog timeout|watchdog_last_forward|Scheduler watchdog|shm_broadcast.{0,80}"
        r"TimeoutError|sample_tokens timed out|execute_model timed out",
        example="[2026-01-01 00:00:00 TP0] Watchdog timeout (self.watchdog_last_forward_ct=12)",
        unless=r"out of memory|EL0004|EI00|5070\d\d|illegal memory",
        cures=(c.FIRST_RANK, c.NO_GRAPH_TEST),
        rank=SYMPTOM,
        certain=False,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("tensors do not fit each other: a fault of the code or of the model's files"),
        pattern=r"RuntimeError: (?:shape '\[|Sizes of tensors must match|The size of tensor \w+ \("
        r"|expected (?:mat1|scalar|m1)|mat1 and mat2|Expected (?:all tensors|tensor|size)|Tensors"
        r" must|start \(|The expanded size|Given groups|weight should|index \d+ is out of|The shape"
        r" of|\w+ must have the same dtype|invalid shape|output with shape)",
        example="RuntimeError: The size of tensor a (10) must match the size of tensor b (11)",
        unless=r"out of memory\. Tried|EL0004",
        cures=(c.ENGINE_FIX, c.MODEL_FILES),
        rank=SYMPTOM,
    ),
)
