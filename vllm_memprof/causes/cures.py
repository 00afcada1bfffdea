"""What may be changed: each cure once, with the engine whose argument or variable it is."""

from __future__ import annotations

from vllm_memprof.record.cause import Cure
from vllm_memprof.text import text

VLLM, SGLANG, TORCH, TORCH_NPU = "vllm", "sglang", "torch", "torch_npu"

SHARE_DOWN = Cure(
    text("a lower share leaves more room outside the KV cache"),
    argument="--gpu-memory-utilization",
    engine=VLLM,
)
STATIC_DOWN = Cure(
    text("a lower static share leaves more room outside weights and KV pool"),
    argument="--mem-fraction-static",
    engine=SGLANG,
)
SHARE_UP = Cure(
    text("a higher share gives the KV cache what weights and activations leave"),
    argument="--gpu-memory-utilization",
    engine=VLLM,
)
STATIC_UP = Cure(
    text("a higher static share gives the KV pool what the weights leave"),
    argument="--mem-fraction-static",
    engine=SGLANG,
)
MODEL_LEN = Cure(
    text("a shorter longest request needs a smaller KV cache"),
    argument="--max-model-len",
    engine=VLLM,
)
CONTEXT_LEN = Cure(
    text("a shorter longest request needs a smaller KV cache"),
    argument="--context-length",
    engine=SGLANG,
)
MAX_SEQS = Cure(
    text("fewer requests at a time need less memory for logits and graphs"),
    argument="--max-num-seqs",
    engine=VLLM,
)
MAX_RUNNING = Cure(
    text("fewer requests at a time need less memory for logits and graphs"),
    argument="--max-running-requests",
    engine=SGLANG,
)
BATCHED = Cure(
    text("fewer tokens per step need less activation memory"),
    argument="--max-num-batched-tokens",
    engine=VLLM,
)
KV_BYTES = Cure(
    text("the engine takes this size as it is, whether the device has it or not"),
    argument="--kv-cache-memory-bytes",
    engine=VLLM,
)
CHUNKED = Cure(
    text("fewer tokens per step need less activation memory"),
    argument="--chunked-prefill-size",
    engine=SGLANG,
)
TENSOR = Cure(
    text("more devices share the weights"), argument="--tensor-parallel-size", engine=VLLM
)
TENSOR_SGLANG = Cure(text("more devices share the weights"), argument="--tp-size", engine=SGLANG)
QUANTIZED = Cure(
    text("smaller weights"),
    action=text("use a checkpoint that is quantised already, or a smaller model"),
)
EAGER = Cure(
    text("without graphs nothing is captured; decoding becomes slower"),
    argument="--enforce-eager",
    engine=VLLM,
)
NO_GRAPH = Cure(
    text("without graphs nothing is captured; decoding becomes slower"),
    argument="--disable-cuda-graph",
    engine=SGLANG,
)
CAPTURE_SIZES = Cure(
    text("fewer or smaller sizes need fewer graphs"),
    argument="--compilation-config",
    value='{"cudagraph_capture_sizes": [1, 2, 4, 8]}',
    engine=VLLM,
)
FULL_GRAPH = Cure(
    text("one graph per size instead of one per layer and size needs fewer streams"),
    argument="--compilation-config",
    value='{"cudagraph_mode": "FULL_DECODE_ONLY"}',
    engine=VLLM,
)
GRAPH_BS = Cure(
    text("fewer or smaller sizes need fewer graphs"),
    argument="--cuda-graph-max-bs",
    engine=SGLANG,
)
EXPANDABLE_NPU = Cure(
    text("segments that grow leave no gaps behind requests of changing size"),
    environment="PYTORCH_NPU_ALLOC_CONF",
    value="expandable_segments:True",
    engine=TORCH_NPU,
)
EXPANDABLE = Cure(
    text("segments that grow leave no gaps behind requests of changing size"),
    environment="PYTORCH_CUDA_ALLOC_CONF",
    value="expandable_segments:True",
    engine=TORCH,
)
PROCESS_FRACTION = Cure(
    text("the limit of this process, not the device, refuses the allocation"),
    action=text("raise or remove per_process_memory_fraction"),
)
MM_LIMIT = Cure(
    text("fewer items per prompt need less memory in the encoder"),
    argument="--limit-mm-per-prompt",
    engine=VLLM,
)
MM_PIXELS = Cure(
    text("smaller images become fewer tokens"),
    argument="--mm-processor-kwargs",
    value='{"max_pixels": 1003520}',
    engine=VLLM,
)
NO_LOGPROBS = Cure(
    text("the logits of every token of the prompt are kept for them"),
    action=text("send no prompt_logprobs, or only with short prompts"),
)
FREE_DEVICE = Cure(
    text("what others use of the device is not there for the engine"),
    action=text("look who uses the device (memprof who) and end it, or choose another device"),
)
KILL_LEFT = Cure(
    text("an engine process that outlives its server keeps all its memory"),
    action=text("end the process that was left over (memprof who names it), then start again"),
)
NOT_RETURNED = Cure(
    text("the driver gives memory back late after a kill, or to a process that is not shown here"),
    action=text("wait a moment, look on the host and in other containers, else reset the device"),
)
NOT_EXPANDABLE = Cure(
    text("sleep mode keeps its memory in a pool of its own"),
    action=text("leave expandable_segments out of the allocator's variable"),
)
LIMITS = Cure(
    text("the engine's processes open many files and threads"),
    action=text("raise the limit: ulimit -n and ulimit -u, in docker --pids-limit"),
)
OWN_DEVICE = Cure(
    text("two processes that allocate on one device disturb each other's readings"),
    action=text("give the engine a device of its own while it starts"),
)
HOST_MORE = Cure(
    text("the host's memory, not the device's, came to its end"),
    action=text("give the container or the host more memory"),
)
HOST_FEWER = Cure(
    text("every rank takes host memory of its own"),
    action=text("lower what is kept in host memory: swap space, CPU offloading, caches"),
)
MEMLOCK = Cure(
    text("pinned memory counts against the limit of locked memory"),
    action=text("raise the limit: ulimit -l unlimited, in docker --ulimit memlock=-1"),
)
SHM = Cure(
    text("processes exchange tensors in /dev/shm"),
    action=text("give it more room: docker --shm-size 16g, or --ipc=host"),
)
DISK = Cure(text("the disk is full"), action=text("free the disk or choose another folder"))
LMCACHE_SIZE = Cure(
    text("each worker pins as much for itself"),
    environment="LMCACHE_MAX_LOCAL_CPU_SIZE",
)
HCCL_BUFFER = Cure(
    text("smaller buffers of the communicators leave device memory to others"),
    environment="HCCL_BUFFSIZE",
    value="64",
    engine=TORCH_NPU,
)
DRIVER = Cure(
    text("the driver and firmware are older than this CANN or this feature needs"),
    action=text("upgrade driver and firmware to the release that this CANN names"),
)
DRIVER_CUDA = Cure(
    text("this build of torch needs a newer driver"),
    action=text("upgrade the driver of the graphics card, or use an older CUDA build"),
)
DEVICES = Cure(
    text("the process sees other devices than it asks for"),
    action=text("check the devices that are mounted and visible (ASCEND_RT_VISIBLE_DEVICES)"),
)
DEVICES_CUDA = Cure(
    text("the process sees other devices than it asks for"),
    action=text("check the devices that are mounted and visible (CUDA_VISIBLE_DEVICES)"),
)
OPERATORS = Cure(
    text("the operator has no kernel for this chip in this installation"),
    action=text("install the kernels package of CANN for this chip, and source its set_env.sh"),
)
ENVIRONMENT = Cure(
    text("libraries are not found or do not belong together"),
    action=text("source the set_env.sh of CANN and check that its parts have one release"),
)
VERSIONS = Cure(
    text("packages of different releases do not fit together"),
    action=text("install the releases that the engine's documentation names together"),
)
ENGINE_FIX = Cure(
    text("no setting of memory changes it"),
    action=text("look for the error in the engine's issues; try a newer release"),
)
NO_GRAPH_TEST = Cure(
    text("shows whether the graph or the operator is at fault"),
    action=text("start once without graphs, and with the kernels run one by one"),
)
SPAWN = Cure(
    text("a new process can use a device that its parent uses, a forked one cannot"),
    environment="VLLM_WORKER_MULTIPROC_METHOD",
    value="spawn",
    engine=VLLM,
)
PORT = Cure(
    text("two servers cannot listen at one port"),
    action=text("choose another port, or end the process that has it"),
)
HCCL_PORT = Cure(
    text("another process listens at the ports that HCCL takes"),
    environment="HCCL_IF_BASE_PORT",
    engine=TORCH_NPU,
)
LINK = Cure(
    text("ranks that cannot reach each other wait until the time is over"),
    action=text("check the links and addresses of the devices, and HCCL_SOCKET_IFNAME"),
)
LINK_TIME = Cure(
    text("ranks that start late need more time"),
    environment="HCCL_CONNECT_TIMEOUT",
    engine=TORCH_NPU,
)
NETWORK = Cure(
    text("ranks that cannot reach each other wait until the time is over"),
    action=text("check the network between the hosts, and the interface that is named"),
)
FIRST_RANK = Cure(
    text("one rank waits for another that failed before it"),
    action=text("read the log of the rank that stopped first"),
)
HARDWARE = Cure(
    text("the device reports a fault"),
    action=text("look at its health (npu-smi info, dmesg), reset it or take another"),
)
MODEL_FILES = Cure(
    text("the model's files are not complete or not what the engine reads"),
    action=text("check the path, the files and the access to the model"),
)
ARGUMENTS = Cure(
    text("the engine refuses this set-up"),
    action=text("change the argument that the message names"),
)
SLEEP_DEVICE = Cure(
    text("what others take meanwhile is not there at wake-up"),
    action=text("keep the device to itself while the engine sleeps"),
)
SLEEP_OFF = Cure(
    text("nothing is given back and mapped again"),
    action=text("switch sleep mode off where the device has room for both"),
)
FABRIC = Cure(
    text("the registration needs a newer driver than is installed"),
    environment="ASCEND_ENABLE_USE_FABRIC_MEM",
    value="0",
    engine=TORCH_NPU,
)
CONNECTOR_SET = Cure(
    text("the connector refuses what it was given"),
    action=text("check the connector's settings and releases on both sides"),
)
