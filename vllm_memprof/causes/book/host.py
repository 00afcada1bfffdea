"""The host: its kernel, its limits, its memory and files, Ray, ports."""

from __future__ import annotations

from vllm_memprof.causes import cures as c
from vllm_memprof.causes.rows import ROOT, SYMPTOM, WRAPPER, Row
from vllm_memprof.text import text

ROWS = (
    Row(
        kind="host-memory",
        title=text("the host's kernel killed a process because host memory ran out"),
        pattern=r"Out of memory: Kill(?:ed)? process|oom-kill(?:er)?\b|OOMKilled|oom_reaper"
        r"|Memory cgroup out of memory|invoked oom-killer|A worker was killed by the OOM"
        r"|oom_kill event|OOM[- ]Killed",
        example="kernel: Out of memory: Killed process 4711 (VLLM::EngineCor) total-vm:1000kB",
        cures=(c.HOST_MORE, c.HOST_FEWER),
        quiet=True,
    ),
    Row(
        kind="host-memory",
        title=text("Ray ended a worker because the host's memory was nearly used up"),
        pattern=r"due to the node running low on memory|ray\.exceptions\.OutOfMemoryError"
        r"|Workers \(tasks ?/ ?actors\) killed due to memory pressure",
        example="ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on "
        "memory.",
        cures=(c.HOST_MORE, c.HOST_FEWER),
        quiet=True,
        source="docs.ray.io: Out-Of-Memory Prevention",
    ),
    Row(
        kind="host-memory",
        title=text("the limit of locked memory refuses pinned host memory"),
        pattern=r"(?:memlock|RLIMIT_MEMLOCK|locked memory).{0,80}(?:limit|fail|exceed|too)"
        r"|mlock\w*.{0,30}(?:fail|Cannot)|ibv_reg_mr.{0,60}(?:Cannot allocate|fail)",
        example="ERROR ibv_reg_mr failed: Cannot allocate memory, check the memlock limit",
        cures=(c.MEMLOCK,),
    ),
    Row(
        kind="host-memory",
        title=text("host memory could not be allocated"),
        pattern=r"DefaultCPUAllocator: (?:can't|not enough) |std::bad_alloc|Cannot allocate memory"
        r"|\[Errno 12\]|\bMemoryError\b|numpy\.\w*\.?_ArrayMemoryError|unable to mmap \d+ bytes"
        r"|malloc\(\).{0,30}fail|[Uu]nable to allocate [\d.]+ [GMK]iB for an array",
        example="RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 5000000000 bytes.",
        cures=(c.HOST_MORE, c.HOST_FEWER, c.MEMLOCK),
    ),
    Row(
        kind="host-memory",
        title=text("/dev/shm is too small for what the processes exchange"),
        pattern=r"Bus error|/dev/shm.{0,80}(?:full|No space|not enough|insufficient|too small)"
        r"|No space left on device.{0,80}(?:shm|psm_|shared memory)|insufficient shared memory"
        r"|unable to (?:write to|open|allocate) (?:file </torch_|shared memory)"
        r"|(?:shm|shared memory).{0,60}No space left",
        example="RuntimeError: DataLoader worker is killed by signal: Bus error. It is possible "
        "that dataloader's workers are out of shared memory.",
        cures=(c.SHM,),
        quiet=True,
    ),
    Row(
        kind="host-memory",
        title=text("pinned host memory was refused during graph capture"),
        pattern=r"operation not permitted when a stream is capturing|error code is 10702[579]"
        r"|(?:aclrtMallocHost|MallocHostWithCfg).{0,80}captur",
        beside=r"MallocHost|pin_memory|pinned|memlock|207001",
        example="RuntimeError: operation not permitted when a stream is capturing\n"
        "    buffer = buffer.pin_memory()",
        cures=(c.MEMLOCK, c.HOST_FEWER),
        certain=False,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("an operation that a graph cannot record was called during capture"),
        pattern=r"operation not permitted when (?:a )?stream is capturing|StreamCaptureUnsupported"
        r"|error code is 10702[5-9]|error code is 10703\d|capture.{0,30}(?:unjoined|invalidated)",
        example="RuntimeError: CUDA error: operation not permitted when stream is capturing",
        unless=r"MallocHost|out of memory|EL0004|2070\d\d|EI0006",
        cures=(c.ENGINE_FIX, c.EAGER, c.NO_GRAPH),
        rank=SYMPTOM,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("the disk is full"),
        pattern=r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]",
        unless=r"/dev/shm|psm_|shared memory|Failed to apply for memory",
        example="OSError: [Errno 28] No space left on device: '/root/.cache/vllm'",
        cures=(c.DISK,),
    ),
    Row(
        kind="not-memory-at-all",
        title=text("the port is in use by another process"),
        pattern=r"(?i:address) already in use|EADDRINUSE|\[Errno 98\]|EI0019|EI0020|EJ0003"
        r"|port \d+ is (?:already )?(?:in use|occupied|not available)|[Bb]ind.{0,40}port.{0,40}fail"
        r"|Failed to (?:enable listening|bind the IP port)",
        example="OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): "
        "address already in use",
        cures=(c.PORT, c.HCCL_PORT),
        rank=ROOT,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a limit of the host on open files or processes is reached"),
        pattern=r"Too many open files|\[Errno 24\]|can't start new thread|pthread_create failed"
        r"|fork: (?:retry: )?Resource temporarily unavailable|\[Errno 11\] Resource temp",
        example="OSError: [Errno 24] Too many open files",
        cures=(c.LIMITS,),
    ),
    Row(
        kind="not-memory-at-all",
        title=text("Ray has fewer devices or nodes than the engine asks for"),
        pattern=r"No available node types can fulfill resource request|placement group.{0,120}"
        r"(?:timeout|cannot be|not be (?:created|placed)|infeasible)|The number of required \w+ "
        r"exceeds the total number|Current node has no \w+ available|Total number of GPUs.{0,60}"
        r"less than",
        example="ValueError: Current node has no NPU available. current_node_resource={'CPU': 8.0}",
        cures=(c.DEVICES, c.DEVICES_CUDA),
    ),
    Row(
        kind="host-memory",
        title=text("a process was killed from outside, most often because host memory ran out"),
        pattern=r"^\s*(?:\S{0,60}line \d+: +\d+ )?Killed\b"
        r"|[Ee]xit(?:ed with)? (?:code|status)(?: is)?:? ?(?:-9"
        r"|137)"
        r"\b|signal(?:ed)? ?:? ?(?:9|SIGKILL)\b|exitcode:? ?-9|died with.{0,40}Signals\.SIGKILL"
        r"|\+?\d+ Killed +(?:python|vllm|sglang)|Failed core proc\(s\): \{[^}]{0,200}: -9\b",
        example="INFO GPU KV cache size: 300,000 tokens\nKilled",
        cures=(c.HOST_MORE, c.HOST_FEWER),
        certain=False,
        rank=SYMPTOM,
        quiet=True,
    ),
    Row(
        kind="host-memory",
        title=text("a worker of Ray ended without a word, most often because host memory ran out"),
        pattern=r"Worker unexpectedly exits with a connection error"
        r"|killed by SIGKILL by OOM killer",
        example="Worker exit detail: Worker unexpectedly exits with a connection error code 2.",
        cures=(c.HOST_MORE, c.HOST_FEWER, c.FIRST_RANK),
        certain=False,
        rank=WRAPPER,
        quiet=True,
        source="docs.ray.io: Out-Of-Memory Prevention",
    ),
    Row(
        kind="host-memory",
        title=text("processes ended without a word, as they do when the kernel kills them"),
        pattern=r"There appear to be \d+ leaked (?:shared_memory|semaphore) objects",
        example="UserWarning: resource_tracker: There appear to be 5 leaked shared_memory objects "
        "to clean up at shutdown.",
        unless=r"\b\w+Error\b|EngineDead|\[\[serving\]\]|startup complete|out of memory|EngineCore"
        r"|Shutting down|SIGTERM|SIGINT|Killed",
        cures=(c.HOST_MORE, c.HOST_FEWER, c.LMCACHE_SIZE),
        certain=False,
        rank=WRAPPER,
        quiet=True,
        source="LMCache#949",
    ),
    Row(
        kind="host-memory",
        title=text("a tensor on the host could not be written: its pinned memory was refused"),
        pattern=r"Segfault encountered(?:.*\n){1,40}?.*(?:fill_kernel"
        r"|fill_non_native_type|copy_kernel)",
        example='!!!!!!! Segfault encountered !!!!!!!\n  File "<unknown>", line 0, in fill_kernel',
        cures=(c.MEMLOCK, c.HOST_MORE),
        certain=False,
        rank=SYMPTOM,
        source="torch_npu 2.10: a refused pinned tensor is handed out as a null pointer",
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a process crashed in native code"),
        pattern=r"Segmentation fault|SIGSEGV|Signals\.SIGSEGV|[Ee]xit(?:ed with)?"
        r" (?:code|status):? ?(?:-11"
        r"|139)\b|Failed core proc\(s\): \{[^}]{0,200}: -11\b"
        r"|SIGABRT|Fatal Python error|free\(\): invalid|double free|corrupted (?:size"
        r"|double-linked)",
        unless=r"bad_alloc|out of memory|Bus error",
        example="!!!!!!! Segfault encountered !!!!!!!\nSegmentation fault (core dumped)",
        cures=(c.ENGINE_FIX, c.VERSIONS),
        rank=SYMPTOM,
    ),
)
