"""KV connectors and stores: Mooncake, LMCache, Nixl, the memory pool of vllm-ascend."""

from __future__ import annotations

from vllm_memprof.causes import cures as c
from vllm_memprof.causes import values as v
from vllm_memprof.causes.rows import SYMPTOM, WRAPPER, Row
from vllm_memprof.text import text

ROWS = (
    Row(
        kind="connector",
        title=text("two connectors register one range of memory with different lengths"),
        pattern=r"(?:new memory|memory region).{0,120}overlaps|CheckOverLapAndInsert",
        example="[GlobalMemRegMgr][CheckOverLapAndInsert]The new memory[type:DEVICE, addr:0x1] "
        "overlaps with an existing memory",
        cures=(c.ENGINE_FIX, c.CONNECTOR_SET),
        source="vllm-ascend#15624",
    ),
    Row(
        kind="connector",
        title=text("the store's memory cannot be registered: driver and feature do not match"),
        pattern=r"(?i:register) mem ret:\d+|Failed to mount segment|register_local_memory_failed",
        example="E0419 16:59:47.1 1 ascend_direct_transport.cpp:487] Register mem ret:207000.\n"
        "E0419 16:59:47.2 1 real_client.cpp:331] Failed to mount segment: INVALID_PARAMS",
        cures=(c.DRIVER, c.FABRIC, c.CONNECTOR_SET),
        source="vllm-ascend#8420",
    ),
    Row(
        kind="connector",
        title=text("the code of a KV connector met what it does not handle"),
        pattern=r"File \"[^\"\n]*(?:nixl|mooncake|lmcache|p2p_nccl|ascend_store|llmdatadist)"
        r"[^\"\n]*\", line \d+, in \w+\n(?:.*\n){0,2}?.{0,160}?(?:Assertion|Runtime|Value|Key|Type)"
        r"Error\b",
        unless="out of memory|EL0004",
        example='  File "/opt/nixl_connector.py", line 7, in add_remote_agent\n    assert a == b\n'
        "AssertionError",
        cures=(c.CONNECTOR_SET,),
        source="vllm#23086",
    ),
    Row(
        kind="connector",
        title=text("the KV transfer between servers failed"),
        pattern=r"(?:[Mm]ooncake|[Nn]ixl|NIXL|KVTransfer|kv_transfer|TransferEngine|AscendStore"
        r"|LLMDataDist|llm_datadist).{0,160}(?:[Ff]ail|rror|refused|timed? ?out)"
        r"|Failed to (?:transfer|pull|load|send) (?:the )?(?:KV|kv)|KV transfer.{0,60}fail"
        r"|Failed to connect to (?:metadata|master) server|KVTransferError"
        r"|(?:Decode|Prefill) (?:transfer|bootstrap) failed|Failed to connect to segment",
        unless=r"out of memory|No module named|cannot import name|GLIBC|cannot open shared",
        example="ERROR mooncake_connector.py] Mooncake transfer engine initialization failed.",
        cures=(c.CONNECTOR_SET, c.NETWORK),
        rank=SYMPTOM,
    ),
    Row(
        kind="host-memory",
        title=text("pinned host memory of this size is refused"),
        pattern=r"register ptr failed",
        unless=r"mooncake|Mooncake",
        example="RuntimeError: register ptr failed",
        cures=(c.LMCACHE_SIZE, c.MEMLOCK, c.HOST_FEWER),
        source="LMCache-Ascend#242",
    ),
    Row(
        kind="host-memory",
        title=text("pinned host memory of this size is refused"),
        pattern=r"cudaHostRegister.{0,60}(?:fail|rror)|aclrtHostRegister.{0,60}"
        r"(?:fail|rror)|cudaHostAlloc.{0,60}(?:fail|out of memory)|cudaMallocHost.{0,40}fail"
        r"|(?:aclrtMallocHost|MallocHostWithCfg|rtMallocHost|halHostRegister|HostRegister)\w*"
        r".{0,120}(?:fail|20\d{4}|rror)|(?i:pinned|pin) memory.{0,40}(?:fail|could not)",
        unless=r"mooncake|Mooncake",
        example="NPU function error: aclrtMallocHostWithCfg, error code is 207001",
        cures=(c.MEMLOCK, c.HOST_FEWER),
        source="docs.docker.com: --ulimit memlock",
    ),
    Row(
        kind="host-memory",
        title=text("pinned host memory of this size is refused"),
        pattern=r"CUDA error: (?:invalid argument|out of memory)|(?:error code is|ret:) ?207001",
        beside=r"pin_memory=True|MixedMemoryAllocator|LocalCPUBackend|PinMemoryAllocator"
        r"|host_memory_pool|MHATokenToKVPoolHost",
        example="    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)\n"
        "RuntimeError: CUDA error: invalid argument",
        cures=(c.LMCACHE_SIZE, c.MEMLOCK, c.HOST_FEWER),
        certain=False,
        source="LMCache#1051",
    ),
    Row(
        kind="host-memory",
        title=text("the host's memory does not hold the cache that is kept there"),
        pattern=r"Not enough host memory available|host memory.{0,40}(?:not enough|insufficient)"
        r"|hicache.{0,80}(?:not enough|exceed)|Too large swap space",
        example="ValueError: Not enough host memory available. Requesting 300.00 GB but only have "
        "100.00 GB free.",
        cures=(c.HOST_FEWER, c.HOST_MORE),
        source="sglang/srt/mem_cache/memory_pool_host.py",
    ),
    Row(
        kind="host-memory",
        title=text("each worker pins a host cache of its own, and the log ends while they do"),
        pattern=r"max_local_cpu_size'?: '?(?P<size>[\d.]+)",
        holds=v.is_large,
        unless=r"startup complete|KV cache size|POST /v1|throughput:",
        example="LMCache INFO: LMCache Configuration: {'max_local_cpu_size': '300.0 GB'}\n"
        "LMCache INFO: Creating LMCacheEngine instance vllm-instance",
        cures=(c.LMCACHE_SIZE, c.HOST_MORE),
        quiet=True,
        certain=False,
        rank=WRAPPER,
        source="LMCache#949",
    ),
)
